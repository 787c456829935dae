"""COMPEER's domain and inference: dialogues, structured reasoning, prompts, models and judges.

This package knows neither the user interface nor training; both stand on it.
"""
