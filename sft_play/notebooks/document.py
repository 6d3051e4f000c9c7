"""A notebook file: read, checked, and written with nothing changed but the text of some cells.

The file's own text is kept: changed cells are put in their places in it, so that outputs, metadata
and the spelling of the JSON stay as they are, to the byte. Knows no Python code.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.errors import ConfigError
from sft_play.runs.files import write_text

KNOWN_CELLS = ("code", "markdown", "raw")
BYTE_ORDER_MARK = "\ufeff"
SPACE = re.compile(r"[ \t\r\n]*")
LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
JSON_DECODER = json.JSONDecoder(strict=False)
SHOWN = 60  # characters of a wrong value in a message


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
    cells: tuple[Cell, ...]
    problems: tuple[str, ...]  # what the format asks for and this file lacks

    def with_sources(self, sources: Mapping[int, str]) -> str:
        """Return the text of the file with other sources, by the cells' numbers."""
        text = self.text
        spans = _source_spans(text)
        for number in sorted(sources, reverse=True):
            span = spans[number - 1]
            written = _as_json(sources[number], text[span.start : span.end], text.isascii())
            text = text[: span.start] + written + text[span.end :]
        return text


class Span(NamedTuple):
    """A value in a JSON text: from `start` up to `end`."""

    start: int
    end: int


def read(path: Path) -> Document:
    """Return a notebook.

    Raises: ConfigError for what is no notebook of format 4, with the place and what to do.
    """
    text = _read_text(path)
    notebook = _parse_json(path, text)
    _refuse_other_formats(path, notebook)
    text, mended = _with_missing_members(text, notebook)
    cells = tuple(_cell(path, number, cell) for number, cell in enumerate(notebook["cells"], 1))
    unknown = [
        f"cell {cell.number}: cell_type {cell.kind!r} is none of {', '.join(KNOWN_CELLS)}; it is "
        "kept as it is"
        for cell in cells
        if cell.kind not in KNOWN_CELLS
    ]
    return Document(path, text, cells, (*mended, *unknown))


def write(path: Path, text: str, may_replace: bool = False) -> None:
    """Write a file, whole or not at all.

    Raises: ConfigError where it is there and must not be replaced, or cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"OUT={path} is a folder; name a file in it")
    if path.exists() and not may_replace:
        raise ConfigError(
            f"OUT={path} is there already; name another file, or add OVERWRITE=1 to replace it"
        )
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"OUT={path}: {error.strerror}; name a file in a folder that can be written"
        ) from None


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"NB={path} is a folder; name a notebook in it")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"NB={path}: {error.strerror}; name a notebook") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"NB={path}: byte {error.start} is not UTF-8; open and save the notebook in Jupyter"
        ) from None


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    """Return the file's object. Raises: ConfigError for other JSON and for none."""
    if not text.strip(f"{BYTE_ORDER_MARK} \t\r\n"):
        raise ConfigError(f"NB={path} is empty; name a notebook with cells")
    try:
        notebook = JSON_DECODER.decode(text.removeprefix(BYTE_ORDER_MARK))
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + 20] or "the end of the file"
        raise ConfigError(
            f"NB={path}:{error.lineno}:{error.colno}: not JSON: {error.msg} at {found!r}; a "
            "notebook is a JSON file: download it again, or export it from Jupyter or Colab"
        ) from None
    except RecursionError:
        raise ConfigError(f"NB={path}: JSON nested too deep for a notebook") from None
    if not isinstance(notebook, dict):
        raise ConfigError(f"NB={path}: a notebook is a JSON object, not {_shown(notebook)}")
    return notebook


def _refuse_other_formats(path: Path, notebook: dict[str, Any]) -> None:
    """Refuse what is not a notebook of format 4. Raises: ConfigError."""
    version = notebook.get("nbformat")
    if "worksheets" in notebook or (isinstance(version, int) and version < 4):
        raise ConfigError(
            f"NB={path}: nbformat {version}, of before 2015; convert it first with: jupyter "
            f"nbconvert --to notebook --nbformat 4 {path}"
        )
    if version not in (4, None) or isinstance(version, bool):
        raise ConfigError(f"NB={path}: nbformat {_shown(version)}; this reads format 4")
    if "cells" not in notebook:
        raise ConfigError(f"NB={path}: it has no cells, so it is no notebook; name another file")
    if not isinstance(notebook["cells"], list):
        raise ConfigError(
            f"NB={path}: cells is {_shown(notebook['cells'])}, not a list; open and save the "
            "notebook in Jupyter"
        )


