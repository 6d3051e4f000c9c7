"""What is planned and then measured: tables alone. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.speed.workloads import LLAMA_1B, LLAMA_8B, QWEN_14B, TOY

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
    mode: str  # lora, qlora, full
    checkpointing: Literal["true", "false", "auto"]
    steps: int
    dtype: str = "auto"  # of the base weights
    max_seq_len: int = 2048
    is_ragged: bool = False  # else every row has `max_seq_len` tokens
    rows_per_step: int = 8
    fits: bool = True  # on the card; else the plan has to refuse it
    part: str = ACCURACY
    is_extra: bool = False  # runs only when it is named


def _pair(
    size: str, shape: str, mode: str, steps: int, dtype: str = "auto"
) -> tuple[Workload, ...]:
    """Return a workload without and one with activation checkpointing."""
    name = f"{size}-{mode}"
    return (
        Workload(name, shape, mode, "false", steps, dtype),
        Workload(f"{name}-ckpt", shape, mode, "true", steps, dtype),
    )


_WORKLOADS = (
    *_pair("1b", LLAMA_1B, "lora", 10),
    *_pair("1b", LLAMA_1B, "qlora", 10),
    *_pair("1b", LLAMA_1B, "full", 10, "bfloat16"),
    *_pair("8b", LLAMA_8B, "lora", 8),
    *_pair("8b", LLAMA_8B, "qlora", 8),
    *_pair("8b", LLAMA_8B, "full", 8, "bfloat16"),
    *_pair("14b", QWEN_14B, "lora", 6),
    *_pair("14b", QWEN_14B, "qlora", 6),
    Workload("14b-full-float32", QWEN_14B, "full", "true", 6, "float32", fits=False),
    # extra: it saves 28 GiB
    Workload("14b-full-ckpt", QWEN_14B, "full", "true", 6, "bfloat16", is_extra=True),
    Workload("1b-long", LLAMA_1B, "lora", "auto", 200, is_ragged=True, rows_per_step=32, part=LONG),
    Workload("toy-lora", TOY, "lora", "false", 4, max_seq_len=64),
    Workload("toy-full-ckpt", TOY, "full", "true", 4, max_seq_len=64),
    Workload("toy-refused", TOY, "full", "true", 4, max_seq_len=10**9, fits=False),
    Workload("toy-long", TOY, "lora", "auto", 20, max_seq_len=128, is_ragged=True, part=LONG),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}


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


_SWEEPS = (
    Sweep("sweep-1b-lora", LLAMA_1B, "lora", (24, 48, 80, None), most_tokens=131072),
    Sweep("sweep-8b-qlora", LLAMA_8B, "qlora", (24, 48, 80, None), most_tokens=40960),
    Sweep(
        "sweep-toy",
        TOY,
        "lora",
        budgets_gib=(1.1, None),
        batch_sizes=(4,),
        checkpointed=(0, 1),
        largest_checkpointed=(0,),
        max_seq_len=64,
        rows_per_step=4,
        most_tokens=4096,
    ),
)
SWEEPS = {sweep.name: sweep for sweep in _SWEEPS}
