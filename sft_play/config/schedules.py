"""Optimizers, and learning rate schedules with their options by transformers' names. Pure.

`transformers.get_scheduler` makes the schedule. What it would refuse once the rows are read and the
model is loaded is refused here.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_play.config.sections.train import TrainSection

# Values of train.optim
MATRIX_OPTIMIZERS = ("muon", "adafactor")  # which step complete matrices
LION = ("lion", "lion_8bit")
UNUSUAL = MATRIX_OPTIMIZERS + LION  # neither AdamW nor SGD
ADAMW = "adamw_torch adamw_torch_fused adamw_8bit paged_adamw_8bit paged_adamw_32bit"
OPTIMIZERS = (*ADAMW.split(), *UNUSUAL, "sgd")
SHAPES = ("linear", "cosine", "1-sqrt")


def _is_number(value: Any, least: float = 0, most: float = math.inf) -> bool:
    return type(value) in (int, float) and least <= value <= most


NUMBER = (_is_number, "a number of at least 0")
SHARE = (lambda value: _is_number(value, most=1), "a number from 0 to 1")
SHAPE = (lambda value: value in SHAPES, ", ".join(SHAPES))
STEPS = (
    lambda value: _is_number(value) and (value < 1 or value == int(value)),
    "whole steps, or a fraction of the run under 1",
)
# What each option takes: a check, and the words for it
OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("num_cycles", "lr_end", "power", "min_lr"), NUMBER),
    **dict.fromkeys(("min_lr_rate", "min_lr_ratio"), SHARE),
    **dict.fromkeys(("warmup_type", "decay_type"), SHAPE),
    "num_decay_steps": STEPS,
    "timescale": (lambda value: _is_number(value, 1), "a number of at least 1"),
}
SCHEDULES = {
    "linear": (),
    "cosine": ("num_cycles",),
    "constant": (),
    "constant_with_warmup": (),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("min_lr_rate", "min_lr", "num_cycles"),
    "warmup_stable_decay": tuple(
        "num_decay_steps min_lr_ratio decay_type warmup_type num_cycles".split()
    ),
}
MIN_LR_RATE = 0.1  # a tenth of the peak, as Chinchilla and Llama 2 end (arXiv 2203.15556)
DECAY_STEPS = 0.1  # of the run: as good as a cosine (MiniCPM, arXiv 2404.06395)


def options_of(train: "TrainSection", steps: int) -> dict[str, Any]:
    """Return the keyword arguments of the schedule of a run of so many steps."""
    options = dict(train.lr_scheduler_kwargs or {})
    if train.lr_scheduler_type == "cosine_with_min_lr" and "min_lr" not in options:
        options.setdefault("min_lr_rate", MIN_LR_RATE)
    if train.lr_scheduler_type == "warmup_stable_decay":
        options["num_decay_steps"] = count_steps(options.get("num_decay_steps", DECAY_STEPS), steps)
    return options


def count_steps(wanted: float, steps: int) -> int:
    """Return a number of steps; one below 1 is a fraction of the run's `steps`."""
    return math.ceil(wanted * steps) if wanted < 1 else int(wanted)


def find_option_problems(train: "TrainSection", described: Callable[[str], str]) -> Iterator[str]:
    """Yield a sentence for each option that the schedule does not have or cannot use."""
    kind, options = train.lr_scheduler_type, train.lr_scheduler_kwargs
    shown = described("train.lr_scheduler_kwargs")
    peak = math.inf if train.learning_rate == "auto" else train.learning_rate
    for name, value in options.items():
        if name not in SCHEDULES[kind]:
            known = f"write {', '.join(SCHEDULES[kind])}, or " if SCHEDULES[kind] else ""
            yield f"{shown}: the schedule {kind} has no option {name}; {known}delete it"
            continue
        is_valid, wanted = OPTIONS[name]
        if not is_valid(value):
            yield f"{shown}: {name}={value} is not valid; write {wanted}"
        elif name in ("lr_end", "min_lr") and value >= peak:
            rate = described("train.learning_rate")
            yield f"{shown}: {name}={value:g} is not below {rate}; write a lower {name}"
    if {"min_lr", "min_lr_rate"} <= options.keys():
        yield f"{shown}: min_lr and min_lr_rate say the same; delete one of them"
