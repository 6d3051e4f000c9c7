"""Frozen linear weights in float8 (e4m3), products of float8 numbers, and how they are loaded."""
