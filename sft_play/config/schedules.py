"""Learning rate schedules and their options, by the names that transformers gives them. Pure.

`transformers.get_scheduler` makes the schedule. What it would refuse once the rows are read and the
model is loaded is refused here.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_play.config.sections.train import TrainSection

SHAPES = ("linear", "cosine", "1-sqrt")
# What each option takes: one of some words, or a number from a lowest to a highest one
OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_cycles", "lr_end", "power", "min_lr", "num_decay_steps"), (0, math.inf)),
    **dict.fromkeys(("min_lr_rate", "min_lr_ratio"), (0, 1)),
    **dict.fromkeys(("warmup_type", "decay_type"), SHAPES),
    "timescale": (1, math.inf),
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
    options = dict(train.lr_scheduler_kwargs)
    if train.lr_scheduler_type == "cosine_with_min_lr" and "min_lr" not in options:
        options.setdefault("min_lr_rate", MIN_LR_RATE)
    if train.lr_scheduler_type == "warmup_stable_decay":
        options["num_decay_steps"] = count_steps(options.get("num_decay_steps", DECAY_STEPS), steps)
    return options


def count_steps(wanted: float, steps: int) -> int:
    """Return a number of steps; one below 1 is a fraction of the run's `steps`."""
    return math.ceil(wanted * steps) if wanted < 1 else int(wanted)


def depends_on_length(train: "TrainSection") -> bool:
    """Return whether the learning rate of a step depends on the number of steps of the run."""
    if train.lr_scheduler_type == "constant":
        return False
    is_endless = train.lr_scheduler_type in ("constant_with_warmup", "inverse_sqrt")
    return not is_endless or 0 < train.warmup_steps < 1


def find_problems(train: "TrainSection", described: Callable[[str], str]) -> Iterator[str]:
    """Yield a sentence for each option that the schedule does not have or cannot use."""
    kind, options = train.lr_scheduler_type, train.lr_scheduler_kwargs
    shown = described("train.lr_scheduler_kwargs")
    for name, value in options.items():
        if name not in SCHEDULES[kind]:
            known = f"write {', '.join(SCHEDULES[kind])}, or " if SCHEDULES[kind] else ""
            yield f"{shown}: the schedule {kind} has no option {name}; {known}delete it"
        elif not _is_valid(name, value):
            yield f"{shown}: {name}={value} is not valid; write {_wanted(name)}"
        elif name in ("lr_end", "min_lr") and train.learning_rate != "auto":
            if value >= train.learning_rate:
                rate = described("train.learning_rate")
                yield f"{shown}: {name}={value:g} is not below {rate}; write a lower {name}"
    if {"min_lr", "min_lr_rate"} <= options.keys():
        yield f"{shown}: min_lr and min_lr_rate say the same; delete one of them"


def _is_valid(name: str, value: Any) -> bool:
    if OPTIONS[name] is SHAPES:
        return value in SHAPES
    low, high = OPTIONS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        return False
    return name != "num_decay_steps" or value < 1 or value == int(value)


def _wanted(name: str) -> str:
    if OPTIONS[name] is SHAPES:
        return ", ".join(SHAPES)
    if name == "num_decay_steps":
        return "whole steps, or a fraction of the run under 1"
    low, high = OPTIONS[name]
    return f"a number of at least {low}" if high == math.inf else f"a number from {low} to {high}"
