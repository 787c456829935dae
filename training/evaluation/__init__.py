"""Evaluation of policies on held-out dialogues and of judges on held-out labels."""
