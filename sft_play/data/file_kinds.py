"""The format of a data file, by its name and by its first bytes. Loads no torch."""

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from sft_play.data.rows import FORMS
from sft_play.data.tables import DELIMITERS
from sft_play.errors import DataError
from sft_play.plan.base_model import POINTER

SHEET = ".xlsx"
MARKDOWN = ".md"
TEXTS = (".txt", MARKDOWN)
LINE_FORMATS = (".jsonl", ".ndjson", *DELIMITERS, *TEXTS, SHEET)  # records are named by line
TEXT_FORMATS = (".jsonl", ".ndjson", *DELIMITERS, ".json", *TEXTS)
COMPRESSIONS = (".gz", ".zst")
COLUMNAR_FORMATS = (".parquet", ".arrow")
FORMATS = (
    *TEXT_FORMATS,
    *(suffix + compression for compression in COMPRESSIONS for suffix in TEXT_FORMATS),
    *COLUMNAR_FORMATS,
    SHEET,
)
ENDINGS = f"a data file ends in {', '.join(FORMATS)}"
FIRST_BYTES = 4096  # with the first names in an Office file


def file_format(path: Path) -> str | None:
    """Return the format in FORMATS of a file name, None if there is none."""
    name = path.name.lower()
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


@functools.cache
def base_format(path: Path) -> str:
    """Return the format of a file without its compression, "" if it has none."""
    suffix = file_format(path) or ""
    for compression in COMPRESSIONS:
        suffix = suffix.removesuffix(compression)
    return suffix


def format_origin(path: Path, number: int) -> str:
    """Return `file:line` or `file[index]` of a record."""
    if base_format(path) in LINE_FORMATS:
        return f"{path}:{number}"
    return f"{path}[{number}]"


@dataclass(frozen=True)
class Content:
    """One of the contents in formats.toml."""

    what: str
    start: str  # regular expression of bytes
    ending: str = ""  # of the name of a file with them
    unpack: str = ""  # unpacks a file of that name, and removes it
    remedy: str = ""


CONTENTS = [Content(**facts) for facts in FORMS["contents"]]


def refuse_other_content(path: Path, begins: bytes, is_unpacked: bool = False) -> None:
    """Raise DataError if a file is something else than its name says.

    `begins` are the first bytes of the file, or of the text in it.
    """
    if begins.startswith(POINTER):
        raise DataError(f"{path} is a pointer of git-lfs, not the file; run git lfs pull")
    for content in CONTENTS:
        if re.match(content.start.encode(), begins):
            if is_unpacked or not content.ending or path.suffix.lower() != content.ending:
                raise DataError(f"{path} is {content.what}; {_remedy(path, content, is_unpacked)}")
            return


def _remedy(path: Path, content: Content, is_unpacked: bool) -> str:
    """Return what to type for a file that its name calls something else."""
    if content.remedy:
        return content.remedy
    if is_unpacked:
        return "unpack it"
    stem = path.name[: -len(file_format(path) or "")]
    named = path.with_name(stem + (base_format(path) if content.unpack else "") + content.ending)
    if file_format(named):
        return f"rename it to {named.name}{', or unpack it' if content.unpack else ''}"
    old, new = map(shlex.quote, map(str, (path, named)))
    return f"unpack it: mv {old} {new} && {content.unpack} {new}"
