"""Workloads, arms, and which arm runs on which workload; the tables are in YAML. Loads no torch.

A workload is a model, its rows and what is trained of it. An arm is a program with its settings, as
in a trial.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.files import read_table

LLAMA_1B = "meta-llama/Llama-3.2-1B-Instruct"
TOY = "toy"  # the tiny model that ships

LORA_RANK = 16
LORA_ALPHA = 32
WARM_UP = 5  # steps before the clock starts, for every arm; a loss is logged every so many steps
SEED = 42
FULL_RATE = 5e-5  # bfloat16 weights round a step of 1e-5 away
RAGGED_MEDIAN = 300  # tokens
RECIPE_ARM = "recipe"
SCALED = "-times-"  # in the name of a workload with more rows a step


class Variable(NamedTuple):
    """A variable of make that a guide's recipe or an arm sets."""

    name: str
    value: int | str


@dataclass(frozen=True)
class Workload:
    """Rows, a model and what is trained of it; a step of every arm holds `rows_per_step` rows."""

    name: str
    shape: str  # a name in architectures.json or sft_play/plan/known_models.json, or toy
    mode: str = "lora"  # lora, qlora, full (weights in bfloat16)
    tokens: int | None = None  # of every row; None: log-normal, median `RAGGED_MEDIAN`
    max_seq_len: int = 2048
    rows_per_step: int = 4
    learning_rate: float = 2e-4
    steps: int = 20  # that are timed, after WARM_UP
    # Precision of the reference: float32, tf32 (float32 weights, products on tensor cores), or
    # bfloat16 for the largest models and where all weights are trained.
    reference: str = "bfloat16"
    # Rows of a micro-batch that tuned arms try, until one fits without activation checkpointing.
    padded_rows: tuple[int, ...] = (4, 2, 1)
    layers: int | None = None  # how many of the model's; None: all
    in_mxfp4: bool = False  # experts are published in 4 bits
    recipe: tuple[Variable, ...] = ()  # what a guide to several GPUs sets for its rows
    recipe_strategy: str = "ddp"

    def scaled(self, times: int) -> "Workload":
        """Return the workload with `times` as many rows a step, which ends its name."""
        if times == 1:
            return self
        name = f"{self.name}{SCALED}{times}"
        return replace(self, name=name, rows_per_step=times * self.rows_per_step)


WORKLOADS = read_table("speed/workloads.yaml", Workload)


class Attempt(NamedTuple):
    """A micro-batch that an arm tries."""

    rows: int
    checkpointing: bool


def find_workload(name: str) -> Workload:
    """Return a workload by its name, also one with more rows a step."""
    base, _, times = name.partition(SCALED)
    return WORKLOADS[base].scaled(int(times or 1))


@dataclass(frozen=True)
class Launch:
    """How many processes, a GPU each, train together, and how ours share the model."""

    ranks: int = 1
    strategy: str = "auto"  # a value of train.strategy


ALONE = Launch()


@dataclass(frozen=True)
class Arm:
    """A program and its settings."""

    name: str
    program: str  # hf, trl, unsloth, or a backend of ours: ours-bnb, ours-unsloth
    description: str  # for the table
    # Rows sorted by length within a step, workers that collate, no checkpointing where it fits.
    is_best: bool = False
    uses_liger: bool = False
    # Several rows a sequence, grouped by the program: steps hold other rows than the reference's.
    packs: bool = False
    follows_recipe: bool = False  # of the workload, where ours chooses
    variables: tuple[Variable, ...] = ()  # of ours, that are not their defaults

    @property
    def is_ours(self) -> bool:
        """Whether SFT-Play runs it."""
        return self.program.startswith("ours")

    def attempts(self, workload: Workload, ranks: int = 1) -> list[Attempt]:
        """Return the micro-batches to try until one fits. Ours plans its own."""
        rows_per_rank = workload.rows_per_step // ranks
        largest = min(8, rows_per_rank)
        if self.packs:
            return [Attempt(1, False), Attempt(1, True)]
        if self.is_best:
            fitting = [rows for rows in workload.padded_rows if rows <= rows_per_rank]
            padded = [Attempt(rows, False) for rows in fitting]
            return [*padded, Attempt(largest, True)]
        if self.program == "unsloth":
            return [Attempt(min(2, largest), True)]  # 2 is what Unsloth's notebooks say
        return [Attempt(largest, True)]


ARMS = read_table("speed/arms.yaml", Arm)


def runs_by_default(workload: Workload, arm: Arm) -> bool:
    """Return whether an arm runs on a workload without being named.

    Packing is for ragged rows, and a recipe for the rows that it cuts.
    """
    if arm.variables or (arm.follows_recipe and not workload.recipe):
        return False
    return workload.tokens is None or not arm.packs
