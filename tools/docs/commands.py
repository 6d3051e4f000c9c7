"""docs/evidence/commands.md: the targets of the Makefile, and what each reads. No torch."""

from __future__ import annotations

import re

from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.targets import READS, SETTINGS
from tools.docs.tables import table

TITLES = ("Target", "What it does", "Variables")
TARGET = re.compile(r"^([a-z][a-z-]*):.*?## (.*)$")


def markdown() -> str:
    """Return a table for each section of the Makefile."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    heading = "Help"
    for line in (PROJECT_ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif found := TARGET.match(line):
            name, meaning = found.groups()
            row = (f"`make {name}`", meaning, variables_of(name))
            sections.setdefault(heading, []).append(row)
    parts = [f"## {heading}\n\n{table(TITLES, rows)}" for heading, rows in sections.items()]
    return "\n".join(parts)


def variables_of(target: str) -> str:
    """Return the variables that a target reads, the settings as one word."""
    read = READS.get(target, frozenset())
    own = sorted(read - SETTINGS)
    words = [f"`{name}`" for name in own]
    settings = read & SETTINGS
    if settings == SETTINGS:
        words.append("all settings")
    else:
        words += [f"`{name}`" for name in sorted(settings)]
    return ", ".join(words)
