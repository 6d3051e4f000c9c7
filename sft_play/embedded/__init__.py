"""The embedded default: a small town's text, a tiny base model and a task, all made here. Imports nothing else of sft_play."""
