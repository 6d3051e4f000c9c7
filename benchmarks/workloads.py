"""What the benchmarks train, and the programs that train it. The tables are in YAML. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml
from pydantic import TypeAdapter

LLAMA_1B = "meta-llama/Llama-3.2-1B-Instruct"
TOY = "toy"  # the tiny model that ships
LORA_RANK = 16
LORA_ALPHA = 32
SEED = 42
OUR_ARM = "ours-bnb"  # of several GPUs: its loss on one GPU is the reference
NO_REFERENCE = "none"
SCALED = "-times-"  # in the name of a workload with more rows per step
MARGIN_GIB = 0.125  # of a GPU with limited memory: a CUDA context grows a little
T = TypeVar("T")


class Variable(NamedTuple):
    """A variable of make."""

    name: str
    value: int | str


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A model with random weights."""

    shape: str  # a name in architectures.json or sft_play/plan/known_models.json, or toy
    layers: int | None = None  # the first layers of the model; None: all
    in_mxfp4: bool = False  # the experts are stored in 4 bits, as gpt-oss publishes them
    as_published: bool = False  # with the vision encoder; otherwise only the language model
    with_images: bool = False  # as_published, with the files of an image processor
    with_reasoning: bool = False  # with Qwen3's chat template

    @property
    def has_encoder(self) -> bool:
        """Whether the vision encoder is part of the model."""
        return self.as_published or self.with_images

    @property
    def base(self) -> BaseModel:
        """Return only the fields that say which weights to draw."""
        return BaseModel(**{each.name: getattr(self, each.name) for each in fields(BaseModel)})


@dataclass(frozen=True, kw_only=True)
class Workload(BaseModel):
    """A model, its rows and what is trained. A step of every arm has `rows_per_step` rows."""

    name: str
    family: str = "speed"  # speed, hardware, plan, sweep, plan-long or named
    mode: str = "lora"  # lora, qlora, full (weights in bfloat16); "" if `variables` choose it
    tokens: int | None = None  # of every row; None: log-normal lengths
    median: int = 300  # tokens of rows with log-normal lengths
    answers: int | None = None  # of every row, which is a chat; None: a question and an answer
    # median words of each question, reasoning and answer of a chat
    chat_words: dict[str, int] | None = None
    max_seq_len: int = 2048
    rows_per_step: int = 4
    learning_rate: float = 2e-4
    warm_up: int = 5  # steps before the clock starts; a loss is logged every `warm_up` steps
    steps: int = 20  # timed steps, after `warm_up`
    distinct_steps: int | None = None  # steps with rows of their own; later steps repeat them
    saves: bool = False  # every arm saves what it trained, and SFT-Play checks what it saved
    held_out_tokens: int = 48  # of the rows that are scored before and after training
    # float32, tf32 (float32 weights, matrix multiplications on tensor cores), bfloat16 or none
    reference: str = "bfloat16"
    padded_rows: tuple[int, ...] = (4, 2, 1)  # micro-batches that tuned arms try, largest first
    config: str = "configs/base.yaml"
    variables: tuple[Variable, ...] = ()  # for SFT-Play
    variables_on_one: tuple[Variable, ...] | None = None  # instead, if one GPU is tried first
    gpus: int = 1
    leave_gib: float | None = None  # memory that is left free on each GPU; None: all of it
    card: str | None = None  # the GPU model with that memory, a key of CARDS
    # of a guide for that machine: GB of each GPU, tokens per second of all
    promise: tuple[float, float] | None = None
    fits: bool = True  # on the card; otherwise the plan must refuse it

    def scaled(self, times: int) -> Workload:
        """Return the workload with `times` as many rows per step, and a name that says so."""
        if times == 1:
            return self
        name = f"{self.name}{SCALED}{times}"
        return replace(self, name=name, rows_per_step=times * self.rows_per_step)

    @property
    def follows_config(self) -> bool:
        """Whether the config and `variables` choose the mode, the adapters and the schedule."""
        return not self.mode

    @property
    def free_gib(self) -> float | None:
        """Memory that a run finds free on each GPU; None if it is not limited."""
        return None if self.leave_gib is None else self.leave_gib + MARGIN_GIB


