"""Parquet files, Arrow streams (what Hugging Face datasets keeps) and Arrow files to batches, and batches to records. Loads no torch."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sft_play.data.rows import Unreadable
from sft_play.errors import DataError

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def batches(path: Path, most_rows: int, most_bytes: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yield a file's rows in batches, each with its share of the file. Raises: DataError for a damaged file, OSError."""
    try:
        for batch, share in (_of_parquet if path.suffix.lower() == ".parquet" else _of_arrow)(
            path, most_rows
        ):
            rows = max(1, min(most_rows, batch.num_rows * most_bytes // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                # a copy, not a slice: pickled, a slice takes all of its batch along
                part = (
                    batch
                    if rows >= batch.num_rows
                    else batch.take(pa.array(range(start, min(start + rows, batch.num_rows))))
                )
                yield part, share * part.num_rows / batch.num_rows
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter over the name of a column
        raise DataError(
            f"{path}: no {path.suffix} file, or a damaged one ({str(error).partition(chr(10))[0]}); fetch or write it anew"
        ) from None


def records(
    batch: pa.RecordBatch, columns: Iterable[str] | None = None
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yield the rows of a batch, of `columns` alone if given, or why one cannot be read."""
    if columns is not None:
        wanted = set(columns)
        batch = batch.select([name for name in batch.schema.names if name in wanted])
    nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
    try:
        found = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield Unreadable(
                "a text is not UTF-8", error.object.decode("utf-8", "backslashreplace")
            )
        else:
            for index in range(batch.num_rows):
                yield from records(batch.slice(index, 1))
        return
    for record in found:
        for name in nested:
            record[name] = _without_nulls(record[name])
        yield record


def _of_parquet(path: Path, most_rows: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_names(path, file.schema_arrow.names)
        for batch in file.iter_batches(most_rows):
            yield batch, batch.num_rows / file.metadata.num_rows


def _of_arrow(path: Path, most_rows: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(END_OF_STREAM)))
        if (
            not is_file and source.read() != END_OF_STREAM
        ):  # at a seam between two batches Arrow itself would take this for the end
            raise DataError(
                f"{path}: no Arrow stream, or one that breaks off; fetch or write it anew"
            )
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_names(path, reader.schema.names)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            batch.validate(full=True)  # or a damaged offset ends the process with a signal
            if batch.num_rows:
                yield batch, min(1.0, batch.nbytes / source.size())


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: two columns are named {twice[0]!r}; rename one")


def _without_nulls(value: Any) -> Any:
    """Return nested values without keys that are null: a struct has all keys that any row of its column has."""
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return [_without_nulls(held) for held in value] if isinstance(value, list) else value
