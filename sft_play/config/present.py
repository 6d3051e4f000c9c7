"""A loaded config as plain data for `config --json`, and as aligned lines for a person. Pure."""

from typing import Any

from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import word
from sft_play.config.schema import settings

VALUE_WIDTH = 32  # a longer value moves its own origin to the right, not everyone's
LINE_LENGTH = 1000


def as_json(loaded: LoadedConfig) -> dict[str, Any]:
    """Return `{"values": {"train": {...}}, "origin": {"train.batch_size": "configs/a.yaml:7"}}`."""
    return {"values": loaded.config.model_dump(mode="json"), "origin": dict(loaded.origin)}


def as_lines(loaded: LoadedConfig) -> list[str]:
    """Return `train.batch_size = 4   # configs/a.yaml:7` for every setting, columns aligned."""
    shown = {path: word(loaded.value(path), LINE_LENGTH) for path in settings()}
    name_width = max(map(len, shown))
    value_width = min(VALUE_WIDTH, max(map(len, shown.values())))
    lines = []
    for path, value in shown.items():
        later = "; chosen when a run is planned" if value == "auto" else ""
        lines.append(
            f"{path:<{name_width}} = {value:<{value_width}}  # {loaded.origin[path]}{later}"
        )
    return lines
