"""The chat screen with its inspector."""