class Attempt(NamedTuple):
    """A micro-batch that an arm tries."""

    rows: int
    checkpointing: bool


@dataclass(frozen=True)
class Arm:
    """A program and its settings."""

    name: str
    program: str  # hf, trl, unsloth, or a backend of SFT-Play: ours-bnb, ours-unsloth
    description: str = ""
    # rows sorted by length within a step, workers that collate, no checkpointing if it fits
    is_best: bool = False
    uses_liger: bool = False
    uses_kernels: bool = False  # sft_kernels.fuse
    packs: bool = False  # the program groups rows: its steps have other rows than the reference
    by_default: bool = True  # otherwise it runs only when it is named
    variables: tuple[Variable, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether SFT-Play runs it."""
        return self.program.startswith("ours")

    def attempts(self, workload: Workload, ranks: int = 1) -> list[Attempt]:
        """Return the micro-batches to try until one fits. SFT-Play plans its own."""
        rows_per_rank = workload.rows_per_step // ranks
        largest = min(8, rows_per_rank)
        if workload.with_images:
            return [Attempt(workload.padded_rows[0], not self.is_best)]
        if self.packs:
            return [Attempt(1, False), Attempt(1, True)]
        if self.is_best:
            fitting = [rows for rows in workload.padded_rows if rows <= rows_per_rank]
            return [*(Attempt(rows, False) for rows in fitting), Attempt(largest, True)]
        if self.program == "unsloth":
            return [Attempt(min(2, largest), True)]  # Unsloth's notebooks use 2
        return [Attempt(largest, True)]

    def runs_by_default(self, workload: Workload) -> bool:
        """Return whether the arm runs on a workload without being named."""
        return self.by_default and (workload.tokens is None or not self.packs)


class Case(NamedTuple):
    """A workload, the arm that trains it, and on how many GPUs."""

    workload: Workload
    arm: Arm
    gpus: int = 1
    strategy: str = "single"  # of several GPUs a value of train.strategy
    added: tuple[Variable, ...] = ()  # variables of make from the command line

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The key of its result."""
        return (self.workload.name, self.arm.name, self.gpus, self.strategy)

    @property
    def has_samples(self) -> bool:
        """Whether it trains one sample per row: of chats SFT-Play trains one per answer."""
        return not (self.workload.answers and self.arm.is_ours)

    @property
    def may_be_refused(self) -> bool:
        """Whether the GPUs may be too small, so that the plan has to refuse the run."""
        tries_one = self.workload.variables_on_one is not None
        return not self.workload.fits or (tries_one and self.gpus == 1)

    @property
    def variables(self) -> dict[str, int | str]:
        """Variables of make that the workload and the arm set."""
        workload = self.workload
        found = workload.variables
        if self.gpus == 1 and workload.variables_on_one is not None:
            found = workload.variables_on_one
        return dict((*found, *self.arm.variables, *self.added))


@cache
def read_table(name: str, kind: type[T]) -> dict[str, T]:
    """Return the entries of a YAML table in this folder. The key of an entry is its name."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    entries = {key: {"name": key, **entry} for key, entry in yaml.safe_load(text).items()}
    return TypeAdapter(dict[str, kind]).validate_python(entries)


WORKLOADS = read_table("workloads.yaml", Workload)
ARMS = read_table("arms.yaml", Arm)


def find_workload(name: str) -> Workload:
    """Return a workload by its name, also one with more rows per step."""
    base, _, times = name.partition(SCALED)
    return WORKLOADS[base].scaled(int(times or 1))


def choose_workloads(names: list[str], families: list[str], is_toy: bool) -> list[Workload]:
    """Return the named workloads, or else all of the families: the toys or all others."""
    if names:
        return [WORKLOADS[name] for name in names]
    found = [workload for workload in WORKLOADS.values() if workload.family in families]
    return [workload for workload in found if (workload.shape == TOY) == is_toy]
