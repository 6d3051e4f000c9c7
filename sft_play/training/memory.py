"""Measure memory and time on one rank: peaks and seconds by phase, and bytes by component."""

import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from sft_kernels.process import Process
from sft_play.models.parameters import adapter_parameters, iter_base_tensors, stored_tensors
from sft_play.plan.devices import GIB, host_memory
from sft_play.runs.report import RankMemory
from sft_play.training.memory_lines import rank_memory, resident_peak_bytes

FOLD_AT = 256  # number of marks after which those that the GPU has passed are added up


class _Mark(NamedTuple):
    """The start of a part, which is also the end of the previous one."""

    moment: "torch.cuda.Event | float"  # seconds on a CPU
    part: str | None


class StepTimes:
    """Adds up the seconds between marks in the GPU's queue, or on the clock of a CPU.

    A part is one of the phases of MemoryMeter, which marks them: `backward` includes the
    collectives and the clipping of gradients, `optimizer` only the step of torch's optimizer.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._marks: deque[_Mark] = deque()
        self._seconds: dict[str, float] = defaultdict(float)

    def enter(self, part: str | None) -> None:
        """End the current part and begin `part`, or none."""
        moment: torch.cuda.Event | float = time.perf_counter()
        if self._is_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            # another GPU may be the current one, and marks on two GPUs have no time between them
            moment.record(torch.cuda.current_stream(self._device))
        self._marks.append(_Mark(moment, part))
        if len(self._marks) >= FOLD_AT:
            self._fold()

    def add(self, part: str, seconds: float) -> None:
        """Add seconds of the CPU that were measured elsewhere."""
        self._seconds[part] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds between marks since the last call, as far as the parts have ended."""
        self._fold()
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _fold(self) -> None:
        """Add up the time between marks that the GPU has passed, and drop all but the last mark."""
        while len(self._marks) > 1:
            begin, end = self._marks[0], self._marks[1]
            if self._is_gpu and not end.moment.query():
                return
            if begin.part is not None and self._is_gpu:
                self.add(begin.part, begin.moment.elapsed_time(end.moment) / 1000)  # from ms
            elif begin.part is not None:
                self.add(begin.part, end.moment - begin.moment)
            self._marks.popleft()


@dataclass(frozen=True)
class Peaks:
    """The largest peaks over all ranks, in bytes."""

    measured: int  # over the full run: reserved by the allocator, plus the context
    reserved: int  # by torch's allocator; on a CPU the resident memory
    phases: dict[str, int]  # allocated plus the context; without phases that no rank measured


