"""Compile Triton kernels for GPUs that are not here.

Inside `compiling_for` a launch on CPU tensors compiles the kernel to machine code of that GPU, and
launches nothing. What a kernel would have written stays as it was.
"""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class AbsentGpu:
    """A driver of Triton that knows a GPU's kind, and has none."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, warp_size=32)

    def get_current_device(self) -> int:
        return self.capability  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[CompiledKernel]]:
    """Compile what is launched for GPUs of a capability (90: 9.0), and collect it."""
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    before = driver._active
    driver.set_active(AbsentGpu(capability))
    try:
        with (
            patch.object(JITFunction, "run", compile_only),
            patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
            triton.knobs.compilation.scope(),
        ):
            yield compiled
    finally:
        driver._active = before
