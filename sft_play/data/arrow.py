"""Parquet files, Arrow streams (as Hugging Face datasets writes them) and Arrow files.

Reads them as record batches, and batches as records. Loads no torch.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from sft_play import reading
from sft_play.data.rows import MAX_ENCODED_BYTES, Json, UnreadableRecord, shorten
from sft_play.data.text_files import MAX_LINE_BYTES, InvalidJsonError, parse_json
from sft_play.errors import DataError

BatchOfFile = tuple[pa.RecordBatch, float]  # rows, and the fraction of their file
MAX_RATIO = 2000  # a text that all rows share is stored once
ROW_BYTES = 64  # of a row without values; Python takes more
VALUE_BYTES = 8  # of a number, a null or an element of a list, at least
VIEW_BYTES = 16
MAX_BATCH_BYTES = 64 << 20
REWRITE = "write them as JSON lines, compressed with gzip or zstd at most"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_batches(path: Path, max_rows: int, max_bytes: int) -> Iterator[BatchOfFile]:
    """Yield a file's rows in batches of at most `max_rows`, and of about `max_bytes`.

    Raises: DataError for a damaged file, OSError.
    """
    is_parquet = path.suffix.lower() == ".parquet"
    batches = _read_parquet(path, max_rows) if is_parquet else _read_arrow(path)
    file_bytes = path.stat().st_size
    rows = decoded_bytes = 0
    try:
        for batch, file_share in batches:
            if not batch.num_rows:
                continue
            sizes = [_value_bytes(column, file_bytes) for column in batch.columns]
            row_bytes = sum(sizes, np.zeros(batch.num_rows, np.int64))
            decoded_bytes += int(row_bytes.sum()) + batch.num_rows * ROW_BYTES
            reading.refuse_bomb(file_bytes, decoded_bytes, REWRITE, MAX_RATIO)
            has_bytes = any("binary" in str(field.type) for field in batch.schema)  # in parts, too
            most_bytes = MAX_ENCODED_BYTES if has_bytes else MAX_LINE_BYTES
            start = 0
            while start < batch.num_rows:
                ends = np.cumsum(row_bytes[start : start + max_rows])
                if ends[0] > most_bytes:
                    raise DataError(
                        f"{path}[{rows + start}]: a row of {ends[0]:,} bytes, more than "
                        f"{most_bytes >> 20} MiB; split it, or leave it out"
                    )
                part = batch.slice(start, max(1, int(np.searchsorted(ends, max_bytes, "right"))))
                start += part.num_rows
                share = file_share * part.num_rows / batch.num_rows
                if part.num_rows < batch.num_rows:
                    # a copy, because a pickled slice carries its entire batch
                    part = take_rows(part, range(part.num_rows))
                yield part, share
            rows += batch.num_rows
    except pa.ArrowNotImplementedError as error:
        raise DataError(f"{path}: its types are not read ({error}); {REWRITE}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError: a column's name
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: no {path.suffix} file, or a damaged one ({reason}); fetch or write it anew"
        ) from None


def take_rows(batch: pa.RecordBatch, positions: Sequence[int]) -> pa.RecordBatch:
    """Return a copy of the rows at some positions."""
    kinds = [field.with_type(_without_views(field.type)) for field in batch.schema]
    if kinds != list(batch.schema):  # cast breaks a slice with a column of nulls
        batch = batch.cast(pa.schema(kinds))
    return batch.take(pa.array(positions))


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


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow can copy values as: it copies none of texts that are views."""
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_list(kind) or types.is_large_list(kind):
        element = _without_views(kind.value_type)
        return kind if element == kind.value_type else pa.large_list(element)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    return kind


