"""Define numbers in float8 (e4m3): the dtype, and rows that each have a scale."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest e4m3 number
# Scales are multiplied by it. On a GPU, torch does the same when a tensor is divided by a number.
ONE_OVER_LARGEST = 1 / LARGEST


class Quantized(NamedTuple):
    """Rows in float8: x = values * scales."""

    values: Tensor  # (N, F) in FLOAT8
    scales: Tensor  # (N,) float32

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (N, F) in `dtype`."""
        return (self.values.float() * self.scales[:, None]).to(dtype)
