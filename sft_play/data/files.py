"""Data files (JSONL, JSON, CSV, TSV, Parquet, Arrow) as chunks of records.

Knows no row formats and loads no torch. Reading needs the memory of one chunk, except for .json
files that are one object. Parsing JSON is slow, so `parse_records` does it in any process: chunks
contain undecoded JSONL lines.
"""

import contextlib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from sft_play import reading
from sft_play.config.layers import nearest_path
from sft_play.data import json_files, text_files
from sft_play.data.file_kinds import (
    COLUMNAR_FORMATS,
    ENDINGS,
    FIRST_BYTES,
    SHEET,
    TEXT_FORMATS,
    TEXTS,
    base_format,
    file_format,
    format_origin,
    refuse_other_content,
)
from sft_play.data.rows import (
    MAX_LISTED_ROWS,
    BadRow,
    Json,
    NumberedRecord,
    UnreadableRecord,
    show_value,
)
from sft_play.data.tables import DELIMITERS, read_sheet, read_table
from sft_play.errors import DataError

UNPACK = "unpack it first with gzip -dk or zstd -d"
UNPACKED_BYTES = 256 << 10  # at once
ROWS_PER_CHUNK = 500  # 32 processes share 50,000 rows evenly; larger chunks are not faster
CHUNK_BYTES = 16 << 20  # a chunk of long rows has fewer rows
# Share of the rows that were read with one cause, above which rows are not listed one by one.
NEARLY_ALL = 0.9
MOST = 0.5  # of the rows, if the cause is the chat template
# The parts of messages with the same cause that differ: quoted texts, values, numbers
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|(?<= is ).*(?=, not )|\d+")
PLACE = re.compile(r"(:\d+|\[\d+\])$")
GO_ON_WITHOUT = (
    "correct them, or continue without: DATA_ON_BAD_ROW=quarantine moves them to the run's folder"
)
TEMPLATE_CAUSE = "the chat template"
NAMES_A_SETTING = re.compile(r"\b(?:DATA|MODEL)_[A-Z_]+=")
WANTS_OTHER_TURNS = re.compile("refuses the conversation|of the role system|once it is answered")
JOIN = (
    'to join turns of one role: jq -c \'def r: if . == "developer" then "system" else . end; '
    ".messages |= reduce .[] as $m ([]; if (.[-1].role | r) == ($m.role | r) "
    'then .[-1].content += "\\n\\n" + $m.content else . + [$m] end)\' rows.jsonl > joined.jsonl'
)
TEMPLATE = (
    "the chat template of model.name does this; "
    "MODEL_CHAT_TEMPLATE=default uses a plain one, or name your Jinja file"
)


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a file."""

    path: Path
    numbers: Sequence[int]  # of each record: its line from 1, or its index from 0
    records: Sequence[bytes] | Sequence[Json | UnreadableRecord]
    bytes_read: int  # size of the records in the file on disk

    def take(self, positions: Sequence[int]) -> "Chunk":
        """Return the records at some positions of this chunk, at least one."""
        numbers = [self.numbers[position] for position in positions]
        records = [self.records[position] for position in positions]
        return replace(self, numbers=numbers, records=records)

    def raw(self, position: int) -> str:
        """Return the text of a record: a line as in the file, otherwise JSON."""
        record = self.records[position]
        if isinstance(record, bytes):
            return record.decode("utf-8", "backslashreplace").rstrip("\r\n")
        if isinstance(record, UnreadableRecord):
            return record.raw
        return json.dumps(record, default=show_value)


def _encoding_hint(path: Path) -> str:
    """Return the encoding of a text file that is not UTF-8, "" if it is unknown."""
    if base_format(path) not in TEXT_FORMATS:
        return ""
    with path.open("rb") as raw:
        return text_files.conversion_hint(path, open_decompressed(raw, path))


def digest_files(paths: Iterable[Path], choice: str = "") -> str:
    """Return the SHA-256 of the contents of files, in their order, and of a choice of rows."""
    total = hashlib.sha256(choice.encode())
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def suggest_path(missing: str | Path) -> str:
    """Return a hint with the existing path most similar to a missing one, "" if there is none."""
    near = nearest_path(missing)
    return f"; did you mean {near}?" if near else ""


def read_chunks(
    path: Path, rows_per_chunk: int = ROWS_PER_CHUNK, line_by_line: bool = False
) -> Iterator[Chunk]:
    """Yield the records of a file in chunks of at most `rows_per_chunk` and about CHUNK_BYTES.

    `line_by_line` makes each line of a plain text a record.

    Raises: DataError for a file that is missing, damaged, or does not have its name's format.
    """
    suffix = file_format(path)
    if suffix is None:
        raise DataError(f"{path}: {ENDINGS}")
    with _errors_naming(path):
        reading.refuse_special(path)
        if path.is_dir():
            raise DataError(f"{path}: a folder, not a file")
        with path.open("rb") as file:
            refuse_other_content(path, file.read(FIRST_BYTES))
        if suffix in COLUMNAR_FORMATS:
            from sft_play.data.arrow import ColumnarFile  # takes a quarter of a second to load

            file = ColumnarFile(path)
            yield from _group(path, file.read(), file.tell, rows_per_chunk)
        elif suffix == SHEET:
            size = path.stat().st_size
            yield from _group(path, read_sheet(path), lambda: size, rows_per_chunk)
        else:
            yield from _text_chunks(path, rows_per_chunk, line_by_line)


def parse_records(chunk: Chunk) -> Iterator[Json | BadRow]:
    """Yield every record of a chunk as an object with keys, or why it is not one."""
    for position, record in enumerate(chunk.records):
        if isinstance(record, bytes):
            record = text_files.parse_json_line(record)
        if isinstance(record, UnreadableRecord):
            origin = format_origin(chunk.path, chunk.numbers[position])
            record = BadRow(origin, record.reason, record.raw)
        yield record


@contextlib.contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Raise DataError with the file's name for errors while reading it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such data file") from None
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path}: no gzip file, or a damaged one ({error}); compress it again"
        ) from None
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: the compressed text breaks off or is damaged ({error}); "
            "download or compress it again"
        ) from None
    except OSError as error:  # Arrow raises it, too, for damaged pages
        reason = error.strerror or str(error).partition("\n")[0]
        raise DataError(f"{path}: cannot be read: {reason}") from None


class _Decompressed(io.RawIOBase):
    """The bytes of a compressed stream. Raises OSError for a decompression bomb."""

    def __init__(self, raw: io.BufferedReader, stream: Any):
        self._raw, self._stream = raw, stream
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._stream.readinto(buffer)
        self._bytes += read
        reading.refuse_bomb(self._raw.tell(), self._bytes, UNPACK)
        return read


def open_decompressed(raw: io.BufferedReader, path: Path) -> io.BufferedReader:
    """Return the decompressed stream of a file's bytes."""
    name = path.name.lower()
    if name.endswith(".gz"):
        stream: Any = gzip.GzipFile(fileobj=raw)
    elif name.endswith(".zst"):
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    else:
        return raw
    return io.BufferedReader(_Decompressed(raw, stream), UNPACKED_BYTES)


