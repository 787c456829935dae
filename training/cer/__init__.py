"""The CER dataset: from raw corpora to rows that are ready for training, one file per step."""
