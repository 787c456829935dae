"""The prompts of simulated seekers and of ESC-Eval's judges, written for this project.

`training.evaluation.simulated_dialogues.load_prompt` reads them; a config can name another folder.
"""
