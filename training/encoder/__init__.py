"""The shipped sentence encoder: a static embedding table distilled from a sentence transformer."""
