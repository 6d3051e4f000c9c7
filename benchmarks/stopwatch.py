"""The stopwatch of all peers, and what else is read from their Trainer."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback

from benchmarks.machine import GIB
from sft_play.runs.report import LoggedLoss


class Mark(NamedTuple):
    """The clock and the tokens so far, at the end of a step."""

    clock: float
    tokens: int  # without padding
    labelled_tokens: int


class Stopwatch(TrainerCallback):
    """Marks the end of two steps, when the GPU is idle, and stores every logged loss."""

    def __init__(self, first: int, last: int, device: torch.device):
        self.first = first
        self.last = last
        # real and labeled tokens, counted on the device, so that no step waits
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self.marks: dict[int, Mark] = {}
        self.logged: list[LoggedLoss] = []

    def count(self, inputs: dict[str, Any]) -> None:
        """Add the tokens of a micro-batch that its attention mask (B, T) marks.

        Without such a mask all tokens count except padding, which has id 0.
        """
        mask = inputs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = inputs["input_ids"].ne(0)
        real = mask.ne(0).sum()
        trained = inputs["labels"].ne(-100).sum()
        self.counted += torch.stack([real, trained])

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        if state.global_step in (self.first, self.last):
            counted = self.counted.clone()
            if distributed.is_initialized():
                distributed.all_reduce(counted)
            if counted.is_cuda:
                torch.cuda.synchronize()
            self.marks[state.global_step] = Mark(time.time(), *counted.tolist())

    def on_log(self, args, state, control, logs=None, **kwargs: Any) -> None:
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


def measure(trainer: Trainer, stopwatch: Stopwatch, started: float) -> dict[str, Any]:
    """Return the fields of a Result that an arm measured. Call it after training."""
    first = stopwatch.marks[stopwatch.first]
    last = stopwatch.marks[stopwatch.last]
    norms = [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    seconds, tokens = last.clock - first.clock, last.tokens - first.tokens
    labelled = last.labelled_tokens - first.labelled_tokens
    figures = {
        "seconds": seconds,
        "tokens": tokens,
        "labelled_tokens": labelled,
        "labelled_tokens_per_second": labelled / seconds,
        "ready_seconds": first.clock - started,
        "last_step_at": last.clock,
        "least_grad_norm": min(norms, default=None),
        "untrained": untrained_adapters(dict(trainer.model.named_parameters())),
        "timed_steps": stopwatch.last - stopwatch.first,
    }
    return {
        "tokens_per_second": tokens / seconds,
        "peak_gib": peak_gib(),
        "losses": stopwatch.logged,
        "figures": figures,
    }


def untrained_adapters(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of adapters that got no gradient: every B starts at zero."""
    return sorted(name for name, tensor in tensors.items() if "lora_B" in name and not tensor.any())


def peak_gib() -> float:
    """Return what the allocator reserved on the GPU at most; on a CPU the resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or CUDA says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def lora_a_matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the A matrices, named from `layers.` on: there the names are the same everywhere."""
    named = model.named_parameters()
    return {name[name.index("layers.") :]: matrix for name, matrix in named if "lora_A" in name}


def share_start(model: torch.nn.Module, path: Path) -> None:
    """Start from the A matrices of the first program that ran. Every B is zero."""
    from safetensors.torch import load_file, save_file

    found = lora_a_matrices(model)
    if not path.exists():
        save_file({name: each.detach().float().contiguous() for name, each in found.items()}, path)
        return
    saved = load_file(path)
    assert saved.keys() == found.keys(), "the adapters are not on the same layers"
    with torch.no_grad():
        for name, matrix in found.items():
            matrix.copy_(saved[name])
