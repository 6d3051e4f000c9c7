"""What is run on GPUs whose memory is held to a smaller card's: tables alone. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.smaller_gpus import MARGIN
from benchmarks.speed.workloads import LLAMA_8B, TOY, Variable
from sft_play.plan.cards import CARDS

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
    variables: tuple[Variable, ...] = ()
    alone: tuple[Variable, ...] | None = None  # the variables on one GPU, where that is tried too
    promise: Promise | None = None

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step on all GPUs."""
        if self.batch_size is None or self.grad_accum is None:
            return 2 * self.gpus
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
            found["TRAIN_EFFECTIVE_BATCH_SIZE"] = self.rows_per_step
        else:
            found |= {"TRAIN_BATCH_SIZE": self.batch_size, "TRAIN_GRAD_ACCUM": self.grad_accum}
        found |= dict(self.alone or () if gpus == 1 and self.alone is not None else self.variables)
        return {name: str(value) for name, value in found.items()}


def _guide(
    name: str,
    shape: str,
    config: str,
    gpus: int,
    card: str,
    rows: tuple[int, int, int],
    promise: Promise,
) -> Case:
    """Return a row of the guide with the shipped config of its machine.

    `rows` are tokens of a row, rows of a micro-batch, and micro-batches of a step.
    """
    tokens, batch_size, grad_accum = rows
    is_held = card != "H200"
    return Case(
        name,
        shape,
        f"configs/{config}.yaml",
        gpus,
        tokens,
        leave_gib=CARDS[card].gib if is_held else None,
        card=card,
        batch_size=batch_size,
        grad_accum=grad_accum,
        promise=promise,
    )


def _too_large(name: str, mode: str, leave_gib: float) -> Case:
    """Return training of Llama 8B that one GPU has no room for, and FSDP on two has."""
    return Case(
        name,
        LLAMA_8B,
        "configs/base.yaml",
        gpus=2,
        tokens=2048,
        leave_gib=leave_gib,
        variables=(Variable("TUNING_MODE", mode), Variable("TRAIN_STRATEGY", "fsdp")),
        alone=(Variable("TUNING_MODE", mode),),
    )


_TOY = (Variable("DEVICE", "cpu"), Variable("TRAIN_LEARNING_RATE", "2e-3"))
_CASES = (
    _guide(
        "qwen-7b-4090",
        "Qwen/Qwen2.5-7B-Instruct",
        "rtx4090_sli",
        gpus=2,
        card="4090",
        rows=(1536, 6, 4),
        promise=Promise(18, 1200),
    ),
    _guide(
        "gemma-27b-h100",
        "google/gemma-3-27b-it",
        "a100_pair",
        gpus=2,
        card="H100",
        rows=(2048, 8, 4),
        promise=Promise(65, 800),
    ),
    _guide(
        "llama-70b-h200",
        "meta-llama/Llama-3.1-70B-Instruct",
        "h200_quad",
        gpus=4,
        card="H200",
        rows=(4096, 16, 2),
        promise=Promise(120, 600),
    ),
    _too_large("8b-lora-17-gib", "lora", 17),
    _too_large("8b-qlora-7.7-gib", "qlora", 7.7),
    Case(
        "toy",
        TOY,
        "configs/base.yaml",
        gpus=2,
        tokens=64,
        batch_size=4,
        grad_accum=2,
        variables=_TOY,
        alone=_TOY,
    ),
)
CASES = {case.name: case for case in _CASES}
