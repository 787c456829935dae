"""The steps from raw corpora to CER rows, a module each."""
