"""What the kernels know of the processes that train together."""

import contextlib
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """The processes that train a model together, and this one's device."""

    device: torch.device
    compute_dtype: torch.dtype  # of matrix multiplications
    world_size: int

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context to run a model in."""

    def max(self, number: int) -> int:
        """Return the largest of all ranks' numbers. Every rank must call it."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Every rank must call it."""
