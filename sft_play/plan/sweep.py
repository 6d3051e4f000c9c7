"""The grid of `make sweep`, and where successive halving stops its runs. Pure."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sft_play.errors import ConfigError

EXAMPLE = 'OVER="train.learning_rate=1e-4,2e-4 tuning.lora.r=8,16"'
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside a list or a mapping
NOT_SWEPT = ("train.run_name", "train.output_dir", "train.resume_from", "train.stop_after")


@dataclass(frozen=True)
class Point:
    """One combination of the grid: settings as they are written after --set."""

    words: tuple[str, ...]  # such as train.learning_rate=1e-4

    def __str__(self) -> str:
        return " ".join(self.words)


def grid(over: str) -> list[Point]:
    """Return every combination of OVER's values, the last setting changing first.

    Raises: ConfigError for words that are not `setting=value,value`.
    """
    axes: dict[str, list[str]] = {}
    for word in over.split():
        path, equals, text = word.partition("=")
        values = [value for value in COMMA.split(text) if value]
        if not equals or not values:
            raise ConfigError(f"OVER: {word} names no values; write {EXAMPLE}")
        if path in axes:
            raise ConfigError(f"OVER: {path} stands there twice; write all its values in one word")
        if path in NOT_SWEPT:
            raise ConfigError(f"OVER: {path} cannot be swept; leave it out")
        axes[path] = [f"{path}={value}" for value in dict.fromkeys(values)]
    if not axes:
        raise ConfigError(f"a sweep needs settings with values; write make sweep {EXAMPLE}")
    return [Point(words) for words in itertools.product(*axes.values())]


def name_of(prefix: str, settings: Mapping[str, object]) -> str:
    """Return the name of the run with these settings, the same whenever they are the same."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def halving_factor(text: str) -> int | None:
    """Return by what HALVING divides the runs at each rung: 2 for 1; None for 0 or nothing.

    Raises: ConfigError for anything but a whole number.
    """
    if text in ("", "0"):
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"HALVING={text} is not valid; write 1 to go on with the better half of the runs, 3 "
            "with the best third, 0 with all"
        )
    return max(2, int(text))


def rungs(count: int, factor: int | None) -> list[float]:
    """Return the fractions of a whole run at which `count` runs become fewer, until one is left.

    Four runs and factor 2 stop at 0.25 and 0.5: all train as long in total at each rung (successive
    halving, Jamieson and Talwalkar 2016).
    """
    if factor is None:
        return []
    number = 0
    while factor**number < count:
        number += 1
    return [factor**-exponent for exponent in range(number, 0, -1)]


def ranking(losses: Sequence[float | None]) -> list[int]:
    """Return the positions of the finite losses, the lowest first."""
    scored = []
    for position, loss in enumerate(losses):
        if loss is not None and math.isfinite(loss):
            scored.append((loss, position))
    return [position for _, position in sorted(scored)]
