"""The notebooks of tests/notebooks, and small ones made in a test."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conftest import ROOT

from notebook_converter.convert import Conversion, convert
from sft_play.commands.notebook import read_notebook

FOLDER = ROOT / "tests" / "notebooks"
GOLDEN = sorted(FOLDER.glob("*.ipynb"))


def cell(source: Any, kind: str = "code") -> dict[str, Any]:
    """Return a cell as it is in a file."""
    made = {"cell_type": kind, "metadata": {}, "source": source}
    return made | {"execution_count": None, "outputs": []} if kind == "code" else made


def as_notebook(cells: Iterable[Any], **members: Any) -> dict[str, Any]:
    """Return a notebook of cells, or of sources of code cells."""
    made = [part if isinstance(part, dict) else cell(part) for part in cells]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5, **members}


def write_notebook(path: Path, *cells: Any, **members: Any) -> Path:
    """Write a notebook of cells, or of sources of code cells."""
    path.write_text(json.dumps(as_notebook(cells, **members), indent=1), encoding="utf-8")
    return path


def sources(text: str) -> list[str]:
    """Return the sources of the cells in a notebook's text."""
    return ["".join(part["source"]) for part in json.loads(text)["cells"]]


def converted(path: Path) -> Conversion:
    """Return the conversion of a notebook in a file."""
    return convert(read_notebook(path))


def converted_cell(tmp_path: Path, *cells: str) -> list[str]:
    """Return the sources of these code cells after conversion."""
    return sources(converted(write_notebook(tmp_path / "in.ipynb", *cells)).text)
