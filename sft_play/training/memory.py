"""The memory of one rank.

Peaks of a run's phases and steps, what is left, and which component holds how much.
"""

import contextlib
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from sft_play.models.parameters import adapter_parameters, base_tensors, stored_tensors
from sft_play.plan.devices import host_memory
from sft_play.process import Process


@dataclass(frozen=True)
class Peaks:
    """The largest peaks over all ranks, in bytes."""

    measured: int  # of the whole run: reserved, and the context
    reserved: int  # by torch's allocator; on a CPU the resident memory
    phases: dict[str, int]  # with the context; without phases that no rank measured


class MemoryMeter:
    """Reads the allocator of this rank's GPU, or the resident memory of a process without one.

    A phase is one of plan.memory.PHASES and lasts until the next one is entered. A CPU has no peak
    of a phase. The allocator's counters make nobody wait for the GPU.
    """

    def __init__(self, process: Process, used_before_bytes: int = 0):
        """`used_before_bytes` is what other programs held of this rank's GPU before the run."""
        self.process = process
        self.used_before_bytes = used_before_bytes
        self.is_exact = process.device.type == "cuda"  # exact enough to choose a batch by
        self.current_phase: str | None = None
        self._is_paused = False
        self._phases: dict[str, int] = {}
        self._reserved = 0
        if self._is_gpu:
            torch.cuda.init()

    @property
    def _is_gpu(self) -> bool:
        return self.process.device.type == "cuda"

    def enter(self, phase: str | None) -> None:
        """End the current phase and begin `phase`, or none."""
        if self._is_paused:
            return
        self._record()
        self.current_phase = phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase inside this context. After an error it is still the current one."""
        self.enter(name)
        yield
        self.enter(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no phase inside this context, where steps are measured by `reset` and `peak_bytes`."""
        self.enter(None)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def watch_optimizer(self, optimizer: Any) -> None:
        """Enter the phase `optimizer` for each step of an optimizer, which may be wrapped.

        DeepSpeed takes it within its backward pass.
        """
        *_, inner = _unwrapped(optimizer)
        inner.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        inner.register_step_post_hook(lambda *_: self.enter(None))

    def reset(self) -> None:
        """Forget the peak that `peak_bytes` returns."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self.process.device)

    def peak_bytes(self) -> int:
        """Return the most that was allocated since `reset` or the begin of the phase.

        On a CPU it is what is resident now: what a step left rather than what it took.
        """
        if self._is_gpu:
            return torch.cuda.max_memory_allocated(self.process.device)
        return psutil.Process().memory_info().rss

    def allocatable_bytes(self) -> int:
        """Return what this process can hold in all: what it holds now, and what is free."""
        if not self._is_gpu:
            return self.peak_bytes() + host_memory().available_bytes
        device = self.process.device
        free, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + torch.cuda.memory_reserved(device), limit)

    def context_bytes(self) -> int:
        """Return what the GPU holds for this process outside torch's allocator, 0 on a CPU.

        That is CUDA's context, cuBLAS, NCCL and paged optimizer states. Another program that has
        begun since the run was planned is counted with it.
        """
        if not self._is_gpu:
            return 0
        device = self.process.device
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return max(0, outside - self.used_before_bytes)

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak of each phase that was entered, in bytes, with the context.

        {} on a CPU.
        """
        self._record()
        context = self.context_bytes()
        return {name: allocated + context for name, allocated in self._phases.items()}

    def reserved_peak_bytes(self) -> int:
        """Return the most that torch's allocator reserved during the run.

        On a CPU the resident memory.
        """
        if not self._is_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        self._record()
        return self._reserved

    def run_peak_bytes(self) -> int:
        """Return the peak of the whole run: what was reserved, and the context."""
        return self.reserved_peak_bytes() + self.context_bytes()

    def peaks_over_ranks(self, phases: Iterable[str]) -> Peaks:
        """Return the largest peaks of all ranks, of the run and of each of `phases`.

        Every rank must call it.
        """
        own = self.phase_peaks()
        largest = {name: self.process.max(own.get(name, 0)) for name in phases}
        return Peaks(
            measured=self.process.max(self.run_peak_bytes()),
            reserved=self.process.max(self.reserved_peak_bytes()),
            phases={name: size for name, size in largest.items() if size > 0},
        )

    def _record(self) -> None:
        """Add the allocator's peaks to those of the run and of the current phase, and begin anew."""
        if not self._is_gpu:
            return
        counters = torch.cuda.memory_stats_as_nested_dict(self.process.device)
        self._reserved = max(self._reserved, counters["reserved_bytes"]["all"]["peak"])
        if self.current_phase is not None:
            allocated = counters["allocated_bytes"]["all"]["peak"]
            before = self._phases.get(self.current_phase, 0)
            self._phases[self.current_phase] = max(before, allocated)
        torch.cuda.reset_peak_memory_stats(self.process.device)


def components(model: torch.nn.Module, optimizer: Any, device: torch.device) -> dict[str, int]:
    """Return the bytes on `device` of weights, adapters, gradients and optimizer now.

    Storages count whole and once, quantised weights with their constants. `optimizer` may be
    wrapped, or None.
    """
    optimizers = [] if optimizer is None else list(_unwrapped(optimizer))
    stepped, state = [], []
    if optimizers:
        stepped = [p for group in optimizers[-1].param_groups for p in group["params"]]
        state = list(_tensors_in(list(optimizers[-1].state.values())))
    gradients = [parameter.grad for parameter in (*model.parameters(), *stepped)]
    tensors = {
        "weights": [*base_tensors(model), *model.buffers()],
        "adapters": list(stored_tensors(adapter_parameters(model))),
        "gradients": [*gradients, *_partitioned_gradients(optimizers)],
        "optimizer": [*state, *stepped],
    }
    seen: set[int] = set()
    return {
        name: sum(_new_storage_bytes(tensor, device, seen) for tensor in held)
        for name, held in tensors.items()
    }


def _unwrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and what it wraps: accelerate's, DeepSpeed's, and innermost torch's."""
    yield optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
        yield optimizer


def _partitioned_gradients(optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the gradients that ZeRO keeps.

    Lists by group in stages 1 and 2, one buffer in stage 3.
    """
    for optimizer in optimizers:
        yield from _tensors_in(getattr(optimizer, "averaged_gradients", None))
        yield from _tensors_in(getattr(optimizer, "grad_partitions_flat_buffer", None))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(child)


def _new_storage_bytes(tensor: torch.Tensor | None, device: torch.device, seen: set[int]) -> int:
    """Return the bytes of a tensor's storage on `device`, 0 if it is in `seen`; add it there."""
    if not isinstance(tensor, torch.Tensor) or tensor.device != device:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
