"""`make convert-notebook` and `make check-notebook`. Loads no torch."""

import os
from pathlib import Path

from sft_play.commands.call import Call
from sft_play.errors import ConfigError
from sft_play.notebooks import document as documents
from sft_play.notebooks import notes as reports
from sft_play.notebooks.convert import convert
from sft_play.notebooks.document import Document
from sft_play.notebooks.recognise import Notebook


def convert_notebook(call: Call) -> list[str]:
    """Convert NB and write OUT; return the report. Without OUT nothing is written.

    Raises: ConfigError for what is no notebook, and where OUT is there and OVERWRITE is not 1.
    """
    document = _document(call)
    out = _out(call)
    made = convert(document)
    report = [_title(document), *reports.lines(made.notes)]
    if not made.changed_cells:
        report.append("nothing was changed")
    if out is None:
        return [*report, "nothing was written: add OUT=converted.ipynb"]
    documents.write(out, made.text, _may_replace(call))
    return [
        *report,
        f"wrote {out}: {len(made.changed_cells)} of {len(document.cells)} cells changed",
    ]


def _document(call: Call) -> Document:
    path = call.environ.get("NB", "").strip()
    if not path:
        raise ConfigError("name a notebook: NB=notebook.ipynb")
    return documents.read(Path(path))


def _out(call: Call) -> Path | None:
    path = call.environ.get("OUT", "").strip()
    return Path(path) if path else None


def _may_replace(call: Call) -> bool:
    return call.environ.get("OVERWRITE", "").strip() == "1"


def _title(document: Document) -> str:
    return f"{os.fspath(document.path)}: {Notebook(document).kind.value}"
