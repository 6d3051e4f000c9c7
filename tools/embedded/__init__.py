"""Makes the tiny base model, its pre-training text and its task. Imports nothing of sft_play."""
