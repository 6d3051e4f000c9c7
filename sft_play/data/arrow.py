"""Parquet files, Arrow streams (as Hugging Face datasets writes them) and Arrow files.

Reads them as record batches, and batches as records. Loads no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sft_play.data.rows import Json, UnreadableRecord
from sft_play.data.text_files import InvalidJsonError, parse_json
from sft_play.errors import DataError

BatchOfFile = tuple[pa.RecordBatch, float]  # rows, and the fraction of their file
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_batches(path: Path, max_rows: int, max_bytes: int) -> Iterator[BatchOfFile]:
    """Yield a file's rows in batches of at most `max_rows`, and of about `max_bytes`.

    Raises: DataError for a damaged file, OSError.
    """
    is_parquet = path.suffix.lower() == ".parquet"
    batches = _read_parquet(path, max_rows) if is_parquet else _read_arrow(path)
    try:
        for batch, file_share in batches:
            if not batch.num_rows:
                continue
            rows = min(max_rows, batch.num_rows * max_bytes // max(1, batch.nbytes))
            for part in _split(batch, max(1, rows)):
                yield part, file_share * part.num_rows / batch.num_rows
    except (pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError: a column's name
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: no {path.suffix} file, or a damaged one ({reason}); fetch or write it anew"
        ) from None


def batch_records(
    batch: pa.RecordBatch, columns: Iterable[str] | None = None
) -> Iterator[Json | UnreadableRecord]:
    """Yield the rows of a batch, or why one cannot be read; only `columns` of them if given."""
    if columns is not None:
        wanted = set(columns)
        batch = batch.select([name for name in batch.schema.names if name in wanted])
    readers = {field.name: _value_reader(field.type) for field in batch.schema}
    readers = {name: read for name, read in readers.items() if read is not None}
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            text = error.object.decode("utf-8", "backslashreplace")
            yield UnreadableRecord("a text is not UTF-8", text)
            return
        for index in range(batch.num_rows):
            yield from batch_records(batch.slice(index, 1))
        return
    for record in records:
        for name, read in readers.items():
            if record[name] is not None:
                record[name] = read(record[name])
        yield record


def _split(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    if rows >= batch.num_rows:
        yield batch
        return
    for start in range(0, batch.num_rows, rows):
        # a copy, because a pickled slice carries its entire batch
        yield batch.take(pa.array(range(start, min(start + rows, batch.num_rows))))


def _read_parquet(path: Path, max_rows: int) -> Iterator[BatchOfFile]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_names(path, file.schema_arrow.names)
        for batch in file.iter_batches(max_rows):
            yield batch, batch.num_rows / file.metadata.num_rows


def _read_arrow(path: Path) -> Iterator[BatchOfFile]:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(END_OF_STREAM)))
        # Arrow takes a stream that is cut off between two batches for a complete one
        if not is_file and source.read() != END_OF_STREAM:
            raise DataError(
                f"{path}: no Arrow stream, or one that breaks off; fetch or write it anew"
            )
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_names(path, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            batch.validate(full=True)  # else a damaged offset crashes the process
            yield batch, min(1.0, batch.nbytes / source.size())


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise DataError(f"{path}: two columns are named {repeated[0]!r}; rename one")


def _value_reader(kind: pa.DataType, name: str = "") -> Callable[[Any], Any] | None:
    """Return what makes values of a type those that were written; None if they are so already.

    Json is parsed. Arrow gives a struct every key that any row of its column has: those that are
    null are left out, but for a key that no row has a value for, such as an argument that is null.
    """
    if isinstance(kind, pa.JsonType):
        return _parse_content if name in ("content", "value", "text") else _parse_json_value
    if pa.types.is_struct(kind):
        readers = {field.name: _value_reader(field.type, field.name) for field in kind}
        empty = {field.name for field in kind if pa.types.is_null(field.type)}

        def read_struct(value: Json) -> Json:
            """Return the keys that the row has."""
            read: Json = {}
            for key, held in value.items():
                reader = readers[key]
                if held is None:
                    if key in empty:
                        read[key] = None
                elif reader is None:
                    read[key] = held
                else:
                    read[key] = reader(held)
            return read

        return read_struct
    if not pa.types.is_nested(kind) or pa.types.is_map(kind) or pa.types.is_union(kind):
        return None
    read_element = _value_reader(kind.value_type)
    if read_element is None:
        return None
    return lambda values: [None if held is None else read_element(held) for held in values]


def _parse_content(text: str) -> Any:
    """Return parts, null, or a text: datasets writes a text that is JSON as it is."""
    value = _parse_json_value(text)
    has_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return value if has_parts or value is None or isinstance(value, str) else text


def _parse_json_value(text: str) -> Any:
    try:
        return parse_json(text)
    except InvalidJsonError:
        return text
