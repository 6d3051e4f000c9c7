"""Parquet files, Arrow streams (as Hugging Face datasets writes them) and Arrow files.

Loads no torch.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from sft_play import reading
from sft_play.data.rows import MAX_ENCODED_BYTES, Json, NumberedRecord, UnreadableRecord, shorten
from sft_play.data.text_files import MAX_LINE_BYTES, InvalidJsonError, parse_json
from sft_play.errors import DataError

Readers = dict[str, Callable[[Any], Any] | None]  # by column
MAX_RATIO = 2000  # a text that all rows share is stored once
ROW_BYTES = 64  # of a row without values; Python needs more
VALUE_BYTES = 8  # of a number, a null or an element of a list, at least
BATCH_ROWS = 16  # of Parquet, decoded at once: one text may be in all of them
REWRITE = "write them as JSON lines, compressed with gzip or zstd at most"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ColumnarFile:
    """A Parquet file, an Arrow stream or an Arrow file, whose rows are read one by one."""

    def __init__(self, path: Path):
        self.path = path
        self.file_bytes = path.stat().st_size
        self.position = 0.0  # position of the last row read, in bytes of the file

    def tell(self) -> int:
        """Return approximately how many bytes of the file have been read."""
        return int(self.position)

    def read(self) -> Iterator[NumberedRecord]:
        """Yield the rows. Raises: DataError for a damaged file, OSError."""
        is_parquet = self.path.suffix.lower() == ".parquet"
        decoded_bytes = number = 0
        try:
            for batch, batch_bytes in self._read_parquet() if is_parquet else self._read_arrow():
                readers = {field.name: _value_reader(field.type) for field in batch.schema}
                has_bytes = any("binary" in str(field.type) for field in batch.schema)
                most_bytes = MAX_ENCODED_BYTES if has_bytes else MAX_LINE_BYTES
                for row in range(batch.num_rows):
                    record = _read_row(batch.slice(row, 1), readers)
                    row_bytes = _count_bytes(record)
                    decoded_bytes += row_bytes + ROW_BYTES
                    reading.refuse_bomb(self.file_bytes, decoded_bytes, REWRITE, MAX_RATIO)
                    if row_bytes > most_bytes:
                        raise DataError(
                            f"{self.path}[{number}]: a row of {row_bytes:,} bytes, more than "
                            f"{most_bytes >> 20} MiB; split it, or leave it out"
                        )
                    self.position += batch_bytes / batch.num_rows
                    yield NumberedRecord(number, record, row_bytes)
                    number += 1
        except pa.ArrowNotImplementedError as error:
            raise DataError(f"{self.path}: its types are not read ({error}); {REWRITE}") from None
        except (pa.ArrowException, UnicodeDecodeError) as error:  # of a column's name
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{self.path}: no {self.path.suffix} file, or a damaged one ({reason}); "
                "download or write it again"
            ) from None

    def _read_parquet(self) -> Iterator[tuple[pa.RecordBatch, float]]:
        """Yield batches of rows, each with its bytes in the file."""
        with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            metadata = file.metadata
            _check_names(self.path, file.schema_arrow.names)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
            size = sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chunks)
            reading.refuse_bomb(self.file_bytes, size, REWRITE, MAX_RATIO)
            for batch in file.iter_batches(BATCH_ROWS):
                yield batch, self.file_bytes * batch.num_rows / metadata.num_rows

    def _read_arrow(self) -> Iterator[tuple[pa.RecordBatch, float]]:
        """Yield batches of rows, each with its bytes in the file."""
        with pa.memory_map(str(self.path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(max(0, source.size() - len(END_OF_STREAM)))
            # Arrow reads a stream that is cut off between two batches as a complete one
            if not is_file and source.read() != END_OF_STREAM:
                raise DataError(
                    f"{self.path}: not a complete Arrow stream; download or write it again"
                )
            source.seek(8 if is_file else 0)
            size = sum(map(_stated_bytes, pa.ipc.MessageReader.open_stream(source)))
            reading.refuse_bomb(self.file_bytes, size, REWRITE, MAX_RATIO)
        # A memory map would end the process if another program truncates the file
        with pa.OSFile(str(self.path)) as source:
            batches = reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            _check_names(self.path, reader.schema.names)
            if is_file:
                batches = map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                batch.validate(full=True)  # otherwise a damaged offset crashes the process
                yield batch, min(self.file_bytes - self.position, batch.nbytes)


def _read_row(row: pa.RecordBatch, readers: Readers) -> Json | UnreadableRecord:
    """Return the only row of a batch, or why it cannot be read."""
    try:
        (record,) = row.to_pylist()
    except UnicodeDecodeError as error:
        text = error.object.decode("utf-8", "backslashreplace")
        return UnreadableRecord("a text is not UTF-8", text)
    for name, read in readers.items():
        if read is not None and record[name] is not None:
            record[name] = read(record[name])
    return record


def _count_bytes(value: Any) -> int:
    """Return approximately the minimum bytes of a value, with each part stored separately."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return VALUE_BYTES * len(value) + sum(map(_count_bytes, value))
    return VALUE_BYTES


def _stated_bytes(message: pa.ipc.Message) -> int:
    """Return the decompressed size of a message's compressed buffers, 0 if none is compressed.

    Arrow's Message.fbs defines the numbers of the fields.
    """
    data = message.metadata

    def field(table: int, number: int) -> int:
        """Return the position of a field of a flatbuffers table, 0 if it does not have it."""
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
    """Return a function that restores written values of a type; None if they are unchanged.

    Json is parsed. Arrow gives a struct every key that any row of its column has. Null keys are
    removed, except for a key that is null in all rows, e.g. an argument that is null.
    """
    if isinstance(kind, pa.JsonType):
        return _parse_content if name in ("content", "value", "text") else _parse_json_value
    if types.is_struct(kind):
        readers = {field.name: _value_reader(field.type, field.name) for field in kind}
        empty = {field.name for field in kind if types.is_null(field.type)}

        def read_struct(value: Json) -> Json:
            """Return the keys that are not null in the row."""
            kept = {key: held for key, held in value.items() if held is not None or key in empty}
            for key, held in kept.items():
                reader = readers[key]
                if reader is not None and held is not None:
                    kept[key] = reader(held)
            return kept

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
    """Return parts, null, or a text: datasets writes a JSON string unchanged."""
    value = _parse_json_value(text)
    has_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return value if has_parts or value is None or isinstance(value, str) else text


def _parse_json_value(text: str) -> Any:
    try:
        return parse_json(text)
    except InvalidJsonError:
        return text
