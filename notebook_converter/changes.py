"""What becomes of a notebook: the edits of its cells, and what the report says of it. Pure."""

import textwrap
from collections import defaultdict
from functools import partialmethod
from typing import NamedTuple

from notebook_converter.code import Code
from notebook_converter.recognize import Found

SORTS = ("changed", "kept", "look")  # in the order of the report


class Note(NamedTuple):
    """One sentence of the report; `cell` is None if it is about the whole notebook."""

    sort: str
    cell: int | None
    text: str


class Changes:
    """Edits and notes, as they are found."""

    def __init__(self) -> None:
        # places, and the texts that take the place of `source[start:end]`
        self.edits: defaultdict[Code, list[tuple[tuple[int, int], str]]] = defaultdict(list)
        self.notes: list[Note] = []

    def replace(self, code: Code, span: tuple[int, int], text: str) -> None:
        """Put a text in the place of a span of `code.source`: its start and its end."""
        self.edits[code].append((span, text))

    def insert_before(self, code: Code, node: object, text: str) -> None:
        """Put lines before the statement of a node, with the indent and newline of the cell."""
        place = code.place_before(node)
        lines = textwrap.indent(text, place.indent).replace("\n", code.newline)
        self.replace(code, (place.offset, place.offset), lines)

    def note(self, sort: str, text: str, where: Code | Found | None = None) -> None:
        """Add a sentence to the report; `where` is None if it is about the whole notebook."""
        self.notes.append(Note(sort, where and where.number, text))

    changed = partialmethod(note, "changed")  # what was done
    kept = partialmethod(note, "kept")  # what was there already
    look = partialmethod(note, "look")  # what a person must look at

    def sources(self) -> dict[int, str]:
        """Return the new sources of the cells that are edited, by their numbers."""
        made = {}
        for code, edits in self.edits.items():
            source = code.source
            # edits do not overlap; those at one place keep their order
            ordered = sorted(edits, key=lambda edit: edit[0][0])
            for (start, end), text in reversed(ordered):
                source = source[:start] + text + source[end:]
            made[code.number] = source
        return made

    def report(self) -> list[str]:
        """Return the lines of the report: changes first, each sort in the cells' order."""
        unique = dict.fromkeys(self.notes)
        ordered = sorted(unique, key=lambda note: (SORTS.index(note.sort), note.cell or 0))
        return [
            f"{sort:<8} {'' if cell is None else f'cell {cell}: '}{text}"
            for sort, cell, text in ordered
        ]
