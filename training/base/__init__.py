"""The base of COMPEER-small: a pre-trained language model, made into a Qwen2.5-VL of ours."""
