"""What a rank's memory was taken by: the peak of each phase of a run, and who holds what at one moment."""

import contextlib
import resource
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sft_play.process import Process

HELD = ("weights", "adapters", "gradients", "optimizer")  # what `components` tells apart


class MemoryWatch:
    """The peak of each of plan.memory.PHASES on this rank's GPU, from the allocator's counters, which make nobody wait for the GPU.

    A phase lasts until the next one is entered. A CPU's allocator counts nothing: there only the whole run has a peak.
    """

    def __init__(self, process: Process, used_before_bytes: int = 0):
        """`used_before_bytes` is what others held of this rank's GPU before the run."""
        self.process, self.device = process, process.device
        self.used_before_bytes = used_before_bytes
        self.current: str | None = None
        self.is_paused = False
        self._allocated: dict[str, int] = {}
        self._reserved = 0
        if self.device.type == "cuda":
            torch.cuda.init()

    def enter(self, phase: str | None) -> None:
        """End the phase that runs, and begin `phase`; None is none of them."""
        if self.is_paused:
            return
        self._take()
        self.current = phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase inside this context; one that an error ends is still the current one afterwards."""
        self.enter(name)
        yield
        self.enter(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the allocator's counters to somebody else inside this context: what is entered there counts nothing."""
        self.enter(None)
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def watch_optimizer(self, optimizer: Any) -> None:
        """Enter the phase `optimizer` for each step of what `optimizer` wraps; DeepSpeed takes it within its backward pass."""
        *_, inner = _layers(optimizer)
        inner.register_step_pre_hook(lambda *_: self.enter("optimizer"))
        inner.register_step_post_hook(lambda *_: self.enter(None))

    def allocated_bytes(self) -> int:
        """Return the most that the current phase has held so far, 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def context_bytes(self) -> int:
        """Return what the GPU holds for this process outside torch's allocator: CUDA's context, cuBLAS, NCCL, paged optimizer states.

        Another program that has begun since the run was planned is counted with it. 0 on a CPU.
        """
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return max(
            0, total - free - torch.cuda.memory_reserved(self.device) - self.used_before_bytes
        )

    def phases(self) -> dict[str, int]:
        """Return the peak of each phase that was entered, in bytes, with the context; {} on a CPU."""
        self._take()
        context = self.context_bytes()
        return {name: allocated + context for name, allocated in self._allocated.items()}

    def reserved_bytes(self) -> int:
        """Return the most that torch's allocator had reserved of the GPU during the run; on a CPU the process's resident memory."""
        if self.device.type != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        self._take()
        return self._reserved

    def peak_bytes(self) -> int:
        """Return the peak of the whole run: what was reserved, and the context."""
        return self.reserved_bytes() + self.context_bytes()

    def _take(self) -> None:
        if self.device.type != "cuda":
            return
        counters = torch.cuda.memory_stats_as_nested_dict(self.device)
        self._reserved = max(self._reserved, counters["reserved_bytes"]["all"]["peak"])
        if self.current is not None:
            self._allocated[self.current] = max(
                self._allocated.get(self.current, 0), counters["allocated_bytes"]["all"]["peak"]
            )
        torch.cuda.reset_peak_memory_stats(self.device)


def of_the_worst_rank(
    watch: MemoryWatch, phases: Iterable[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the largest peaks over all ranks: of the run, `measured` with the context and `reserved` without; and of each of `phases`.

    A phase that no rank measured is left out. Every rank must call it.
    """
    run = {"measured": watch.peak_bytes(), "reserved": watch.reserved_bytes()}
    own = watch.phases()
    worst = {name: watch.process.max(own.get(name, 0)) for name in phases}
    return {name: watch.process.max(size) for name, size in run.items()}, {
        name: size for name, size in worst.items() if size
    }


def components(model: torch.nn.Module, optimizer: Any, device: torch.device) -> dict[str, int]:
    """Return the bytes on `device` of each of HELD now: whole storages, each once, quantised weights packed with their constants.

    Adapters are what is trained of a model that is frozen otherwise. `optimizer` may be wrapped, or None before there is one.
    """
    parameters = list(model.parameters())
    is_adapted = any(not parameter.requires_grad for parameter in parameters)
    adapters = [parameter for parameter in parameters if is_adapted and parameter.requires_grad]
    others = {id(parameter) for parameter in adapters}
    weights = [parameter for parameter in parameters if id(parameter) not in others]
    layers = list(_layers(optimizer)) if optimizer is not None else []
    stepped = (
        [parameter for group in layers[-1].param_groups for parameter in group["params"]]
        if layers
        else []
    )
    tensors = {
        "weights": [*_of_parameters(weights), *model.buffers()],
        "adapters": _of_parameters(adapters),
        "gradients": [
            *(parameter.grad for parameter in (*parameters, *stepped)),
            *_partitioned_gradients(layers),
        ],
        "optimizer": [
            *(
                value
                for state in (layers[-1].state.values() if layers else ())
                for value in _tensors(state)
            ),
            *stepped,
        ],
    }
    seen: set[int] = set()
    return {
        name: sum(_storage_bytes(tensor, device, seen) for tensor in tensors[name]) for name in HELD
    }


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and what it wraps: accelerate's, DeepSpeed's, and innermost torch's."""
    yield optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
        yield optimizer


def _of_parameters(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor | None]:
    """Yield the tensors of parameters: of quantised ones the constants too, of ZeRO-3's the part that this rank holds."""
    for parameter in parameters:
        yield parameter
        yield getattr(parameter, "ds_tensor", None)
        state = getattr(
            parameter, "quant_state", None
        )  # bitsandbytes' QuantState, whose own constants are quantised in `state2`
        for constants in (state, getattr(state, "state2", None)):
            if constants is not None:
                yield from (constants.absmax, constants.code, constants.offset)


def _partitioned_gradients(layers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the gradients that ZeRO keeps beside the parameters: lists by group in stages 1 and 2, one buffer in stage 3."""
    for layer in layers:
        yield from _tensors(getattr(layer, "averaged_gradients", None))
        yield from _tensors(getattr(layer, "grad_partitions_flat_buffer", None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for child in value.values() for tensor in _tensors(child))
    elif isinstance(value, list | tuple):
        yield from (tensor for child in value for tensor in _tensors(child))


def _storage_bytes(tensor: Any, device: torch.device, seen: set[int]) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.device != device:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
