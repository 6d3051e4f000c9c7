"""A config file as text, with a comment above each setting. Pure."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.config.yaml_source import YamlValue, dump

WIDTH = 100
INDENT = "  "


@dataclass(frozen=True)
class Line:
    """A setting of the file."""

    path: str  # dotted name
    value: YamlValue
    comment: str


def commented_yaml(header: Sequence[str], lines: Sequence[Line]) -> str:
    """Return the text of a config; the settings of a section stand together.

    >>> print(commented_yaml(["a header"], [Line("train.epochs", 3, "few rows")]), end="")
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
