"""The grid of `make sweep`. Pure."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sft_play.errors import ConfigError

EXAMPLE = 'OVER="train.learning_rate=1e-4,2e-4 tuning.lora.r=8,16"'
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside a list or a mapping
MAX_RUNS = 1000
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
    count = math.prod(map(len, axes.values()))
    if count > MAX_RUNS:
        raise ConfigError(
            f"OVER: {' x '.join(str(len(values)) for values in axes.values())} values are {count} "
            f"runs; a sweep has at most {MAX_RUNS}. Leave out settings or values."
        )
    return [Point(words) for words in itertools.product(*axes.values())]


def name_of(prefix: str, settings: Mapping[str, object]) -> str:
    """Return the name of the run with these settings, the same whenever they are the same."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
