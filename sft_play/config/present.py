"""A loaded config as plain data for `config --json`, and as aligned lines for a person. Pure."""

from typing import Any

from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import word
from sft_play.config.schema import settings

VALUE_WIDTH = 32  # longer values push their own origin to the right, not everyone's
LINE_LENGTH = 1000


def as_json(loaded: LoadedConfig) -> dict[str, Any]:
    """Return `{"values": {"train": {"batch_size": 4}}, "origin": {"train.batch_size": "configs/a.yaml:7"}}`."""
    return {"values": loaded.config.model_dump(mode="json"), "origin": dict(loaded.origin)}


def as_lines(loaded: LoadedConfig) -> list[str]:
    """Return `train.batch_size = 4   # configs/a.yaml:7` for every setting, in the order of the schema, columns aligned."""
    shown = {path: word(_value(loaded, path), LINE_LENGTH) for path in settings()}
    name_width = max(map(len, shown))
    value_width = min(VALUE_WIDTH, max(map(len, shown.values())))
    return [
        f"{path:<{name_width}} = {value:<{value_width}}  # {loaded.origin[path]}"
        for path, value in shown.items()
    ]


def _value(loaded: LoadedConfig, path: str) -> Any:
    node: Any = loaded.config
    for name in path.split("."):
        node = getattr(node, name)
    return node
