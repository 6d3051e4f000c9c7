"""What is planned and then measured; the tables are in YAML. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.files import read_table

# parts of the report
ACCURACY = "accuracy"
SWEEP = "sweep"
LONG = "long"
PARTS = (ACCURACY, SWEEP, LONG)
HELD_OUT_ROWS = 4  # as long as the others, because an evaluation's memory is predicted for such
RAGGED_ROWS = 1600  # of a long run, which trains on them several times


@dataclass(frozen=True)
class Workload:
    """A run of the command line, whose memory and speed are predicted and measured."""

    name: str
    shape: str  # a key of sft_play/plan/known_models.json, or toy
    checkpointing: Literal["true", "false", "auto"]
    steps: int
    mode: str = "lora"  # lora, qlora, full
    dtype: str = "auto"  # of the base weights
    max_seq_len: int = 2048
    is_ragged: bool = False  # else every row has `max_seq_len` tokens
    rows_per_step: int = 8
    fits: bool = True  # on the card; else the plan has to refuse it
    part: str = ACCURACY
    is_extra: bool = False  # runs only when it is named


WORKLOADS = read_table("planner/workloads.yaml", Workload)


@dataclass(frozen=True)
class Sweep:
    """A model whose every combination of micro-batch size and checkpointed layers is timed."""

    name: str
    shape: str
    mode: str
    budgets_gib: tuple[float | None, ...]  # of memory on the card; None is the whole card
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    checkpointed: tuple[float, ...] = (0, 0.25, 0.5, 1)  # shares of the layers
    # shares at which the largest micro-batch is searched
    largest_checkpointed: tuple[float, ...] = (0, 0.5)
    max_seq_len: int = 2048
    rows_per_step: int = 16
    # Where the plan expects more to fit, no largest micro-batch is searched: that takes too long.
    most_tokens: int = 65536


SWEEPS = read_table("planner/sweeps.yaml", Sweep)
