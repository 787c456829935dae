"""The CER data set: from raw corpora to rows for training, one module per step."""
