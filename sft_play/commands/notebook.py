"""`make convert-notebook` and `make check-notebook`. Loads no torch."""

import os
import tempfile
from pathlib import Path

from sft_play.commands.call import Call
from sft_play.config import loader
from sft_play.errors import ConfigError
from sft_play.notebooks import checklist, settings
from sft_play.notebooks import document as documents
from sft_play.notebooks import script as scripts
from sft_play.notebooks.convert import convert
from sft_play.notebooks.document import Document
from sft_play.notebooks.recognise import Notebook

FORMS = "OUT=converted.ipynb is a notebook, OUT=train.py a script, OUT=config.yaml a config"


def convert_notebook(call: Call) -> list[str]:
    """Convert NB and write OUT; return the report. Without OUT nothing is written.

    Raises: ConfigError for what is no notebook, and where OUT is there and OVERWRITE is not 1.
    """
    document = _document(call)
    named = call.words.text("OUT")
    out = Path(named) if named else None
    if out is not None and out.suffix == ".py":
        text, report = scripts.export(document, out)
        _write(call, out, text)
        follow = f"next torchrun --nproc_per_node=2 {out}"
        return [_title(document), *report, f"wrote {out}", follow]
    if out is not None and out.suffix in (".yaml", ".yml"):
        return _write_config(call, document, out)
    if out is not None and out.suffix != ".ipynb":
        raise ConfigError(f"OUT={out}: {FORMS}")
    made = convert(document)
    report = [_title(document), *made.report]
    if not made.changed_cells:
        report.append("nothing was changed")
    if out is None:
        return [*report, f"nothing was written: {FORMS}"]
    _write(call, out, made.text)
    counts = f"{len(made.changed_cells)} of {len(document.cells)} cells changed"
    return [*report, f"wrote {out}: {counts}"]


def check_notebook(call: Call) -> tuple[list[str], bool]:
    """Return the five points of the checklist for NB, and whether its code meets all four.

    The fifth point, that it was tried, is read off the outputs of NB and of its other copies.
    Raises: ConfigError for what is no notebook.
    """
    names = call.environ.get("NB", "").split(",")
    first, *others = [documents.read(Path(name.strip())) for name in names if name.strip()] or [
        _document(call)
    ]
    points = checklist.check(first, others)
    met = sum(point.is_met for point in points)
    score = f"{met} of {len(points)} points"
    lines = [_title(first), *(point.line() for point in points), score]
    return lines, all(point.is_met for point in points[:-1])


def _write_config(call: Call, document: Document, out: Path) -> list[str]:
    """Write a config with the notebook's settings; return the report.

    Raises: ConfigError for a setting of the notebook that no run can have.
    """
    text, report = settings.export(document, call.words.text("DATA"))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / out.name
        draft.write_text(text, encoding="utf-8")
        try:
            loader.load(str(draft))
        except ConfigError as error:
            problems = str(error).replace(str(draft), str(out))
            said = f"NB={document.path}: no run can have all its settings; nothing was written"
            raise ConfigError(f"{said}:\n{problems}") from None
    _write(call, out, text)
    return [_title(document), *report, f"wrote {out}", f"next make plan CONFIG={out}"]


def _document(call: Call) -> Document:
    path = call.words.text("NB")
    if path is None:
        raise ConfigError("name a notebook: NB=notebook.ipynb")
    return documents.read(Path(path))


def _write(call: Call, out: Path, text: str) -> None:
    """Write OUT. Raises: ConfigError if it is there and OVERWRITE is not 1."""
    documents.write(out, text, may_replace=call.words.text("OVERWRITE") == "1")


def _title(document: Document) -> str:
    return f"{os.fspath(document.path)}: {Notebook(document).kind.value}"
