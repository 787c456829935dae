"""The base of COMPEER-small: a pre-trained language model in a Qwen2.5-VL architecture."""
