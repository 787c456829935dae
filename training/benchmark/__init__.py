"""Benchmarks of the demo (`measure`), of judging (`judging`) and of GRPO training steps (`grpo`)."""
