"""docs/evidence/promises.md: what the guides promise, and what shows that it is kept. No torch.

promises.yaml has the rows; `problems` compares them with the tests and files that exist. A row in
state `gpu` is shown once a results file of `python -m benchmarks.promises` shows it.
docs/evidence/promises-gpu.md has those results.
"""

from __future__ import annotations

import ast
import json
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
GPU_TITLES = ("Row", "What was done", "GPUs of the host", "What was seen", "Shown")
GPU_PAGE = "docs/evidence/promises-gpu.md"
RESULTS = PROJECT_ROOT / "benchmarks" / "results"
State = Literal["shown", "cpu", "gpu", "otherwise", "not yet"]
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


class GpuResult(BaseModel):
    """What one piece of work on GPUs showed of a row: a Result of benchmarks/results.py."""

    workload: str  # the row
    gpus: int  # of the host
    status: str  # done if it showed what is promised
    figures: dict[str, str]  # what was done, and what was seen
    device: str


@cache
def promises() -> tuple[Promise, ...]:
    """Return the rows, in the order of the file, with what GPUs showed of them."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    results = gpu_results()
    return tuple(with_results(Promise.model_validate(row), results) for row in rows)


def gpu_results() -> list[GpuResult]:
    """Return the results of all machines, by row."""
    found = []
    for path in sorted(RESULTS.glob("promises-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        device = {"device": content["machine"]["device"]}
        found += [GpuResult.model_validate(each | device) for each in content["results"]]
    return sorted(found, key=lambda each: (int(each.workload), each.gpus))


def with_results(entry: Promise, results: Sequence[GpuResult]) -> Promise:
    """Return a row that waits for GPUs as what they showed of it."""
    if entry.state != "gpu":
        return entry
    found = [each for each in results if each.workload == str(entry.row)]
    hosts = " and ".join(dict.fromkeys(f"{each.gpus} {each.device}" for each in found))
    if not found:
        state, note = "cpu", "`python -m benchmarks.promises` tries it on GPUs; it has not run."
    elif all(each.status == "done" for each in found):
        state, note = "shown", f"Shown on {hosts}."
    else:
        state, note = "cpu", f"{hosts} did not show all of it."
    pages = (GPU_PAGE,) if found else ()
    note = f"{note} {entry.note}".strip()
    changes = {"state": state, "note": note, "shown_by": (*entry.shown_by, *pages)}
    return entry.model_copy(update=changes)


def gpu_markdown() -> str:
    """Return the table of what GPUs showed."""
    lines = [
        (
            each.workload,
            each.figures["done"],
            f"{each.gpus} {each.device}",
            each.figures["seen"].replace("\n", "<br>"),
            "yes" if each.status == "done" else "no",
        )
        for each in gpu_results()
    ]
    return table(GPU_TITLES, lines) if lines else "No results yet."


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
        name.startswith("benchmarks/results/") or name.endswith(("-h200.md", "-gpu.md"))
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
