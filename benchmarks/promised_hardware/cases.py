"""What is run on GPUs held to the memory of a smaller card; cases.yaml has it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.files import read_table
from benchmarks.smaller_gpus import MARGIN
from benchmarks.speed.workloads import Variable

GIB = 2**30


@dataclass(frozen=True)
class Promise:
    """A row of a guide's table of machines."""

    gigabytes: float  # of each GPU
    tokens_per_second: float  # of all GPUs


@dataclass(frozen=True)
class Case:
    """A model, what is trained of it, and the GPUs that it is trained on."""

    name: str
    shape: str  # a key of sft_play/plan/known_models.json, or toy
    config: str
    gpus: int
    tokens: int  # of every row
    leave_gib: float | None = None  # of each GPU; None: nothing is held
    card: str | None = None  # that has so much, a key of CARDS
    batch_size: int | None = None  # rows of a micro-batch on each GPU; None: the plan's choice
    grad_accum: int | None = None
    rows_per_step: int | None = None  # where the plan chooses; None: two on each GPU
    in_mxfp4: bool = False  # experts are published in 4 bits
    variables: tuple[Variable, ...] = ()
    alone: tuple[Variable, ...] | None = None  # the variables on one GPU, where that is tried too
    promise: Promise | None = None

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step on all GPUs."""
        if self.batch_size is None or self.grad_accum is None:
            return self.rows_per_step or 2 * self.gpus
        return self.batch_size * self.grad_accum * self.gpus

    @property
    def free_gib(self) -> float | None:
        """What a run finds free of each GPU; None where nothing is held."""
        return None if self.leave_gib is None else self.leave_gib + MARGIN / GIB

    def on(self, gpus: int | None, grad_accum: int | None) -> Case:
        """Return the case on another number of GPUs, with other accumulation; None keeps it."""
        changed = replace(self, gpus=gpus or self.gpus)
        if grad_accum and self.grad_accum is not None:
            changed = replace(changed, grad_accum=grad_accum)
        return changed

    def settings(self, gpus: int) -> dict[str, str]:
        """Return the variables of make that say what is trained, on all GPUs or on one."""
        found: dict[str, str | int] = {
            "CONFIG": self.config,
            "MODEL_MAX_SEQ_LEN": self.tokens,
            "TRAIN_LEARNING_RATE": "2e-4",
            "TRAIN_EPOCHS": 1,
        }
        if self.batch_size is None or self.grad_accum is None:
            found["TRAIN_EFFECTIVE_BATCH_SIZE"] = self.step_rows
        else:
            found |= {"TRAIN_BATCH_SIZE": self.batch_size, "TRAIN_GRAD_ACCUM": self.grad_accum}
        found |= dict(self.alone or () if gpus == 1 and self.alone is not None else self.variables)
        return {name: str(value) for name, value in found.items()}


CASES = read_table("promised_hardware/cases.yaml", Case)
