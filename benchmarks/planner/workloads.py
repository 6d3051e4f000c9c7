"""What is planned and then measured: tables alone. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.speed.workloads import EIGHT, FOURTEEN, ONE, TOY

ACCURACY, LONG = "accuracy", "long"  # parts of the report
HELD_OUT_ROWS = 4  # as long as the others, since an evaluation's memory is predicted for such
RAGGED_ROWS = 1600  # of a long run, which goes over them several times


@dataclass(frozen=True)
class Work:
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


def _pair(size: str, shape: str, mode: str, steps: int, dtype: str = "auto") -> tuple[Work, Work]:
    return Work(f"{size}-{mode}", shape, mode, "false", steps, dtype), Work(
        f"{size}-{mode}-ckpt", shape, mode, "true", steps, dtype
    )


WORKS = {
    work.name: work
    for work in (
        *_pair("1b", ONE, "lora", 10),
        *_pair("1b", ONE, "qlora", 10),
        *_pair("1b", ONE, "full", 10, "bfloat16"),
        *_pair("8b", EIGHT, "lora", 8),
        *_pair("8b", EIGHT, "qlora", 8),
        *_pair("8b", EIGHT, "full", 8, "bfloat16"),
        *_pair("14b", FOURTEEN, "lora", 6),
        *_pair("14b", FOURTEEN, "qlora", 6),
        Work("14b-full-float32", FOURTEEN, "full", "true", 6, "float32", fits=False),
        Work(
            "14b-full-ckpt", FOURTEEN, "full", "true", 6, "bfloat16", is_extra=True
        ),  # saves 28 GiB
        Work("1b-long", ONE, "lora", "auto", 200, is_ragged=True, rows_per_step=32, part=LONG),
        Work("toy-lora", TOY, "lora", "false", 4, max_seq_len=64),
        Work("toy-full-ckpt", TOY, "full", "true", 4, max_seq_len=64),
        Work("toy-refused", TOY, "full", "true", 4, max_seq_len=10**9, fits=False),
        Work("toy-long", TOY, "lora", "auto", 20, max_seq_len=128, is_ragged=True, part=LONG),
    )
}


@dataclass(frozen=True)
class Sweep:
    """A model whose every micro-batch size and share of checkpointed layers is timed, beside what the planner chooses."""

    name: str
    shape: str
    mode: str
    budgets_gib: tuple[float | None, ...]  # of memory on the card; None is all that is there
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    checkpointed: tuple[float, ...] = (0, 0.25, 0.5, 1)  # shares of the layers
    of_largest: tuple[float, ...] = (0, 0.5)  # those at which the largest micro-batch is looked for
    max_seq_len: int = 2048
    rows_per_step: int = 16
    most_tokens: int = 65536  # of the largest: where the plan takes more to fit, none is looked for, since it takes too long


SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep("sweep-1b-lora", ONE, "lora", (24, 48, 80, None), most_tokens=131072),
        Sweep("sweep-8b-qlora", EIGHT, "qlora", (24, 48, 80, None), most_tokens=40960),
        Sweep(
            "sweep-toy",
            TOY,
            "lora",
            (1.1, None),
            (4,),
            (0, 1),
            (0,),
            max_seq_len=64,
            rows_per_step=4,
            most_tokens=4096,
        ),
    )
}
