"""Load frozen linear weights in float8 (e4m3), and multiply float8 matrices."""
