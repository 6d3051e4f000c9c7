"""Whether a trace's tensors represent those of a GPU, whose kernels then only allocate.

A kernel's allocations are defined next to its reference: outputs, buffers and what it saves for its
backward pass.
"""

import contextlib
from collections.abc import Iterator

is_on = False  # read as an attribute of this module: a call in each kernel is not needed


@contextlib.contextmanager
def tracing_gpu(is_gpu: bool) -> Iterator[None]:
    """Let kernels in this context allocate what they would allocate on a GPU."""
    global is_on
    before = is_on
    is_on = is_gpu
    try:
        yield
    finally:
        is_on = before
