"""Parquet files, Arrow streams (as Hugging Face datasets writes them) and Arrow files.

Reads them as record batches, and batches as records. Loads no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sft_play.data.rows import Json, UnreadableRecord
from sft_play.errors import DataError

BatchOfFile = tuple[pa.RecordBatch, float]  # rows, and the fraction of their file
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_batches(path: Path, max_rows: int, max_bytes: int) -> Iterator[BatchOfFile]:
    """Yield a file's rows in batches of at most `max_rows`, and of about `max_bytes`.

    Raises: DataError for a damaged file, OSError.
    """
    if path.suffix.lower() == ".parquet":
        batches = _read_parquet(path, max_rows)
    else:
        batches = _read_arrow(path)
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
    nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
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
        for name in nested:
            record[name] = _without_nulls(record[name])
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


def _without_nulls(value: Any) -> Any:
    """Return nested values without null keys.

    Arrow gives a struct every key that any row of its column has.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    return value
