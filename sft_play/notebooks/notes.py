"""What is said about a notebook: what was changed, and what a person must look at. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Sort = Literal["changed", "look", "kept"]


@dataclass(frozen=True)
class Note:
    """One sentence of the report; `cell` is None where it is about the whole notebook."""

    sort: Sort
    cell: int | None
    text: str

    def line(self) -> str:
        place = "" if self.cell is None else f"cell {self.cell}: "
        return f"{self.sort:<8} {place}{self.text}"


def changed(cell: int | None, text: str) -> Note:
    return Note("changed", cell, text)


def look(cell: int | None, text: str) -> Note:
    return Note("look", cell, text)


def kept(cell: int | None, text: str) -> Note:
    return Note("kept", cell, text)


def lines(notes: Iterable[Note]) -> list[str]:
    """Return the report: changes first, then what to look at, each in the cells' order."""
    order = {"changed": 0, "kept": 1, "look": 2}
    unique = dict.fromkeys(notes)
    ordered = sorted(unique, key=lambda note: (order[note.sort], note.cell or 0))
    return [note.line() for note in ordered]
