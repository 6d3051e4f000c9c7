"""A fake of GPU memory: real passes of a real model, whose decoder layers raise OutOfMemoryError."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_kernels.process import Process
from sft_play.training.memory import MemoryMeter

GIB = 2**30


class FakeGpu(MemoryMeter):
    """Memory in which a step takes `fixed` GiB, and `token` GiB per token and layer.

    A checkpointed layer takes a tenth. A micro-batch of so many tokens or more as `cliffs` has takes
    so many times as much, which cannot be predicted from two smaller steps.
    """

    def __init__(
        self,
        allocatable: float,
        fixed: float = 0.5,
        token: float = 1 / 1024,
        cliffs: Mapping[int, float] = MappingProxyType({}),
    ):
        super().__init__(Process.alone(torch.device("cpu")))
        self.is_exact = True
        self.allocatable = round(allocatable * GIB)
        self.fixed = round(fixed * GIB)
        self.token = round(token * GIB)
        self.cliffs = cliffs
        self.held = self.fixed
        self.peak = self.fixed
        self.failures = 0

    def of_process(self, process: Process, used_before_bytes: int) -> "FakeGpu":
        """Use this memory for a rank; replaces the constructor of MemoryMeter."""
        self.process = process
        return self

    def count_forward_passes(self) -> Any:
        """Count all further forward passes of all models; return the hook's handle."""
        return nn.modules.module.register_module_forward_pre_hook(self._count)

    def peak_bytes(self) -> int:
        return self.peak

    def allocatable_bytes(self) -> int:
        return self.allocatable

    def _record(self) -> None:
        if self.current_phase is not None:
            before = self._phases.get(self.current_phase, 0)
            self._phases[self.current_phase] = max(before, self.peak)
        self.peak = self.held

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_evaluation = not torch.is_grad_enabled()
        is_recomputed = torch._C._current_graph_task_id() >= 0  # by activation checkpointing
        if is_evaluation or is_recomputed:
            return
        if isinstance(module, nn.Embedding):
            self.held = self.fixed
        elif isinstance(module, GradientCheckpointingLayer):
            tokens = args[0].shape[:2].numel()
            bytes_per_token = self.token
            if module.gradient_checkpointing:
                bytes_per_token //= 10
            factors = [self.cliffs[least] for least in sorted(self.cliffs) if tokens >= least]
            self.held += round(tokens * bytes_per_token * [1, *factors][-1])
            self.peak = max(self.peak, self.held)
        if self.held > self.allocatable:
            self.held = self.fixed
            self.failures += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {self.allocatable / GIB:.2f} GiB are all that the fake has"
            )


def use_fake_memory(values_by_rank: dict[str, list[float]]) -> None:
    """Give this rank its part of `values_by_rank`, FakeGpu's arguments; {} is the host's memory."""
    from sft_play.training import runtime, worker

    memory = {name: values[runtime.rank()] for name, values in values_by_rank.items()}
    if memory:
        gpu = FakeGpu(**memory)
        gpu.count_forward_passes()
        worker.MemoryMeter = gpu.of_process
