"""docs/evidence/promises.md: what the guides promise, and what shows that it is kept. No torch.

promises.yaml has the rows; `problems` holds them against the tests and files that there are.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from sft_play.config.loader import PROJECT_ROOT
from tools.docs.tables import table

ROWS = PROJECT_ROOT / "tools" / "docs" / "promises.yaml"
NUMBERS = range(1, 138)
TITLES = ("Row", "What is promised", "Shown by", "Note")
State = Literal["shown", "cpu", "otherwise", "not yet"]
WORDS: dict[State, str] = {
    "shown": "shown by tests",
    "cpu": "on a CPU alone so far",
    "otherwise": "resolved otherwise",
    "not yet": "not yet",
}


class Promise(BaseModel):
    """A row of promises.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: int
    promise: str
    shown_by: tuple[str, ...] = ()  # tests/test_x.py::test_name; pages of docs/ and results
    state: State = "shown"
    note: str = ""


@cache
def promises() -> tuple[Promise, ...]:
    """Return the rows, in the order of the file."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return tuple(Promise.model_validate(row) for row in rows)


def problems(rows: Sequence[Promise]) -> list[str]:
    """Return what is wrong with rows: a number, or an entry that does not show what it should."""
    found = []
    if [entry.row for entry in rows] != list(NUMBERS):
        found.append(f"the rows are not {NUMBERS[0]} to {NUMBERS[-1]}, each once and in order")
    for entry in rows:
        found += [f"row {entry.row}: {problem}" for problem in _problems_of(entry)]
    return found


def _problems_of(entry: Promise) -> Iterator[str]:
    for name in entry.shown_by:
        if not _exists(name):
            yield f"there is no {name}"
    if entry.state != "shown" and not entry.note:
        yield f"{entry.state}, and no note says why"
    if entry.state != "not yet" and not any(map(_runs_anywhere, entry.shown_by)):
        yield "no test shows it without a GPU"


def _exists(name: str) -> bool:
    file, separator, test = name.partition("::")
    if not (PROJECT_ROOT / file).is_file():
        return False
    return not separator or test in _tests_of(file)


def _runs_anywhere(name: str) -> bool:
    return "::" in name and _exists(name) and not needs_gpu(name)


@cache
def _tests_of(file: str) -> frozenset[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse((PROJECT_ROOT / file).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@cache
def needs_gpu(name: str) -> bool:
    """Return whether an entry is a test of a file whose tests are all marked gpu."""
    file, separator, _ = name.partition("::")
    if not separator:
        return False
    tree = ast.parse((PROJECT_ROOT / file).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "pytest.mark.gpu" in ast.unparse(node.value)
        for node in tree.body
    )


def markdown() -> str:
    """Return how many rows stand how, and the table of all."""
    rows = promises()
    lines = [
        (str(entry.row), entry.promise, "<br>".join(map(_shown, entry.shown_by)), _note(entry))
        for entry in rows
    ]
    return f"{counts(rows)}\n\n{table(TITLES, lines)}"


def counts(rows: Sequence[Promise]) -> str:
    """Return a sentence with the number of rows of each state."""
    by_state = Counter(entry.state for entry in rows)
    measured = sum(entry.state == "shown" and has_figures(entry) for entry in rows)
    parts = ", ".join(f"{by_state[state]} {words}" for state, words in WORDS.items())
    return f"{len(rows)} rows: {parts}. Of those shown, {measured} have figures of a GPU, too."


def has_figures(entry: Promise) -> bool:
    """Return whether a page or file of results has what was measured of a row."""
    return any(
        name.startswith("benchmarks/results/") or name.endswith("-h200.md")
        for name in entry.shown_by
    )


def _shown(name: str) -> str:
    file, separator, _ = name.partition("::")
    if not separator and file.startswith("docs/"):
        page = file.removeprefix("docs/")
        return f"[{page}](../{page})"
    return f"`{name}`{' (GPU)' if needs_gpu(name) else ''}"


def _note(entry: Promise) -> str:
    if entry.state == "shown":
        return entry.note
    words = WORDS[entry.state]
    return f"{words[0].upper()}{words[1:]}. {entry.note}"
