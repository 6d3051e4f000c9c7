"""The one stopwatch of all programs that run in our processes, and what else is read off their Trainer."""

import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

GIB = 2**30


class Stopwatch(TrainerCallback):
    """Marks (clock, real tokens, labelled tokens) at the end of two steps, the GPU idle at both, and keeps every logged loss."""

    def __init__(self, first: int, last: int, device: torch.device):
        self.first, self.last = first, last
        self.counted = torch.zeros(
            2, dtype=torch.int64, device=device
        )  # real, labelled: counted on the device, so that no step waits
        self.marks: dict[int, tuple[float, int, int]] = {}
        self.logged: list[dict[str, Any]] = []

    def count(self, inputs: dict[str, Any]) -> None:
        """Add a micro-batch's tokens: those that its attention mask shows; without one all but the padding, which has no label and id 0."""
        mask, labels = inputs.get("attention_mask"), inputs["labels"]
        if mask is None or mask.dim() != 2:
            mask = inputs["input_ids"].ne(0)
        self.counted += torch.stack([mask.ne(0).sum(), labels.ne(-100).sum()])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.first, self.last):
            if self.counted.is_cuda:
                torch.cuda.synchronize()
            self.marks[state.global_step] = (time.time(), *self.counted.tolist())

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.logged.append({"step": state.global_step, "loss": float(logs["loss"])})


def watched(trainer: Trainer, first: int, last: int) -> Stopwatch:
    """Return a stopwatch on this trainer's steps."""
    stopwatch = Stopwatch(first, last, trainer.args.device)
    trainer.add_callback(stopwatch)
    training_step = trainer.training_step

    def counting(
        model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        stopwatch.count(inputs)
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = counting
    return stopwatch


def report(trainer: Trainer, stopwatch: Stopwatch, started: float) -> dict[str, Any]:
    """Return what an arm measured, as `verdict.judge` and the tables read it."""
    (began, *before), (ended, *after) = (
        stopwatch.marks[stopwatch.first],
        stopwatch.marks[stopwatch.last],
    )
    norms = [
        float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry
    ]
    return {
        "seconds": ended - began,
        "real_tokens": after[0] - before[0],
        "trained_tokens": after[1] - before[1],
        "ready_seconds": began - started,
        "losses": stopwatch.logged,
        "least_grad_norm": min(norms, default=None),
        "untrained": untrained(dict(trainer.model.named_parameters())),
        **peaks(),
    }


def untrained(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of adapters that no gradient has reached: every B begins at zero."""
    return sorted(name for name, tensor in tensors.items() if "lora_B" in name and not tensor.any())


def peaks() -> dict[str, float | None]:
    """Return this process's peak GiB: what the allocator reserved and gave out on the GPU; resident memory on a CPU."""
    if torch.cuda.is_available():
        return {
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        }
    return {
        "peak_reserved_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "peak_allocated_gib": None,
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory did not suffice, in torch's words or CUDA's."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the A matrices by a name that every program's wrappers share: from the layer's number on."""
    return {
        name[name.index("layers.") :]: parameter
        for name, parameter in model.named_parameters()
        if "lora_A" in name
    }


def start_equal(model: torch.nn.Module, path: Path) -> None:
    """Begin with the A matrices of the first program that came here, which writes them down; every B is zero."""
    from safetensors.torch import load_file, save_file

    found = adapters_of(model)
    if not path.exists():
        save_file(
            {name: matrix.detach().float().cpu().contiguous() for name, matrix in found.items()},
            path,
        )
        return
    saved = load_file(path)
    assert saved.keys() == found.keys(), "the adapters are not on the same layers"
    with torch.no_grad():
        for name, matrix in found.items():
            matrix.copy_(saved[name])