def _cell(path: Path, number: int, cell: Any) -> Cell:
    """Return one cell. Raises: ConfigError where it is none."""
    place = f"NB={path}: cell {number}"
    if not isinstance(cell, dict):
        raise ConfigError(f"{place} is {_shown(cell)}, not an object; delete it")
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise ConfigError(f"{place}: source is {_shown(source)}, not a text or a list of lines")
    kind = cell.get("cell_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{place}: cell_type is {_shown(kind)}; write code, markdown or raw")
    outputs = cell.get("outputs", [])
    if not isinstance(outputs, list):
        raise ConfigError(f"{place}: outputs is {_shown(outputs)}, not a list; write []")
    return Cell(number, kind, source, tuple(outputs))


def _with_missing_members(text: str, notebook: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the file's text with the members that format 4 asks for, and what they are."""
    insertions: list[tuple[int, str]] = []
    said: list[str] = []

    def look(place: str, at: int, found: Mapping[str, Any], wanted: dict[str, str]) -> None:
        missing = {name: value for name, value in wanted.items() if name not in found}
        comma = ", " if found else ""
        members = ", ".join(f'"{name}": {value}' for name, value in missing.items())
        if missing:
            insertions.append((at + 1, members + comma))
            said.append(f"{place}: added {members}, which the format asks for")

    look("file", _begin(text), notebook, {"metadata": "{}", "nbformat": "4", "nbformat_minor": "4"})
    cells = notebook["cells"]
    for number, (cell, span) in enumerate(zip(cells, _cell_spans(text), strict=True), 1):
        if isinstance(cell, dict):
            wanted = {"metadata": "{}", "source": '""'}
            if cell.get("cell_type") == "code":
                wanted |= {"outputs": "[]", "execution_count": "null"}
            look(f"cell {number}", span.start, cell, wanted)
    for at, members in sorted(insertions, reverse=True):
        text = text[:at] + members + text[at:]
    return text, said


def _cell_spans(text: str) -> list[Span]:
    """Return where the cells of a notebook are in its text."""
    return list(_items(text, _members(text, _begin(text))["cells"].start))


def _source_spans(text: str) -> list[Span]:
    """Return where the sources of the cells are in a notebook's text."""
    return [_members(text, span.start)["source"] for span in _cell_spans(text)]


def _begin(text: str) -> int:
    """Return where the object of a notebook's text begins."""
    return SPACE.match(text, len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0).end()


def _members(text: str, start: int) -> dict[str, Span]:
    """Return where the values of the object at `start` are; of a repeated name, the last."""
    spans: dict[str, Span] = {}
    at = SPACE.match(text, start + 1).end()
    while text[at] != "}":
        name, at = JSON_DECODER.raw_decode(text, at)
        at = SPACE.match(text, at).end() + 1  # the colon
        begin = SPACE.match(text, at).end()
        _, end = JSON_DECODER.raw_decode(text, begin)
        spans[name] = Span(begin, end)
        at = _after_comma(text, end)
    return spans


def _items(text: str, start: int) -> Iterator[Span]:
    """Yield where the items of the list at `start` are."""
    at = SPACE.match(text, start + 1).end()
    while text[at] != "]":
        _, end = JSON_DECODER.raw_decode(text, at)
        yield Span(at, end)
        at = _after_comma(text, end)


def _after_comma(text: str, end: int) -> int:
    at = SPACE.match(text, end).end()
    return SPACE.match(text, at + 1).end() if text[at] == "," else at


def _as_json(source: str, written: str, is_ascii: bool) -> str:
    """Return a source as JSON, a text or a list of lines as what was `written` in its place."""
    is_ascii = is_ascii or any("\ud800" <= character <= "\udfff" for character in source)
    if not written.startswith("["):
        return json.dumps(source, ensure_ascii=is_ascii)
    before = SPACE.match(written, 1).group()
    after = re.search(r"[ \t\r\n]*\]$", written).group()
    if not written[1:-1].strip():  # an empty list
        before, after = "", "]"
    lines = [json.dumps(line, ensure_ascii=is_ascii) for line in LINES.findall(source)]
    between = f",{before}" if before else ", "
    return f"[{before}{between.join(lines)}{after}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
