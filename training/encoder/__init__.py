"""The shipped sentence encoder: a table of word pieces that learns to compare texts as its teacher does."""
