"""`make convert-notebook` and `make check-notebook`. Loads no torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from notebook_converter import checklist
from notebook_converter import script as scripts
from notebook_converter.convert import convert
from notebook_converter.document import Document, NotebookError, parse
from notebook_converter.recognize import Notebook
from sft_play import reading
from sft_play.commands.call import Call, write_out
from sft_play.errors import ConfigError

MAX_NOTEBOOK_BYTES = 32 << 20
FORMS = "OUT=converted.ipynb is a notebook, OUT=train.py a script"


@contextlib.contextmanager
def notebook_errors() -> Iterator[None]:
    """Raise what the converter refuses as an error of a setting, which has an exit class."""
    try:
        yield
    except NotebookError as error:
        raise ConfigError(str(error)) from None


@notebook_errors()
def convert_notebook(call: Call) -> list[str]:
    """Convert NB and write OUT; return the report. Without OUT nothing is written.

    Raises: ConfigError for a file that is not a notebook, and if OUT exists and OVERWRITE is not 1.
    """
    document = _document(call)
    named = call.words.text("OUT")
    out = Path(named) if named else None
    suffix = out.suffix if out else ".ipynb"
    if suffix == ".py":
        text, report = scripts.export(document, out)
        end = [f"wrote {out}", f"next torchrun --nproc_per_node=2 {out}"]
    elif suffix == ".ipynb":
        made = convert(document)
        text, report = made.text, made.report
        changed = len(made.changed_cells)
        if not changed:
            report.append("nothing was changed")
        end = [f"wrote {out}: {changed} of {len(document.cells)} cells changed"]
    else:
        raise ConfigError(f"OUT={out}: {FORMS}")
    if out is None:
        end = [f"nothing was written: {FORMS}"]
    else:
        write_out(out, text, call.overwrites)
    return [_title(document), *report, *end]


def check_notebook(call: Call) -> tuple[list[str], bool]:
    """Return the five points of the checklist for NB, and whether its code meets all four.

    The fifth point, that it was tried, is read off the outputs of NB and of its other copies.
    Raises: ConfigError for a file that is not a notebook.
    """
    names = call.environ.get("NB", "").split(",")
    first, *others = [read_notebook(Path(name.strip())) for name in names if name.strip()] or [
        _document(call)
    ]
    points = checklist.check(first, others)
    met = sum(point.is_met for point in points)
    score = f"{met} of {len(points)} points"
    lines = [_title(first), *(point.line() for point in points), score]
    return lines, all(point.is_met for point in points[:-1])


def _document(call: Call) -> Document:
    path = call.words.text("NB")
    if path is None:
        raise ConfigError("name a notebook: NB=notebook.ipynb")
    return read_notebook(Path(path))


@notebook_errors()
def read_notebook(path: Path) -> Document:
    """Return the notebook in a file. Raises: ConfigError for a file that is not one."""
    if path.is_dir():
        raise ConfigError(f"NB={path} is a folder; name a notebook in it")
    try:
        data = reading.read_bytes(path, MAX_NOTEBOOK_BYTES)
    except OSError as error:
        raise ConfigError(f"NB={path}: {error.strerror}; name a notebook") from None
    return parse(path, data)


def _title(document: Document) -> str:
    return f"{document.path}: {Notebook(document).kind.value}"
