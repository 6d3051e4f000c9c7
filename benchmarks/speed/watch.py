"""The stopwatch of all peers, and what else is read off their Trainer."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback

from benchmarks.machine import GIB
from benchmarks.speed.results import Measurement
from sft_play.runs.report import LoggedLoss


class Mark(NamedTuple):
    """The clock and the tokens so far, at the end of a step."""

    clock: float
    real_tokens: int
    trained_tokens: int


class Stopwatch(TrainerCallback):
    """Marks the end of two steps, with the GPU idle, and keeps every logged loss."""

    def __init__(self, first: int, last: int, device: torch.device):
        self.first = first
        self.last = last
        # real and labelled tokens, counted on the device, so that no step waits
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self.marks: dict[int, Mark] = {}
        self.logged: list[LoggedLoss] = []

    def count(self, inputs: dict[str, Any]) -> None:
        """Add a micro-batch's tokens: those that its attention mask shows.

        Without a mask (B, T), all but the padding, which has id 0.
        """
        mask = inputs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = inputs["input_ids"].ne(0)
        real = mask.ne(0).sum()
        trained = inputs["labels"].ne(-100).sum()
        self.counted += torch.stack([real, trained])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.first, self.last):
            counted = self.counted.clone()
            if distributed.is_initialized():
                distributed.all_reduce(counted)
            if counted.is_cuda:
                torch.cuda.synchronize()
            self.marks[state.global_step] = Mark(time.time(), *counted.tolist())

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.logged.append(LoggedLoss(state.global_step, float(logs["loss"])))


def attach_stopwatch(trainer: Trainer, first: int, last: int) -> Stopwatch:
    """Return a stopwatch on this trainer's steps."""
    stopwatch = Stopwatch(first, last, trainer.args.device)
    trainer.add_callback(stopwatch)
    training_step = trainer.training_step

    def counting_step(
        model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        stopwatch.count(inputs)
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = counting_step
    return stopwatch


def measure(trainer: Trainer, stopwatch: Stopwatch, started: float) -> Measurement:
    """Return what an arm measured, after its training."""
    began = stopwatch.marks[stopwatch.first]
    ended = stopwatch.marks[stopwatch.last]
    history = trainer.state.log_history
    norms = [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry]
    peak = peak_memory()
    return Measurement(
        seconds=ended.clock - began.clock,
        real_tokens=ended.real_tokens - began.real_tokens,
        trained_tokens=ended.trained_tokens - began.trained_tokens,
        ready_seconds=began.clock - started,
        losses=stopwatch.logged,
        least_grad_norm=min(norms, default=None),
        untrained=untrained_adapters(dict(trainer.model.named_parameters())),
        peak_reserved_gib=peak.reserved_gib,
        peak_allocated_gib=peak.allocated_gib,
    )


def untrained_adapters(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of adapters that no gradient has reached: every B begins at zero."""
    return sorted(name for name, tensor in tensors.items() if "lora_B" in name and not tensor.any())


class PeakMemory(NamedTuple):
    """What the allocator reserved and gave out on the GPU; on a CPU the resident memory."""

    reserved_gib: float
    allocated_gib: float | None


def peak_memory() -> PeakMemory:
    """Return this process's peak."""
    if torch.cuda.is_available():
        reserved = torch.cuda.max_memory_reserved()
        return PeakMemory(reserved / GIB, torch.cuda.max_memory_allocated() / GIB)
    resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return PeakMemory(resident_kib * 1024 / GIB, None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory did not suffice, in torch's words or CUDA's."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def lora_a_matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the A matrices, named from the layer's number on: there all wrappers agree."""
    matrices = {}
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            matrices[name[name.index("layers.") :]] = parameter
    return matrices


def share_start(model: torch.nn.Module, path: Path) -> None:
    """Start from the A matrices of the first program that ran; every B is zero."""
    from safetensors.torch import load_file, save_file

    found = lora_a_matrices(model)
    if not path.exists():
        first = {}
        for name, matrix in found.items():
            first[name] = matrix.detach().float().cpu().contiguous()
        save_file(first, path)
        return
    saved = load_file(path)
    assert saved.keys() == found.keys(), "the adapters are not on the same layers"
    with torch.no_grad():
        for name, matrix in found.items():
            matrix.copy_(saved[name])