def _text_chunks(path: Path, rows_per_chunk: int, line_by_line: bool) -> Iterator[Chunk]:
    suffix = base_format(path)
    with path.open("rb") as raw:
        stream = open_decompressed(raw, path)
        if stream is not raw:
            refuse_other_content(path, stream.peek(FIRST_BYTES), is_unpacked=True)
        text_files.refuse_wide_encoding(path, stream.peek(4)[:4])
        if suffix == ".json":
            records = json_files.iter_json_rows(path, stream)
        elif suffix in DELIMITERS:
            # invalid UTF-8 becomes surrogates, so that an error can name its row
            text = io.TextIOWrapper(
                stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            records = read_table(path, text, DELIMITERS[suffix])
        elif suffix in TEXTS:
            records = text_files.read_documents(path, stream, line_by_line)
        else:
            records = text_files.read_lines(path, stream)
        yield from _group(path, records, raw.tell, rows_per_chunk)


def _group(
    path: Path,
    records: Iterator[NumberedRecord],
    file_position: Callable[[], int],
    rows_per_chunk: int,
) -> Iterator[Chunk]:
    """Group the records of a file into chunks."""
    numbers: list[int] = []
    values: list[Any] = []
    characters = 0
    chunk_start = 0  # in the file on disk
    for record in records:
        numbers.append(record.number)
        values.append(record.record)
        characters += record.characters
        if len(values) == rows_per_chunk or characters >= CHUNK_BYTES:
            position = file_position()
            yield Chunk(path, numbers, values, position - chunk_start)
            numbers = []
            values = []
            characters = 0
            chunk_start = position
    if values:
        yield Chunk(path, numbers, values, file_position() - chunk_start)


def _repeats_role(raw: str) -> bool:
    """Return whether two consecutive turns have the same role in a row that was not proven."""
    try:
        roles = [message["role"] for message in json.loads(raw)["messages"]]
    except (ValueError, TypeError):  # a text, or several rows
        return False
    return any(role == following for role, following in pairwise(roles))


class BadRows:
    """Bad rows, counted by cause; only the first ones are stored."""

    def __init__(self) -> None:
        self.total = 0
        self.first: list[BadRow] = []
        self.causes: Counter[str] = Counter()
        self._first_of_cause: dict[str, BadRow] = {}

    def add(self, row: BadRow) -> None:
        """Count a bad row."""
        cause = VARYING.sub("_", row.reason)
        self.total += 1
        self.causes[cause] += 1
        self._first_of_cause.setdefault(cause, row)
        if len(self.first) < MAX_LISTED_ROWS:
            self.first.append(row)

    def refuse(self, rows_read: int) -> NoReturn:
        """Raise DataError with the cause of nearly all rows, otherwise with the first rows."""
        ((cause, count),) = self.causes.most_common(1)
        row = self._first_of_cause[cause]
        share = MOST if row.reason.startswith(TEMPLATE_CAUSE) else NEARLY_ALL
        has_one_cause = rows_read > MAX_LISTED_ROWS and count >= share * rows_read
        listed = [row] if has_one_cause else self.first
        lines = [f"{row.origin}: {row.reason}" for row in listed]
        if has_one_cause:
            lines.append(f"so it is with {count:,} of {rows_read:,} rows, the first of them named")
        elif self.total > len(listed):
            lines.append(f"... and {self.total - len(listed)} more bad rows")
        hints: dict[str, None] = {}  # hints for the causes, each once
        for row in listed:
            if row.reason.startswith(("not UTF-8", "a text is not UTF-8")):
                hints[_encoding_hint(Path(PLACE.sub("", row.origin)))] = None
            elif row.reason.startswith(TEMPLATE_CAUSE):
                if WANTS_OTHER_TURNS.search(row.reason) and _repeats_role(row.raw):
                    hints[JOIN] = None
                if not NAMES_A_SETTING.search(row.reason):
                    hints[TEMPLATE] = None
        lines += filter(None, hints)
        if not has_one_cause and self.total != rows_read:  # it would leave none
            lines.append(GO_ON_WITHOUT)
        raise DataError("\n".join(lines))


def refuse_bad_rows(rows: Iterable[BadRow], rows_read: int = 0) -> None:
    """Raise DataError if there are bad rows; `rows_read` 0: the number read does not matter."""
    bad = BadRows()
    for row in rows:
        bad.add(row)
    if bad.total:
        bad.refuse(rows_read)
