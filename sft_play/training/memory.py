"""Memory measured on one rank: peaks by phase, what is free, and bytes by component."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from sft_play.models.parameters import adapter_parameters, base_tensors, stored_tensors
from sft_play.plan.devices import GIB, host_memory
from sft_play.process import Process
from sft_play.runs.report import RankMemory
from sft_play.training.rank_memory import rank_memory, resident_peak_bytes
from sft_play.training.step_times import StepTimes


@dataclass(frozen=True)
class Peaks:
    """The largest peaks over all ranks, in bytes."""

    measured: int  # of the whole run: reserved by the allocator, plus the context
    reserved: int  # by torch's allocator; on a CPU the resident memory
    phases: dict[str, int]  # allocated plus the context; without phases that no rank measured


class MemoryMeter:
    """Reads the allocator of this rank's GPU, or the resident memory of a CPU process.

    A phase is one of plan.memory.PHASES and lasts until the next one is entered. A CPU has no peaks
    by phase. Reading the allocator's counters does not synchronize with the GPU.
    """

    def __init__(self, process: Process, used_before_bytes: int = 0):
        """`used_before_bytes` is what other programs used on this rank's GPU before the run."""
        self.process = process
        self.used_before_bytes = used_before_bytes
        self.is_exact = process.device.type == "cuda"  # exact enough to choose a batch size
        self.current_phase: str | None = None
        self._is_paused = False
        self._phases: dict[str, int] = {}
        self._reserved = 0
        self._before_training = 0
        self.times = StepTimes(process.device)
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
        self.times.enter(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase for this context. After an error it stays the current phase."""
        self.enter(name)
        yield
        self.enter(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no phase inside this context: `reset` and `peak_bytes` measure there."""
        self.enter(None)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def watch_optimizer(self, optimizer: Any) -> None:
        """Enter the phase `optimizer` for each step of an optimizer, which may be wrapped.

        DeepSpeed steps it inside its backward pass.
        """
        *_, inner = _unwrapped(optimizer)
        inner.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        inner.register_step_post_hook(lambda *_: self.enter(None))

    def reset(self) -> None:
        """Reset the peak that `peak_bytes` returns."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self.process.device)

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes since `reset` or the start of the phase.

        On a CPU it is the memory that is resident now, not a peak.
        """
        if self._is_gpu:
            return torch.cuda.max_memory_allocated(self.process.device)
        return psutil.Process().memory_info().rss

    def allocatable_bytes(self) -> int:
        """Return what this process can allocate in all: what it holds now plus what is free."""
        if not self._is_gpu:
            return self.peak_bytes() + host_memory().available_bytes
        device = self.process.device
        free, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + torch.cuda.memory_reserved(device), limit)

    def context_bytes(self) -> int:
        """Return what this process uses on the GPU outside torch's allocator, 0 on a CPU.

        That is the CUDA context, cuBLAS, NCCL and paged optimizer states. Programs that started on
        the GPU after the run was planned are counted too.
        """
        if not self._is_gpu:
            return 0
        device = self.process.device
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return max(0, outside - self.used_before_bytes)

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak bytes of each phase that was entered, with the context; {} on a CPU."""
        self._record()
        context = self.context_bytes()
        return {name: allocated + context for name, allocated in self._phases.items()}

    def reserved_peak_bytes(self) -> int:
        """Return the peak that torch's allocator reserved in the run; on a CPU, resident memory."""
        if not self._is_gpu:
            return resident_peak_bytes()
        self._record()
        return self._reserved

    def note_before_training(self) -> None:
        """Note the peak so far as what the run takes before training."""
        self._before_training = self.reserved_peak_bytes()

    def of_rank(self) -> RankMemory:
        """Return the memory of this rank's device, with the peak so far."""
        peak = self.reserved_peak_bytes()
        return rank_memory(self.process.rank, self.process.device, self._before_training, peak)

    def gib_now(self) -> dict[str, float]:
        """Return what this rank holds now, and the most that it allocated in a step so far."""
        if not self._is_gpu:
            return {"rss_gib": self.peak_bytes() / GIB}
        device = self.process.device
        steps = [self._phases.get(phase, 0) for phase in ("forward", "backward", "optimizer")]
        return {
            "mem_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "mem_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "mem_peak_gib": max(steps) / GIB,
        }

    def run_peak_bytes(self) -> int:
        """Return the peak of the whole run: what the allocator reserved, plus the context."""
        return self.reserved_peak_bytes() + self.context_bytes()

    def peaks_over_ranks(self, phases: Iterable[str]) -> Peaks:
        """Return the largest peaks over all ranks. Every rank must call it."""
        own = self.phase_peaks()
        largest = {name: self.process.max(own.get(name, 0)) for name in phases}
        return Peaks(
            measured=self.process.max(self.run_peak_bytes()),
            reserved=self.process.max(self.reserved_peak_bytes()),
            phases={name: size for name, size in largest.items() if size > 0},
        )

    def _record(self) -> None:
        """Update the peaks of the run and of the current phase, and reset the allocator's."""
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
    """Return the current bytes on `device` of weights, adapters, gradients and optimizer.

    Each storage counts once and as a whole; the constants of quantised weights are included.
    `optimizer` may be wrapped, or None.
    """
    optimizers = [] if optimizer is None else list(_unwrapped(optimizer))
    stepped: list[torch.Tensor] = []
    state: list[torch.Tensor] = []
    if optimizers:
        innermost = optimizers[-1]
        for group in innermost.param_groups:
            stepped += group["params"]
        state += _tensors_in(list(innermost.state.values()))
    gradients = [parameter.grad for parameter in (*model.parameters(), *stepped)]
    tensors = {
        "weights": [*base_tensors(model), *model.buffers()],
        "adapters": list(stored_tensors(adapter_parameters(model))),
        "gradients": [*gradients, *_partitioned_gradients(optimizers)],
        "optimizer": [*state, *stepped],
    }
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for name, held in tensors.items():
        sizes[name] = sum(_new_storage_bytes(tensor, device, seen) for tensor in held)
    return sizes


def _unwrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and what it wraps: accelerate's, DeepSpeed's, and innermost torch's."""
    yield optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
        yield optimizer


def _partitioned_gradients(optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield ZeRO's gradients: lists by group in stages 1 and 2, one buffer in stage 3."""
    for optimizer in optimizers:
        yield from _tensors_in(getattr(optimizer, "averaged_gradients", None))
        yield from _tensors_in(getattr(optimizer, "grad_partitions_flat_buffer", None))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors_in(child)


def _new_storage_bytes(tensor: torch.Tensor | None, device: torch.device, seen: set[int]) -> int:
    """Return the bytes of a tensor's storage on `device`, 0 if in `seen`; add it to `seen`."""
    if not isinstance(tensor, torch.Tensor) or tensor.device != device:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