class MemoryMeter:
    """Reads the allocator of this rank's GPU, or the resident memory of a CPU process.

    For a rank with several GPUs (model.device_map) each number is that of the fullest GPU.
    A phase is one of plan.memory.PHASES and lasts until the next one starts. A CPU has no peaks
    by phase. Reading the allocator's counters does not synchronize with the GPU.
    """

    def __init__(self, process: Process, used_before_bytes: Sequence[int] = ()):
        """`used_before_bytes` is what other programs used on this rank's GPUs before the run."""
        self.process = process
        self.used_before_bytes = used_before_bytes or (0,) * len(process.devices)
        self._is_gpu = process.is_gpu
        self.is_exact = process.is_gpu  # exact enough to choose a batch size
        self.current_phase: str | None = None
        self._phases: dict[str, int] = {}
        self._reserved = [0] * len(process.devices)
        self._before_training = self._reserved
        self.times = StepTimes(process.device)
        if self._is_gpu:
            torch.cuda.init()

    def enter(self, phase: str | None) -> None:
        """End the current phase and begin `phase`, or none."""
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
    def apart(self) -> Iterator[None]:
        """Exclude everything that is measured inside this context from the peaks of the run."""
        self.enter(None)
        kept = self._phases, self._reserved
        self._phases, self._reserved = {}, list(self._reserved)
        try:
            yield
        finally:
            self.enter(None)
            self._phases, self._reserved = kept

    def take_phases(self) -> dict[str, int]:
        """Return the peak of allocated bytes of each phase since the last call.

        On a CPU it is the memory that was resident when the phase ended.
        """
        self.enter(None)
        phases, self._phases = self._phases, {}
        return phases

    def watch_optimizer(self, optimizer: Any) -> None:
        """Enter the phase `optimizer` for each step of an optimizer, which may be wrapped.

        DeepSpeed steps it inside its backward pass.
        """
        inner = innermost(optimizer)
        inner.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        inner.register_step_post_hook(lambda *_: self.enter(None))

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes since the start of the phase.

        On a CPU it is the memory that is resident now, not a peak.
        """
        if self._is_gpu:
            return max(map(torch.cuda.max_memory_allocated, self.process.devices))
        return psutil.Process().memory_info().rss

    def allocatable_bytes(self) -> int:
        """Return the bytes that this process can allocate in total: used now plus free."""
        if not self._is_gpu:
            return self.peak_bytes() + host_memory().available_bytes
        found = []
        for device in self.process.devices:
            free, total = torch.cuda.mem_get_info(device)
            limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
            found.append(min(free + torch.cuda.memory_reserved(device), limit))
        return min(found)

    def used_bytes(self) -> int:
        """Return the bytes that this process uses now: the allocator's plus the context."""
        if not self._is_gpu:
            return self.peak_bytes()
        reserved = max(map(torch.cuda.memory_reserved, self.process.devices))
        return reserved + self.context_bytes()

    def context_bytes(self) -> int:
        """Return what this process uses on the GPU outside torch's allocator, 0 on a CPU.

        That is the CUDA context, cuBLAS, NCCL and paged optimizer states. Programs that started on
        the GPU after the run was planned are counted too.
        """
        if not self._is_gpu:
            return 0
        found = [0]
        for device, used_before in zip(self.process.devices, self.used_before_bytes, strict=True):
            free, total = torch.cuda.mem_get_info(device)
            found.append(total - free - torch.cuda.memory_reserved(device) - used_before)
        return max(found)

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak bytes of each phase that was entered, with the context; {} on a CPU."""
        if not self._is_gpu:
            return {}
        self._record()
        context = self.context_bytes()
        return {name: allocated + context for name, allocated in self._phases.items()}

    def _reserved_peaks(self) -> list[int]:
        """Return the peak that torch's allocator reserved, by device; on a CPU, resident memory."""
        if not self._is_gpu:
            return [resident_peak_bytes()]
        self._record()
        return list(self._reserved)

    def note_before_training(self) -> None:
        """Record the peak so far as the memory that the run needs before training."""
        self._before_training = self._reserved_peaks()

    def of_ranks(self) -> list[RankMemory]:
        """Return the memory of all ranks' devices, with the peaks so far. Every rank must call it.

        The GPUs of a run with one process count as ranks.
        """
        peaks = self._reserved_peaks()
        own = [
            rank_memory(
                self.process.rank + number, device, self._before_training[number], peaks[number]
            )
            for number, device in enumerate(self.process.devices)
        ]
        return list(itertools.chain.from_iterable(self.process.gather(own)))

    def gib_now(self) -> dict[str, float]:
        """Return what this rank uses now, and the most that it has allocated in a step so far."""
        if not self._is_gpu:
            return {"rss_gib": self.peak_bytes() / GIB}
        devices = self.process.devices
        steps = [self._phases.get(phase, 0) for phase in ("forward", "backward", "optimizer")]
        return {
            "mem_allocated_gib": max(map(torch.cuda.memory_allocated, devices)) / GIB,
            "mem_reserved_gib": max(map(torch.cuda.memory_reserved, devices)) / GIB,
            "mem_peak_gib": max(steps) / GIB,
        }

    def run_peak_bytes(self) -> int:
        """Return the peak of the full run: what the allocator reserved, plus the context."""
        return max(self._reserved_peaks()) + self.context_bytes()

    def peaks_over_ranks(self, phases: Iterable[str]) -> Peaks:
        """Return the largest peaks over all ranks. Every rank must call it."""
        own = Peaks(self.run_peak_bytes(), max(self._reserved_peaks()), self.phase_peaks())
        ranks = self.process.gather(own)
        largest = {name: max(rank.phases.get(name, 0) for rank in ranks) for name in phases}
        return Peaks(
            measured=max(rank.measured for rank in ranks),
            reserved=max(rank.reserved for rank in ranks),
            phases={name: size for name, size in largest.items() if size > 0},
        )

    def _record(self) -> None:
        """Update the peaks of the run and of the current phase, and reset the allocator's."""
        if not self._is_gpu:
            if self.current_phase is not None:
                self._phases[self.current_phase] = self.peak_bytes()
            return
        for number, device in enumerate(self.process.devices):
            counters = torch.cuda.memory_stats_as_nested_dict(device)
            reserved = counters["reserved_bytes"]["all"]["peak"]
            self._reserved[number] = max(self._reserved[number], reserved)
            if self.current_phase is not None:
                allocated = counters["allocated_bytes"]["all"]["peak"]
                before = self._phases.get(self.current_phase, 0)
                self._phases[self.current_phase] = max(before, allocated)
            torch.cuda.reset_peak_memory_stats(device)


def components(model: nn.Module, optimizer: Any, device: torch.device) -> dict[str, int]:
    """Return the current bytes on `device` of weights, adapters, gradients and optimizer.

    Each storage counts once, with all its bytes, including the constants of quantized weights.
    `optimizer` may be wrapped, or None.
    """
    optimizers = [] if optimizer is None else list(_unwrapped(optimizer))
    stepped: list[Tensor] = []
    state: list[Tensor] = []
    if optimizers:
        innermost = optimizers[-1]
        for group in innermost.param_groups:
            stepped += group["params"]
        state += _tensors_in(list(innermost.state.values()))
    gradients = [parameter.grad for parameter in (*model.parameters(), *stepped)]
    for each in optimizers:  # ZeRO's: lists by group in stages 1 and 2, one buffer in stage 3
        for name in ("averaged_gradients", "grad_partitions_flat_buffer"):
            gradients += _tensors_in(getattr(each, name, None))
    tensors = {
        "weights": [*iter_base_tensors(model), *model.buffers()],
        "adapters": list(stored_tensors(adapter_parameters(model))),
        "gradients": gradients,
        "optimizer": [*state, *stepped],
    }
    seen: set[int] = set()
    return {
        name: sum(_new_storage_bytes(tensor, device, seen) for tensor in held)
        for name, held in tensors.items()
    }


def _unwrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and the ones it wraps: accelerate's, DeepSpeed's, and finally torch's."""
    yield optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
        yield optimizer


def innermost(optimizer: Any) -> Any:
    """Return torch's optimizer inside the wrappers of accelerate and DeepSpeed."""
    *_, inner = _unwrapped(optimizer)
    return inner


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors_in(child)


def _new_storage_bytes(tensor: Tensor | None, device: torch.device, seen: set[int]) -> int:
    """Return the bytes of a tensor's storage on `device`, 0 if in `seen`; add it to `seen`."""
    if not isinstance(tensor, Tensor) or tensor.device != device:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
