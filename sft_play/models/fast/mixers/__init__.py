"""Token mixers that keep a state, which starts anew at each document."""