def _value_bytes(values: pa.Array, file_bytes: int) -> np.ndarray:
    """Return the bytes of each value (N,) int64 where each is stored by itself.

    Raises OSError where there are too many for their file.
    """
    count, kind = len(values), values.type
    if not count:
        return np.zeros(0, np.int64)
    reading.refuse_bomb(file_bytes, count * VALUE_BYTES, REWRITE, MAX_RATIO)
    of_parts = partial(_value_bytes, file_bytes=file_bytes)
    if isinstance(values, pa.ExtensionArray):
        return of_parts(values.storage)
    if types.is_struct(kind):
        return sum(map(of_parts, values.flatten()), np.zeros(count, np.int64))
    if types.is_dictionary(kind):
        sizes = np.append(of_parts(values.dictionary), 0)  # null is the last
        return sizes[values.indices.cast(pa.int64()).fill_null(len(sizes) - 1)]
    if types.is_run_end_encoded(kind):
        lengths = np.diff(values.run_ends, prepend=0)
        return np.repeat(of_parts(values.values), lengths)[values.offset :][:count]
    if types.is_union(kind):
        sizes, codes = np.zeros(count, np.int64), np.asarray(values.type_codes)
        for number, code in enumerate(kind.type_codes):
            (rows,) = np.nonzero(codes == code)
            places = np.asarray(values.offsets)[rows] if kind.mode == "dense" else rows
            sizes[rows] = of_parts(values.field(number))[places]
        return sizes
    if types.is_nested(kind):
        if types.is_fixed_size_list(kind):
            starts = (np.arange(count) + values.offset) * kind.list_size
            stops = starts + kind.list_size
        elif hasattr(values, "sizes"):  # views
            starts = np.asarray(values.offsets)
            stops = starts + np.asarray(values.sizes)
        else:
            starts, stops = values.offsets[:-1], values.offsets[1:]
        ends = np.append(0, np.cumsum(of_parts(values.values) + VALUE_BYTES))
        return ends[stops] - ends[starts]
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(values.buffers()[1], np.int32)[:: VIEW_BYTES // 4]
        return views[values.offset :][:count].astype(np.int64)
    try:
        return pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
    except pa.ArrowNotImplementedError:  # no text
        return np.full(count, max(VALUE_BYTES, values.nbytes // count))


def _read_parquet(path: Path, max_rows: int) -> Iterator[BatchOfFile]:
    options = {"page_checksum_verification": True}
    with pq.ParquetFile(path, **options) as file:
        metadata = file.metadata
        _check_names(path, file.schema_arrow.names)
        groups = list(map(metadata.row_group, range(metadata.num_row_groups)))
        chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
        size = sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chunks)
        reading.refuse_bomb(path.stat().st_size, size, REWRITE, MAX_RATIO)
        texts = [
            column.path
            for column in map(file.schema.column, range(len(file.schema)))
            if column.physical_type == "BYTE_ARRAY"
        ]
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts, **options) as coded:
            for number, group in enumerate(groups):
                reader = coded if _may_explode(coded, number, group, max_rows) else file
                for batch in reader.iter_batches(max_rows, row_groups=[number]):
                    yield batch, batch.num_rows / metadata.num_rows


def _may_explode(
    coded: pq.ParquetFile, number: int, group: pq.RowGroupMetaData, max_rows: int
) -> bool:
    """Return whether texts that a row group has once may be in a batch too often for memory."""
    for column in map(group.column, range(group.num_columns)):
        longest = column.total_uncompressed_size
        in_batch = column.num_values * max_rows // max(1, group.num_rows)
        if column.physical_type != "BYTE_ARRAY" or longest * in_batch < MAX_BATCH_BYTES:
            continue
        path = column.path_in_schema
        values = next(coded.iter_batches(1, row_groups=[number], columns=[path])).column(0)
        while types.is_nested(values.type):
            is_struct = types.is_struct(values.type)
            values = values.field(0) if is_struct else values.values
        longest = pc.max(pc.binary_length(values.dictionary)).as_py() or longest
        if longest * in_batch > MAX_BATCH_BYTES:
            return True
    return False


def _read_arrow(path: Path) -> Iterator[BatchOfFile]:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(END_OF_STREAM)))
        # Arrow takes a stream that is cut off between two batches for a complete one
        if not is_file and source.read() != END_OF_STREAM:
            raise DataError(
                f"{path}: no Arrow stream, or one that breaks off; fetch or write it anew"
            )
        source.seek(8 if is_file else 0)
        messages = pa.ipc.MessageReader.open_stream(source)
        reading.refuse_bomb(source.size(), sum(map(_stated_bytes, messages)), REWRITE, MAX_RATIO)
    # What is mapped ends the process once another program cuts the file off
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_names(path, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            batch.validate(full=True)  # else a damaged offset crashes the process
            yield batch, min(1.0, batch.nbytes / source.size())


def _stated_bytes(message: pa.ipc.Message) -> int:
    """Return how many bytes a message's compressed buffers become, 0 if none is compressed.

    Arrow's Message.fbs has the numbers of the fields.
    """
    data = message.metadata

    def field(table: int, number: int) -> int:
        """Return where a field of a flatbuffers table is, 0 if it has none."""
        fields = table - struct.unpack_from("<i", data, table)[0]
        offset = 0
        if 4 + 2 * number < struct.unpack_from("<H", data, fields)[0]:
            (offset,) = struct.unpack_from("<H", data, fields + 4 + 2 * number)
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + struct.unpack_from("<I", data, place)[0]

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    if message.type == "schema" or not field(batch, 3):
        return 0
    buffers = follow(field(batch, 2))
    total = 0
    for number in range(struct.unpack_from("<I", data, buffers)[0]):
        start, size = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        if size:
            total += max(size, struct.unpack_from("<q", message.body, start)[0])
    return total


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = next((name for name, times in Counter(names).items() if times > 1), None)
    if repeated is not None:
        raise DataError(f"{path}: two columns are named {shorten(repeated)!r}; rename one")


def _value_reader(kind: pa.DataType, name: str = "") -> Callable[[Any], Any] | None:
    """Return what makes values of a type those that were written; None if they are so already.

    Json is parsed. Arrow gives a struct every key that any row of its column has: those that are
    null are left out, but for a key that no row has a value for, such as an argument that is null.
    """
    if isinstance(kind, pa.JsonType):
        return _parse_content if name in ("content", "value", "text") else _parse_json_value
    if types.is_struct(kind):
        readers = {field.name: _value_reader(field.type, field.name) for field in kind}
        empty = {field.name for field in kind if types.is_null(field.type)}

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
    if types.is_run_end_encoded(kind):
        return _value_reader(kind.value_type, name)
    if not types.is_nested(kind) or types.is_map(kind) or types.is_union(kind):
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
