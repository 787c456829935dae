"""Supervised fine-tuning of the policy: dialogues become turns in the output grammar."""
