"""COMPEER-nano: the small Qwen2.5-VL that this repository trains from nothing.

In order: `tokenizer` (byte-level BPE), `pretrain` (plain English and chat on a CPU or a GPU),
`vision` (the image tower learns faces). What follows, `training.sft` and
`training.reward_model`, is the same code for nano and for a 7B model.
"""
