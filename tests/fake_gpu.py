"""A GPU's memory without a GPU: real passes of a real model, whose decoder layers run out of memory where this says so.

As a program it runs a rank of a planned run on such memory: `fake_gpu.py RUN_FOLDER '{"allocatable": [2.0, 1.5]}'`, a number a rank; on the host's
own memory for `{}`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.process import Process
from sft_play.training.memory import MemoryMeter

GIB = 2**30


class FakeGpu(MemoryMeter):
    """Memory in which a step takes `fixed` bytes, and `token` bytes for each token and layer, a tenth of it where that is checkpointed.

    From `cliff` tokens of a micro-batch on it takes twice as much, which two smaller steps do not tell.
    """

    def __init__(
        self, allocatable: float, fixed: float = 0.5, token: float = 1 / 1024, cliff: int = 10**9
    ):
        super().__init__(Process.alone(torch.device("cpu")))
        self.is_exact = True
        self.allocatable, self.fixed, self.token = (
            round(value * GIB) for value in (allocatable, fixed, token)
        )
        self.cliff, self.held, self.peak = cliff, self.fixed, self.fixed
        self.failures = 0

    def of_process(self, process: Process, used_before_bytes: int) -> "FakeGpu":
        """Become the memory of a rank; stands in for the constructor of MemoryMeter."""
        self.process = process
        return self

    def count_forward_passes(self) -> Any:
        """Count every forward pass of every model from here on; return the handle that ends it."""
        return nn.modules.module.register_module_forward_pre_hook(self._count)

    def reset(self) -> None:
        self.peak = self.held

    def peak_bytes(self) -> int:
        return self.peak

    def allocatable_bytes(self) -> int:
        return self.allocatable

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (
            not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0
        ):  # an evaluation, or a layer that is computed again
            return
        if isinstance(module, nn.Embedding):
            self.held = self.fixed
        elif isinstance(module, GradientCheckpointingLayer):
            tokens = args[0].shape[:2].numel()
            share = self.token // 10 if module.gradient_checkpointing else self.token
            self.held += tokens * share * (2 if tokens >= self.cliff else 1)
            self.peak = max(self.peak, self.held)
        if self.held > self.allocatable:
            self.held, self.failures = self.fixed, self.failures + 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {self.allocatable / GIB:.2f} GiB are all that the fake has"
            )


def main() -> int:
    from sft_play.training import entry, runtime, worker

    memory = {name: values[runtime.rank()] for name, values in json.loads(sys.argv[2]).items()}
    if memory:
        gpu = FakeGpu(**memory)
        gpu.count_forward_passes()
        worker.MemoryMeter = gpu.of_process
    return entry.main(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
