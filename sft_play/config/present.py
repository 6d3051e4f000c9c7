"""A config as plain data, as aligned lines for a person, and as a commented file. Pure."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import word
from sft_play.config.schema import Config, settings
from sft_play.config.yaml_source import YamlValue, dump

VALUE_WIDTH = 32  # a longer value moves its own origin to the right, not everyone's
LINE_LENGTH = 1000


def settings_json(loaded: LoadedConfig) -> dict[str, Any]:
    """Return `{"values": {"train": {...}}, "origin": {"train.batch_size": "configs/a.yaml:7"}}`."""
    return {"values": loaded.config.model_dump(mode="json"), "origin": dict(loaded.origin)}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors and programs."""
    schema = Config.model_json_schema()
    path = {"type": "string"}
    schema["properties"]["include"] = {"anyOf": [path, {"type": "array", "items": path}]}
    return schema


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


WIDTH = 100
INDENT = "  "


@dataclass(frozen=True)
class SettingLine:
    """A setting of the file."""

    path: str  # dotted name
    value: YamlValue
    comment: str


def commented_yaml(header: Sequence[str], lines: Sequence[SettingLine]) -> str:
    """Return the text of a config; the settings of a section stand together.

    >>> print(commented_yaml(["a header"], [SettingLine("train.epochs", 3, "few rows")]), end="")
    # a header
    <BLANKLINE>
    train:
      # few rows
      epochs: 3
    """
    written = [f"# {line}" for line in header]
    open_sections: list[str] = []
    for line in lines:
        *sections, name = line.path.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                written += [""] if depth == 0 else []
                written.append(f"{INDENT * depth}{section}:")
        open_sections = sections
        indent = INDENT * len(sections)
        written += textwrap.wrap(
            line.comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        setting = dump({name: line.value}).rstrip("\n")
        written += textwrap.indent(setting, indent).split("\n")
    return "\n".join(written) + "\n"
