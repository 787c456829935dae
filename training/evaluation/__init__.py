"""Measuring what was trained: the policy on held-out dialogues, the judge on held-out verdicts."""
