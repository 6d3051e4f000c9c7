"""Import Triton if it is installed: torch for CPUs does not include it. Helpers of all kernels.

Without Triton, modules with kernels can be imported, but no kernel can be launched.
"""

from typing import Any, Self

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:

    class Missing:
        """Stands in for any name of Triton. As a decorator it returns the function unchanged."""

        def __getattr__(self, name: str) -> Self:
            return self

        def __call__(self, *args: Any, **_: Any) -> Any:
            return args[0] if args else self

    triton = tl = libdevice = Missing()

__all__ = ["libdevice", "load_float32", "on_device_of", "program_number", "tl", "triton"]


@triton.jit
def program_number():
    """Return the index of a program in 64 bits: offsets in a tensor exceed 2^31."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def load_float32(place, inside):
    """Return numbers in float32, 0 outside of the tensor."""
    return tl.load(place, inside, 0).to(tl.float32)


def on_device_of(tensor: Tensor) -> torch.cuda.device:
    """Make the GPU of a tensor the current one, on which Triton launches kernels.

    For a tensor in host memory, which Triton's interpreter accepts, no GPU is set.
    """
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
