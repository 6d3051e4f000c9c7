"""Records as the bytes of every file format, for tests of data files."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from sft_play.config.schema import Config, SourceSection
from sft_play.data.assemble import RunData
from sft_play.data.files import Chunk, refuse_bad_rows
from sft_play.data.images import BESIDE_FILES, ImageReader
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_formats import ROW_FORMATS, RowFormat
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows
from sft_play.data.rows import BadRow, Row
from sft_play.data.sources import ChunkTask, Source

Records = list[dict[str, Any]]
LINE = b'{"question": "q", "answer": "a"}\n'
QA = {"question": "q", "answer": "a"}


def cases(name: str, begin: str = "") -> list[dict[str, Any]]:
    """Return the lines of a table in tests/fixtures, those whose `case` begins so."""
    path = Path(__file__).parent / "fixtures" / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")
    found = [json.loads(line) for line in lines if line]
    return [case for case in found if case.get("case", "").startswith(begin)]


def write_rows(path: Path, *rows: object) -> Path:
    """Write a row a line, as JSON in ASCII, or a Parquet file by that name; return the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def contents(path: Path, columns: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return the texts of each row's messages."""
    return [[message.content for message in row.messages] for row in read_rows(path, columns)]


def run_data(
    train: Path, tokenizer: PreTrainedTokenizerFast, max_seq_len: int = 64, **data: object
) -> RunData:
    """Return the data of a run over a file of rows, with a cache next to it."""
    settings = {"train_path": str(train), "cache_dir": str(train.parent / "cache"), **data}
    config = {"model": {"max_seq_len": max_seq_len}, "data": settings}
    return build_run_data(Config.model_validate(config), tokenizer)


def to_jsonl(records: Records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def to_json(records: Records) -> bytes:
    return json.dumps(records, indent=1).encode()


def to_wrapped_json(records: Records) -> bytes:
    return json.dumps({"version": "1.0", "data": records}).encode()


def to_table(records: Records, delimiter: str = ",") -> bytes:
    """Lists become JSON, as a cell has no other way to hold them."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for record in records for key in record)), delimiter=delimiter
    )
    writer.writeheader()
    writer.writerows(
        {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in record.items()
        }
        for record in records
    )
    return text.getvalue().encode()


def to_parquet(records: Records) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=7)
    return sink.getvalue()


def to_arrow_stream(records: Records, open_file: Any = pa.ipc.new_stream) -> bytes:
    table, sink = pa.Table.from_pylist(records), io.BytesIO()
    with open_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


def to_arrow_file(records: Records) -> bytes:
    return to_arrow_stream(records, pa.ipc.new_file)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, Callable[[Records], bytes]] = {
    "a.jsonl": to_jsonl,
    "a.ndjson": to_jsonl,
    "a.jsonl.gz": lambda records: gzip.compress(to_jsonl(records), mtime=0),
    "a.jsonl.zst": lambda records: zstd(to_jsonl(records)),
    "a.json": to_json,
    "b.json": to_wrapped_json,
    "a.json.gz": lambda records: gzip.compress(to_json(records), mtime=0),
    "A.CSV": to_table,
    "a.tsv": lambda records: to_table(records, "\t"),
    "a.csv.gz": lambda records: gzip.compress(to_table(records), mtime=0),
    "a.parquet": to_parquet,
    "a.arrow": to_arrow_stream,
    "b.arrow": to_arrow_file,
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}
GOLDEN: dict[str, Records] = {
    "messages": [
        {
            "messages": [
                {"role": "user", "content": "1 + 0?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": "one", "reasoning": "It is 1."},
            ],
            "tools": [TOOL],
        },
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
            ],
            "tools": [],
        },
    ],
    **{
        name: [json.loads(ROW_FORMATS[name].example)] * 2
        for name in ("conversations", "instruction", "contents", "text", "segments")
    },
}


def without_origin(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row.messages, row.text, row.tools) for row in rows]


def bad_text(value: bytes) -> pa.Array:
    """A column of two texts of which the second need not be UTF-8: Arrow does not look."""
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 1, 1 + len(value)))
    return pa.StringArray.from_buffers(2, pa.py_buffer(ends), pa.py_buffer(b"q" + value))


def parquet_of(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def read_tasks(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[ChunkTask]:
    """Yield the chunks of a file with its row format, as the only file of a source."""
    source = Source(path.name, (path,), columns or {}, SourceSection(path=str(path)))
    return source.read()


def format_of(path: Path, columns: Mapping[str, str] | None = None) -> RowFormat:
    """Return the row format of a file. Raises DataError."""
    return next(read_tasks(path, columns)).row_format


def read_rows(
    path: Path,
    columns: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
    images: ImageReader = BESIDE_FILES,
) -> list[Row]:
    """Return all rows of a file that fits into memory. Raises DataError."""
    rows: list[Row] = []
    bad: list[BadRow] = []
    for _, chunk, row_format in read_tasks(path, columns):
        for row in parse_rows(chunk, row_format, SystemPrompt(system_prompt, images=images)):
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                rows.append(row)
    refuse_bad_rows(bad, len(rows) + len(bad))
    return rows


def parse_rows(
    chunk: Chunk, row_format: RowFormat, system_prompt: SystemPrompt | None = None
) -> Iterator[Row | BadRow]:
    """Yield the rows of a chunk; if a record has none, why."""
    for rows in parse_record_rows(chunk, row_format, system_prompt or SystemPrompt()):
        if isinstance(rows, BadRow):
            yield rows
        else:
            yield from rows
