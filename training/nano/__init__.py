"""COMPEER-nano: a small Qwen2.5-VL trained from scratch.

`tokenizer` and `pretrain` are followed by `training.vision`, `training.sft` and
`training.reward_model`.
"""
