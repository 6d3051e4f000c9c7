"""A trained model as lm-eval asks it. Imports lm-eval, which only TASKS need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from sft_play.inference.load import TrainedModel
from sft_play.process import Process

MOST_AT_ONCE = 64  # questions, where lm-eval finds out how many the memory holds


class TaskModel(HFLM):
    """lm-eval's model over weights that are loaded already, on each of several processes.

    It computes as evaluations do: in the run's type, with the run's stops.
    """

    def __init__(self, trained: TrainedModel, batch_size: int | None) -> None:
        """Take the model; `batch_size` is of questions, None lets lm-eval find it on a GPU."""
        process = trained.process
        on_cpu = process.device.type == "cpu"
        is_half = process.compute_dtype != torch.float32
        with _tied_as_it_is(trained.model):
            super().__init__(
                pretrained=trained.model,
                tokenizer=trained.tokenizer,
                backend="causal",
                batch_size=batch_size or (8 if on_cpu else "auto"),
                max_batch_size=MOST_AT_ONCE,
                mixed_precision_dtype=process.compute_dtype if is_half else None,
                softmax_dtype=torch.float32,
            )
        self.process: Process = process
        self._rank = process.rank
        self._world_size = process.world_size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, one behind the other; numbers as (processes,)."""
        found = self.process.gather(tensor.cpu())
        return torch.cat([torch.atleast_1d(each) for each in found])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all processes on process `dst`, None on the others."""
        found = self.process.gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all processes."""
        self.process.sum(0)


@contextmanager
def _tied_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Keep lm-eval from tying weights: it would undo an adapter that trained embeddings or head."""
    model.__dict__["tie_weights"] = lambda: None
    try:
        yield
    finally:
        del model.__dict__["tie_weights"]
