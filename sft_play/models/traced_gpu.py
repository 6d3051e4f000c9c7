"""Whether the tensors of a trace stand for those of a GPU, whose kernels only allocate.

What a kernel allocates is next to its reference: outputs, buffers and what it saves for its
backward pass.
"""

import contextlib
from collections.abc import Iterator

is_on = False  # read as an attribute of this module: without a call in each kernel


@contextlib.contextmanager
def tracing_gpu(is_gpu: bool) -> Iterator[None]:
    """Let kernels inside allocate what they would on a GPU."""
    global is_on
    before = is_on
    is_on = is_gpu
    try:
        yield
    finally:
        is_on = before
