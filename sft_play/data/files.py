"""Data files to chunks of records, each with its place: JSONL, JSON, CSV, TSV, Parquet and Arrow. Knows no shapes, loads no torch.

A file takes the memory of a chunk, but for .json, whose text is held whole. What is slow is left to `parsed`, which any process
may call: the lines of JSONL travel undecoded, the rows of Parquet and Arrow as Arrow batches.
"""

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sft_play.data import strict_json
from sft_play.data.rows import Unreadable
from sft_play.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = {".csv": ",", ".tsv": "\t"}  # what stands between two fields
LINED = (".jsonl", ".ndjson", *TABLES)  # whose records are named by their line
TEXTS = (*LINED, ".json")
COLUMNAR = (".parquet", ".arrow")
FORMATS = (*TEXTS, *(f"{suffix}.gz" for suffix in TEXTS), *COLUMNAR)
ROWS_PER_CHUNK = 2000
CHUNK_BYTES = 16 << 20  # a chunk of long rows has fewer of them
LONGEST_LINE = (
    256 << 20
)  # bytes; a file without line breaks is not read into memory to find that out
LONGEST_FIELD = (
    64 << 20
)  # characters of a CSV field; a quote that is never closed takes in all that follows
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Records of a file in their order. `numbers` are lines from 1 or indices from 0; `bytes_read`, what they take of the file on disk."""

    path: Path
    numbers: Sequence[int]
    records: "list[bytes] | list[dict[str, Any] | Unreadable] | pa.RecordBatch"
    bytes_read: int

    def origin(self, position: int) -> str:
        """Return where the record at a position of this chunk stands."""
        return origin_of(self.path, self.numbers[position])

    def raw(self, position: int) -> str:
        """Return the text of a record: a line as it stands in the file, else JSON."""
        record = (
            self.records[position]
            if isinstance(self.records, list)
            else next(_of_batch(self.records.slice(position, 1)))
        )
        if isinstance(record, bytes):
            return record.decode("utf-8", "backslashreplace").rstrip("\r\n")
        return record.raw if isinstance(record, Unreadable) else json.dumps(record, default=str)


def format_of(path: Path) -> str | None:
    """Return which of FORMATS a file has by its name, None if none."""
    name = path.name.lower()
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


def origin_of(path: Path, number: int) -> str:
    """Return `file:line` or `file[index]` of a record."""
    return (
        f"{path}:{number}"
        if path.name.lower().removesuffix(".gz").endswith(LINED)
        else f"{path}[{number}]"
    )


def read_chunks(path: Path, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[Chunk]:
    """Yield the records of a file in chunks of at most so many rows, and of about CHUNK_BYTES.

    Raises: DataError for a file that is missing, damaged, or not what its name says.
    """
    form = format_of(path)
    if form is None:
        raise DataError(f"{path}: a data file ends in {', '.join(FORMATS)}")
    with _explained(path):
        path.stat()
        if not path.is_file():
            raise DataError(f"{path}: a folder or a device, not a file")
        yield from (
            _arrow_chunks(path, rows_per_chunk)
            if form in COLUMNAR
            else _text_chunks(path, form, rows_per_chunk)
        )


def parsed(
    chunk: Chunk, columns: Iterable[str] | None = None
) -> Iterator[dict[str, Any] | Unreadable]:
    """Return every record of a chunk as an object with keys, or why it is none; from Arrow batches only `columns`, if given."""
    if isinstance(chunk.records, list):
        return (
            strict_json.load_row(record) if isinstance(record, bytes) else record
            for record in chunk.records
        )
    return _of_batch(chunk.records, columns)


def _of_batch(
    batch: "pa.RecordBatch", columns: Iterable[str] | None = None
) -> Iterator[dict[str, Any] | Unreadable]:
    from sft_play.data import arrow  # a quarter of a second to load, which JSONL need not wait for

    return arrow.records(batch, columns)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file in what reading it raises."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such data file") from None
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path}: no gzip file, or a damaged one ({error}); compress it anew"
        ) from None
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: the compressed text breaks off or is damaged ({error}); fetch or compress it anew"
        ) from None
    except OSError as error:  # of Arrow, too, over damaged pages
        raise DataError(
            f"{path}: cannot be read: {error.strerror or str(error).partition(chr(10))[0]}"
        ) from None


def _arrow_chunks(path: Path, rows_per_chunk: int) -> Iterator[Chunk]:
    from sft_play.data import arrow

    before, size = 0, path.stat().st_size
    for batch, share in arrow.batches(path, rows_per_chunk, CHUNK_BYTES):
        yield Chunk(path, range(before, before + batch.num_rows), batch, int(size * share))
        before += batch.num_rows


Record = tuple[int, Any, int]  # its number, itself, its characters


def _text_chunks(path: Path, form: str, rows_per_chunk: int) -> Iterator[Chunk]:
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if form.endswith(".gz") else raw
        form = form.removesuffix(".gz")
        if form == ".json":
            records = _json_records(path, stream.read())
        elif form in TABLES:
            # bytes that are no UTF-8 come through as surrogates, so that the row that holds them can be named
            text = io.TextIOWrapper(
                stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            records = _table_records(path, text, TABLES[form])
        else:
            records = _lines(path, stream)
        yield from _chunked(path, records, raw.tell, rows_per_chunk)


def _chunked(
    path: Path, records: Iterator[Record], position: Callable[[], int], rows_per_chunk: int
) -> Iterator[Chunk]:
    numbers, values, size, before = [], [], 0, 0
    for number, value, characters in records:
        numbers.append(number)
        values.append(value)
        size += characters
        if len(values) == rows_per_chunk or size >= CHUNK_BYTES:
            now = position()
            yield Chunk(path, numbers, values, now - before)
            numbers, values, size, before = [], [], 0, now
    if values:
        yield Chunk(path, numbers, values, position() - before)


def _lines(path: Path, stream: IO[bytes]) -> Iterator[Record]:
    is_first = True
    for number in count(1):
        line = stream.readline(LONGEST_LINE)
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        elif not line:
            return
        if not line or line.isspace():
            continue
        if is_first and line.lstrip().startswith(b"["):
            raise DataError(
                f"{path}:{number}: the file begins with a JSON list; rows are one JSON object a line, and a list of them is a .json file"
            )
        if len(line) == LONGEST_LINE:
            raise DataError(
                f"{path}:{number}: a line of more than {LONGEST_LINE >> 20} MiB; rows are one JSON object a line"
            )
        is_first = False
        yield number, line, len(line)


def _json_records(path: Path, data: bytes) -> Iterator[Record]:
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from None
    index = 0
    try:
        if not text.strip():
            return
        if not text.lstrip().startswith("["):
            yield from _wrapped_list(path, text)
            return
        for record, characters in strict_json.elements(text):
            yield index, record, characters
            index += 1
    except strict_json.NotJsonError as error:
        raise DataError(f"{path}[{index}]: {error}") from None


def _wrapped_list(path: Path, text: str) -> Iterator[Record]:
    """Yield the rows of `{"data": [...]}`, whose other values are no lists."""
    first, _, rest = text.strip().partition("\n")
    if first.startswith("{") and first.rstrip().endswith("}") and rest.lstrip().startswith("{"):
        raise DataError(
            f"{path}: holds one JSON object a line; name it {path.name.lower().removesuffix('.gz').removesuffix('.json')}.jsonl"
        )
    try:
        value = strict_json.load(text)
    except strict_json.NotJsonError as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: a .json data file holds a list of rows, not {strict_json.NAMES[type(value)]}"
        )
    lists = [key for key, held in value.items() if isinstance(held, list)]
    if lists != ["data"]:
        found = (
            f"the lists {', '.join(lists)}" if lists else f"the keys {', '.join(value) or 'none'}"
        )
        raise DataError(
            f'{path}: a .json data file holds a list of rows, or {{"data": [...]}} and no other list; this is one object with {found}'
        )
    for index, record in enumerate(value["data"]):
        yield (
            index,
            record
            if isinstance(record, dict)
            else Unreadable(strict_json.no_object(record), json.dumps(record)),
            0,
        )


def _table_records(path: Path, text: IO[str], delimiter: str) -> Iterator[Record]:
    """Yield the records of a CSV or TSV file, every value a text; the first record names the columns."""
    csv.field_size_limit(LONGEST_FIELD)  # the module's own is 128 KiB, shorter than some documents
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:  # nobody can tell where the next row begins
            raise DataError(f"{path}:{line}: {_csv_reason(error)}") from None
        if fields is None:
            return
        if not fields or (len(fields) == 1 and not fields[0].strip()):
            continue
        if not header:
            header = _checked_header(path, line, fields, delimiter)
            continue
        whole = delimiter.join(fields)
        yield line, _table_record(header, fields, whole), len(whole)


def _csv_reason(error: csv.Error) -> str:
    if "field larger" in str(error) or "unexpected end" in str(error):
        return "a quote is opened in this row and never closed; quotes inside a field are doubled"
    return f"not valid CSV: {error}; quotes inside a field are doubled"


def _checked_header(path: Path, line: int, names: list[str], delimiter: str) -> list[str]:
    where = f"{path}:{line}: the first line names the columns"
    if not all(name.strip() for name in names):
        raise DataError(
            f"{where}, and number {[bool(name.strip()) for name in names].index(False) + 1} of {len(names)} has no name"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{where}, and {twice[0]!r} stands there twice")
    other = next((mark for mark in ";\t|," if mark != delimiter and mark in names[0]), None)
    if len(names) == 1 and other:
        raise DataError(
            f"{where}, and this names one, {names[0]!r}; {'tabs' if delimiter == chr(9) else 'commas'} stand between fields, not {other!r}"
        )
    return names


def _table_record(header: list[str], fields: list[str], whole: str) -> dict[str, Any] | Unreadable:
    try:
        whole.encode("utf-8")
    except UnicodeEncodeError:
        raw = whole.encode("utf-8", "surrogateescape")
        return Unreadable(
            "not UTF-8; save the file as UTF-8", raw.decode("utf-8", "backslashreplace")
        )
    if len(fields) != len(header):
        return Unreadable(
            f"{len(fields)} fields, and the first line names {len(header)} columns; a field that holds the separator stands in quotes",
            whole,
        )
    return dict(zip(header, fields, strict=True))
