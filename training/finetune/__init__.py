"""What fine-tuning has in common: bases, adapters, trl, rows with a shared prefix."""
