"""What becomes of a notebook: the edits of its cells, and what the report says of it. Pure."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sft_play.notebooks.code import Code

SORTS = ("changed", "kept", "look")  # in the order of the report


class Edit(NamedTuple):
    """Text that takes the place of `source[start:end]`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Note:
    """One sentence of the report; `cell` is None where it is about the whole notebook."""

    sort: str
    cell: int | None
    text: str

    def line(self) -> str:
        place = "" if self.cell is None else f"cell {self.cell}: "
        return f"{self.sort:<8} {place}{self.text}"


class Changes:
    """Edits and notes, as they are found."""

    def __init__(self) -> None:
        self.edits: defaultdict[int, list[Edit]] = defaultdict(list)  # by the cell's number
        self.notes: list[Note] = []

    def replace(self, code: Code, start: int, end: int, text: str) -> None:
        """Put a text in the place of `code.source[start:end]`."""
        self.edits[code.number].append(Edit(start, end, text))

    def insert_before(self, code: Code, node: object, text: str) -> None:
        """Put lines before the statement of a node, with the indent and newline of the cell."""
        place = code.place_before(node)
        lines = textwrap.indent(text, place.indent).replace("\n", code.newline)
        self.replace(code, place.offset, place.offset, lines)

    def changed(self, cell: int | None, text: str) -> None:
        """Say what was done."""
        self.notes.append(Note("changed", cell, text))

    def kept(self, cell: int | None, text: str) -> None:
        """Say what was there already."""
        self.notes.append(Note("kept", cell, text))

    def look(self, cell: int | None, text: str) -> None:
        """Say what a person must look at."""
        self.notes.append(Note("look", cell, text))

    def sources(self, codes: Iterable[Code]) -> dict[int, str]:
        """Return the new sources of the cells that are edited, by their numbers."""
        made = {}
        for code in codes:
            source = code.source
            # edits do not overlap; those at one place keep their order
            ordered = sorted(enumerate(self.edits[code.number]), key=lambda p: (p[1].start, p[0]))
            for _, edit in reversed(ordered):
                source = source[: edit.start] + edit.text + source[edit.end :]
            if ordered:
                made[code.number] = source
        return made

    def report(self) -> list[str]:
        """Return the lines of the report: changes first, each sort in the cells' order."""
        unique = dict.fromkeys(self.notes)
        ordered = sorted(unique, key=lambda note: (SORTS.index(note.sort), note.cell or 0))
        return [note.line() for note in ordered]
