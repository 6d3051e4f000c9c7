"""What modules with Triton kernels share: the import of Triton, traces without a GPU, and helpers.

torch for CPUs does not include Triton. Modules with kernels can be imported without it, but no
kernel can be launched.

The tensors of a trace may represent those of a GPU. Kernels then only allocate. A kernel's
allocations are defined next to its reference: outputs, buffers and what it saves for its backward
pass.
"""

import contextlib
from collections.abc import Iterator
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

is_traced = False  # read as an attribute of this module: a call in each kernel is not needed


@contextlib.contextmanager
def tracing_gpu(is_gpu: bool) -> Iterator[None]:
    """Let kernels in this context allocate what they would allocate on a GPU."""
    global is_traced
    before = is_traced
    is_traced = is_gpu
    try:
        yield
    finally:
        is_traced = before


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
