"""Token mixers that keep a state, which starts again at each document."""
