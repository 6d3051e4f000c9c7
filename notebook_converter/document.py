"""A notebook: parsed, checked, and written with nothing changed but the sources of some cells.

Knows no Python code. The JSON keeps its layout: indent, separators, line ends, escapes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # a JSON object
KNOWN_CELLS = ("code", "markdown", "raw")
# What format 4 asks for, of the file, of a cell, and of a code cell
FILE_MEMBERS = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}
CELL_MEMBERS = {"metadata": {}, "source": ""}
CODE_MEMBERS = {**CELL_MEMBERS, "outputs": [], "execution_count": None}
BYTE_ORDER_MARK = "\ufeff"
# The first newline and indent, and what separates a name from its value
LAYOUT = re.compile(r'\{(?:(\r?\n)([ \t]*))?\s*"[^"]*"(\s*:\s*)')
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
SHOWN = 60  # characters of a wrong value in a message


class NotebookError(ValueError):
    """A file is not a notebook that can be converted; the text says why and what to do."""


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook; `number` counts all cells from 1."""

    number: int
    kind: str
    source: str
    outputs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Document:
    """A notebook, and the text of the file that it was read from."""

    path: Path
    text: str
    content: Json  # with the members that were missing
    cells: tuple[Cell, ...]
    problems: tuple[str, ...]  # what the format asks for and this file lacks

    def with_sources(self, sources: Mapping[int, str]) -> str:
        """Return the text of the file with other sources, by the cells' numbers."""
        if not sources and not self.problems:
            return self.text
        cells = list(self.content["cells"])
        for number, source in sources.items():
            cell = cells[number - 1]
            is_text = isinstance(cell["source"], str)
            cells[number - 1] = {**cell, "source": source if is_text else LINE.findall(source)}
        return _as_json({**self.content, "cells": cells}, self.text)


def parse(path: Path, data: bytes) -> Document:
    """Return the notebook in the bytes of a file.

    Raises: NotebookError for what is no notebook of format 4, with the place and what to do.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotebookError(
            f"NB={path}: byte {error.start} is not UTF-8; open and save the notebook in Jupyter"
        ) from None
    content = _parse_json(path, text)
    _refuse_other_formats(path, content)
    problems = _add_missing("file", content, FILE_MEMBERS)
    cells = []
    for number, cell in enumerate(content["cells"], 1):
        place = f"cell {number}"
        if isinstance(cell, dict):
            is_code = cell.get("cell_type") == "code"
            problems += _add_missing(place, cell, CODE_MEMBERS if is_code else CELL_MEMBERS)
        cells.append(_read_cell(f"NB={path}: {place}", number, cell))
    problems += [
        f"cell {cell.number}: cell_type {cell.kind!r} is none of {', '.join(KNOWN_CELLS)}; it is "
        "kept as it is"
        for cell in cells
        if cell.kind not in KNOWN_CELLS
    ]
    return Document(path, text, content, tuple(cells), tuple(problems))


def _parse_json(path: Path, text: str) -> Json:
    """Return the file's object. Raises: NotebookError for other JSON and for none."""
    if not text.strip(f"{BYTE_ORDER_MARK} \t\r\n"):
        raise NotebookError(f"NB={path} is empty; name a notebook with cells")
    try:
        notebook = json.loads(text.removeprefix(BYTE_ORDER_MARK), strict=False)
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + 20] or "the end of the file"
        raise NotebookError(
            f"NB={path}:{error.lineno}:{error.colno}: not JSON: {error.msg} at {found!r}; a "
            "notebook is a JSON file: download it again, or export it from Jupyter or Colab"
        ) from None
    except RecursionError:
        raise NotebookError(f"NB={path}: JSON nested too deep for a notebook") from None
    if not isinstance(notebook, dict):
        raise NotebookError(f"NB={path}: a notebook is a JSON object, not {_shown(notebook)}")
    return notebook


def _refuse_other_formats(path: Path, notebook: Mapping[str, Any]) -> None:
    """Refuse what is not a notebook of format 4. Raises: NotebookError."""
    version = notebook.get("nbformat")
    if "worksheets" in notebook or (isinstance(version, int) and version < 4):
        raise NotebookError(
            f"NB={path}: nbformat {version}, of before 2015; convert it first with: jupyter "
            f"nbconvert --to notebook --nbformat 4 {path}"
        )
    if version not in (4, None) or isinstance(version, bool):
        raise NotebookError(f"NB={path}: nbformat {_shown(version)}; this reads format 4")
    if "cells" not in notebook:
        raise NotebookError(f"NB={path}: it has no cells, so it is no notebook; name another file")
    if not isinstance(notebook["cells"], list):
        raise NotebookError(
            f"NB={path}: cells is {_shown(notebook['cells'])}, not a list; open and save the "
            "notebook in Jupyter"
        )


def _add_missing(place: str, found: Json, members: Mapping[str, Any]) -> list[str]:
    """Add the members that are not there; return what to say of it."""
    missing = {name: value for name, value in members.items() if name not in found}
    if not missing:
        return []
    found |= missing
    shown = json.dumps(missing)[1:-1]
    return [f"{place}: added {shown}, which the format asks for"]


def _read_cell(place: str, number: int, cell: Any) -> Cell:
    """Return one cell. Raises: NotebookError if it is none."""
    if not isinstance(cell, dict):
        raise NotebookError(f"{place} is {_shown(cell)}, not an object; delete it")
    source, kind, outputs = cell["source"], cell.get("cell_type"), cell.get("outputs", [])
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise NotebookError(f"{place}: source is {_shown(source)}, not a text or a list of lines")
    if not isinstance(kind, str):
        raise NotebookError(f"{place}: cell_type is {_shown(kind)}; write code, markdown or raw")
    if not isinstance(outputs, list):
        raise NotebookError(f"{place}: outputs is {_shown(outputs)}, not a list; write []")
    return Cell(number, kind, source, tuple(outputs))


def _as_json(content: Json, before: str) -> str:
    """Return JSON in the layout of the text from before."""
    newline, indent, colon = LAYOUT.search(before).groups()
    comma = ", " if indent is None and colon != ":" else ","
    options = {"indent": indent, "separators": (comma, colon)}
    text = json.dumps(content, ensure_ascii=before.isascii(), **options)
    if re.search("[\ud800-\udfff]", text):  # half a character, which only an escape can be
        text = json.dumps(content, **options)
    text = text.replace("\n", newline or "\n")
    return before[: before.index("{")] + text + before[before.rindex("}") + 1 :]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
