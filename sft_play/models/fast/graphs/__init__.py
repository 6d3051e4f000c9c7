"""The layers of a decoder as CUDA graphs."""
