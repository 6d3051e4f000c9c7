"""sft_play.data: from paths to rows; the same rows in every format, and files that are not what they should be."""

import csv
import gzip
import io
import json
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft_play.config.schema import SourceSection
from sft_play.data import csv_files, files
from sft_play.data.files import parse_records, read_chunks
from sft_play.data.row_formats import detect_format, parse_rows, read_rows
from sft_play.data.rows import BadRow, Row, UnreadableRecord
from sft_play.data.sources import Source, find_source
from sft_play.errors import DataError, ExitClass

Records = list[dict[str, Any]]
LINE = b'{"question": "q", "answer": "a"}\n'
QA = {"question": "q", "answer": "a"}


# Every format


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


def to_arrow_stream(records: Records) -> bytes:
    table, sink = pa.Table.from_pylist(records), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


def to_arrow_file(records: Records) -> bytes:
    table, sink = pa.Table.from_pylist(records), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


WRITERS: dict[str, Callable[[Records], bytes]] = {
    "a.jsonl": to_jsonl,
    "a.ndjson": to_jsonl,
    "a.jsonl.gz": lambda records: gzip.compress(to_jsonl(records)),
    "a.json": to_json,
    "b.json": to_wrapped_json,
    "a.json.gz": lambda records: gzip.compress(to_json(records)),
    "A.CSV": to_table,
    "a.tsv": lambda records: to_table(records, "\t"),
    "a.csv.gz": lambda records: gzip.compress(to_table(records)),
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
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": []},
    ],
    "conversations": [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a,\n\"b\""}], "system": "s"}] * 2,
    "instruction": [{"instruction": "q", "input": "", "output": "a"}, {"instruction": "q", "input": "on\r\ntwo lines", "output": "a"}],
    "prompt": [{"prompt": "q", "completion": " a "}],
    "question": [{"question": "tab\there", "answer": "naïve 🙂\u2028"}, {"question": "'single'", "answer": '"double", and ; more'}],
    "user": [{"system": "s", "user": "q", "assistant": "a"}],
    "target": [{"input": "q", "target": "a"}],
    "input": [{"input": "q", "output": "a"}],
    "text": [{"text": "once\nupon"}, {"text": "a time"}],
}  # fmt: skip


def without_origin(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row.messages, row.text, row.tools) for row in rows]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", GOLDEN)
def test_the_same_rows_are_read_from_every_format(name: str, shape: str, tmp_path: Path) -> None:
    reference = tmp_path / "reference.jsonl"
    reference.write_bytes(to_jsonl(GOLDEN[shape]))
    path = tmp_path / name
    path.write_bytes(WRITERS[name](GOLDEN[shape]))
    assert detect_format(path, {}).name == shape
    assert without_origin(read_rows(path)) == without_origin(read_rows(reference))


def random_text(draw: random.Random) -> str:
    marks = [
        "a",
        "Ω",
        "🙂",
        " ",
        "\n",
        "\r\n",
        "\t",
        ",",
        ";",
        '"',
        "'",
        "\\",
        "{",
        "]",
        "\u2028",
        "\x85",
        "\ufeff",
        "null",
        "NaN",
    ]
    return "x" + "".join(draw.choices(marks, k=draw.randrange(12)))


@pytest.mark.parametrize("name", WRITERS)
def test_random_rows_come_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        records = [
            {"question": random_text(draw), "answer": random_text(draw)}
            for _ in range(draw.randint(1, 30))
        ]
        (tmp_path / name).write_bytes(WRITERS[name](records))
        assert [
            (row.messages[0].content, row.messages[-1].content)
            for row in read_rows(tmp_path / name)
        ] == [tuple(record.values()) for record in records]
        of_any_size = [
            list(parse_records(chunk))
            for chunk in read_chunks(tmp_path / name, rows_per_chunk=draw.randint(1, 9))
        ]
        assert [record for part in of_any_size for record in part] == records


# Chunks


@pytest.mark.parametrize("name", WRITERS)
def test_chunks_hold_all_rows_with_their_places_and_bytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(
        WRITERS[name]([{"question": f"q{number}", "answer": "a"} for number in range(50)])
    )
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in read_chunks(path, rows_per_chunk=6)]
    assert all(0 < len(chunk.records) == len(chunk.numbers) <= 6 for chunk in chunks)
    first = {"csv": 2, "tsv": 2, "jsonl": 1, "ndjson": 1}.get(
        name.lower().split(".")[1], 0
    )  # behind the header, in lines; else an index
    assert [number for chunk in chunks for number in chunk.numbers] == list(
        range(first, first + 50)
    )
    assert [record["question"] for chunk in chunks for record in parse_records(chunk)] == [
        f"q{number}" for number in range(50)
    ]
    assert 0 < sum(chunk.bytes_read for chunk in chunks) <= path.stat().st_size


def test_a_chunk_says_where_a_row_begins(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfquestion,answer\r\n\r\n"two\r\nlines",a\r\n,\r\nq,a\r\n'
    )
    (chunk,) = read_chunks(tmp_path / "a.csv")
    assert [chunk.origin(position) for position in range(3)] == [
        f"{tmp_path / 'a.csv'}:{line}" for line in (3, 5, 6)
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE[:-1] + b"\r\n\r\n  \n" + LINE)
    (chunk,) = read_chunks(tmp_path / "a.jsonl")
    assert [chunk.origin(position) for position in range(2)] == [
        f"{tmp_path / 'a.jsonl'}:{line}" for line in (1, 4)
    ]
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[" + LINE + b"," + LINE + b"]")
    (chunk,) = read_chunks(tmp_path / "a.json")
    assert [chunk.origin(position) for position in range(2)] == [
        f"{tmp_path / 'a.json'}[{index}]" for index in (0, 1)
    ]


def test_long_rows_make_chunks_of_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 10_000)
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        (tmp_path / name).write_bytes(
            WRITERS["A.CSV" if name == "a.csv" else name](
                [{"question": "q" * 999, "answer": "a"}] * 100
            )
        )
        lengths = [len(chunk.records) for chunk in read_chunks(tmp_path / name)]
        assert sum(lengths) == 100
        assert max(lengths) <= 10


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(
        WRITERS["A.CSV" if name == "a.csv" else name](
            [{"question": f"question {number}", "answer": "a" * 100} for number in range(200_000)]
        )
    )
    tracemalloc.start()
    try:
        rows = sum(len(chunk.records) for chunk in read_chunks(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 200_000
    assert peak < 5 << 20  # of 27 MB of text


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(to_table([{"question": "q" * 300_000, "answer": "a"}]))
    assert len(read_rows(tmp_path / "a.csv")[0].messages[0].content) == 300_000


# Files that are not what they should be

PARQUET, STREAM, ARROW_FILE = (
    to_parquet([QA] * 100),
    to_arrow_stream([QA] * 100),
    to_arrow_file([QA] * 100),
)
LAST_BATCH = STREAM.rindex(b"\xff\xff\xff\xff", 0, -8)


def bad_text(value: bytes) -> pa.Array:
    """A column of two texts of which the second need not be UTF-8: Arrow does not look."""
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 1, 1 + len(value)))
    return pa.StringArray.from_buffers(2, pa.py_buffer(ends), pa.py_buffer(b"q" + value))


def parquet_of(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


BAD_FILES: list[tuple[str, bytes, str, str]] = [
    # name, bytes, place, reason
    ("a.jsonl", b"", "", 'no rows; a row is such as {"question": "...", "answer": "..."}'),
    ("a.jsonl", b"\n \n\r\n", "", "no rows"),
    ("a.jsonl", b"[" + LINE + b"]", ":1", "the file begins with a JSON list; rows are one JSON object a line, and a list of them is a .json file"),
    ("a.jsonl", b"\n[\n" + LINE + b"]", ":2", "the file begins with a JSON list"),
    ("a.jsonl", json.dumps(QA, indent=1).encode(), ":1", "the line ends behind the first bracket; a row stands on one line, whole"),
    ("a.jsonl", LINE + LINE[:20], ":2", 'not valid JSON: Unterminated string starting at column 19; the file ends with this line, perhaps cut off'),
    ("a.jsonl", LINE + LINE[:-3], ":2", "not valid JSON: Unterminated string starting at column 29; the file ends with this line"),
    ("a.jsonl", LINE.decode().encode("utf-16"), ":1", "not UTF-8 at byte 0; save the file as UTF-8"),
    ("a.jsonl", LINE.decode().encode("utf-16-le"), ":1", "not valid JSON: it holds NUL bytes; if the file is UTF-16, save it as UTF-8"),
    ("a.jsonl", LINE * 3 + "é".encode("latin-1") + LINE, ":4", "not UTF-8 at byte 0"),
    ("a.jsonl", b"\x1f\x8b" + LINE, ":1", "not UTF-8 at byte 1"),
    ("a.jsonl", b'{"text": "x", "text": "y"}', ":1", "not valid JSON: the key 'text' stands twice in one object"),
    ("a.jsonl", LINE + b'{"question": "q", "answer": "a", "x": {"y": [{"z": 1, "z": 2}]}}', ":2", "not valid JSON: the key 'z' stands twice"),
    ("a.jsonl", b"question,answer\nq,a\n", ":1", "not valid JSON: Expecting value at column 1"),
    ("a.jsonl.gz", LINE, "", "no gzip file, or a damaged one"),
    ("a.jsonl.gz", gzip.compress(LINE * 1000)[:-20], "", "the compressed text breaks off or is damaged"),
    ("a.jsonl.gz", gzip.compress(random.Random(0).randbytes(9999))[:5000] + b"x" * 5000, "", "the compressed text breaks off or is damaged"),
    ("a.jsonl.gz", gzip.compress(LINE)[:-8] + b"\0" * 8, "", "no gzip file, or a damaged one (CRC check failed"),
    ("a.json", b"", "", "no rows"),
    ("a.json", b"[]", "", "no rows"),
    ("a.json", b'{"data": []}', "", "no rows"),
    ("a.json", b'{"question": "q"}', "", 'holds a list of rows, or {"data": [...]} and no other list; this is one object with the keys question'),
    ("a.json", b'{"data": [1], "more": [2]}', "", "this is one object with the lists data, more"),
    ("a.json", b'{"question": ["q"], "answer": ["a"]}', "", "this is one object with the lists question, answer"),
    ("a.json", b"{}", "", "this is one object with the keys none"),
    ("a.json", b'"text"', "", "a .json data file holds a list of rows, not a text"),
    ("a.json", b"3", "", "a .json data file holds a list of rows, not a number"),
    ("a.json", LINE * 3, "", "holds one JSON object a line; name it a.jsonl"),
    ("a.json", b'{"data": [1}', "", "not valid JSON: Expecting ',' delimiter at column 12"),
    ("a.json", b"[{]", "[0]", "not valid JSON: Expecting property name enclosed in double quotes at column 3"),
    ("a.json", b"[" + LINE + b"," + LINE + b"{}]", "[2]", "not valid JSON: no comma before this row, at line 3 column 1"),
    ("a.json", b"[" + LINE + b"," + LINE, "[2]", "not valid JSON: the list has no end; the file is perhaps cut off"),
    ("a.json", b"[" + LINE + b"," + LINE[:20], "[1]", "not valid JSON: Unterminated string starting at line 2 column 20"),
    ("a.json", b"[" + LINE + b",]", "[1]", "not valid JSON: no comma before this row, at line 2 column 1"),
    ("a.json", b"[" + LINE + b"]]", "[1]", "more text behind the end of the list, at line 2 column 2; a .json file holds one list of rows"),
    ("a.json", b"[" + LINE + b", 5]", "[1]", "a row is a JSON object, not a number"),
    ("a.json", b"[" + LINE + b', {"x": NaN}]', "[1]", "not valid JSON: NaN is no JSON value; write null"),
    ("a.json", b"[" + LINE + b', {"x": ' + b"1" * 5000 + b"}]", "[1]", "not valid JSON: a number has too many digits"),
    ("a.json", b"[" + LINE + b', {"x": 1, "x": 2}]', "[1]", "not valid JSON: the key 'x' stands twice in one object"),
    ("a.json", b"[" + LINE + b"," + b"[" * 100_000, "[1]", "not valid JSON: nested too deeply"),
    ("a.json", b"[" + LINE + b', {"question": "q"}]', "[1]", "the keys are question; the rows of this file have question and answer"),
    ("a.json", b'[{"question": "\xff"}]', "", "not UTF-8 at byte 15; save the file as UTF-8"),
    ("a.json", b'["\0"]', "[0]", "not valid JSON: it holds NUL bytes"),
    ("a.csv", b"", "", "no rows"),
    ("a.csv", b"question,answer\n", "", "no rows"),
    ("a.csv", b"question,answer\nq,a\nq\n", ":3", "1 fields, and the first line names 2 columns; a field that holds the separator stands in quotes"),
    ("a.csv", b"question,answer\nq,a\n\nq,a,b\n", ":4", "3 fields, and the first line names 2 columns"),
    ("a.csv", b'question,answer\n"q\nr",a\n"s', ":4", "a quote is opened in this row and never closed; quotes inside a field are doubled"),
    ("a.csv", b'question,answer\n"q"r,a\n', ":2", "not valid CSV: ',' expected after '\"'; quotes inside a field are doubled"),
    ("a.csv", b"question,question\nq,a\n", ":1", "the first line names the columns, and 'question' stands there twice"),
    ("a.csv", b"question,,answer\nq,a,b\n", ":1", "the first line names the columns, and number 2 of 3 has no name"),
    ("a.csv", b"question;answer\nq;a\n", ":1", "this names one, 'question;answer'; commas stand between fields, not ';'"),
    ("a.tsv", b"question,answer\nq,a\n", ":1", "this names one, 'question,answer'; tabs stand between fields, not ','"),
    ("a.csv", b"What is red?,A rose.\nWhat is blue?,The sea.\n", "", "the columns are What is red?, A rose. (its first line); a row has messages, or"),
    ("a.csv", b"question,answer\nq,a\n\xe9t\xe9,a\n", ":3", "not UTF-8; save the file as UTF-8"),
    ("a.csv", b"question,answer\nq,a\nq\0,a\n", ":3", "question holds a NUL character"),
    ("a.csv", b"question,answer\nq,a\nq, \n", ":3", "answer is empty"),
    ("a.csv", b"messages\nhello\n", ":2", "messages is a text that is no JSON (not valid JSON: Expecting value at column 1): hello"),
    ("a.csv.gz", gzip.compress(to_table([QA] * 1000))[:-10], "", "the compressed text breaks off or is damaged"),
    ("a.parquet", b"", "", "no .parquet file, or a damaged one (Parquet file size is 0 bytes)"),
    ("a.parquet", LINE * 10, "", "no .parquet file, or a damaged one (Parquet magic bytes not found"),
    ("a.parquet", PARQUET[:-9], "", "no .parquet file, or a damaged one"),
    ("a.parquet", to_parquet([QA])[:4] + b"\xff" * 40 + to_parquet([QA])[44:], "", "cannot be read: "),
    ("a.parquet", parquet_of(question=["q", None], answer=["a", "a"]), "[1]", "question is null, not a text"),
    ("a.parquet", parquet_of(question=["q", "q"], answer=[1.5, float("nan")]), "[0]", "answer is 1.5, not a text"),
    ("a.parquet", parquet_of(question=["q", "q"], answer=[b"a", b"a"]), "[0]", "answer is \"b'a'\", not a text"),
    ("a.parquet", parquet_of(question=["q", "q"], answer=bad_text(b"\xff")), "[1]", "a text is not UTF-8"),
    ("a.parquet", parquet_of(question=[], answer=[]), "", "no rows"),
    ("a.parquet", parquet_of(problem=["q"], answer=["a"]), "", "the columns are problem, answer; a row has"),
    ("a.arrow", b"", "", "no Arrow stream, or one that breaks off"),
    ("a.arrow", LINE, "", "no Arrow stream, or one that breaks off"),
    ("a.arrow", STREAM[:-8], "", "no Arrow stream, or one that breaks off"),
    ("a.arrow", STREAM[:LAST_BATCH], "", "no Arrow stream, or one that breaks off"),
    ("a.arrow", STREAM[: len(STREAM) // 2], "", "no Arrow stream, or one that breaks off"),
    ("a.arrow", ARROW_FILE[: len(ARROW_FILE) // 2], "", "no .arrow file, or a damaged one"),
    ("a.txt", LINE, "", "a data file ends in .jsonl, .ndjson, .csv, .tsv, .json, .jsonl.gz"),
    ("a", LINE, "", "a data file ends in .jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "place", "reason"), BAD_FILES)
def test_a_bad_file_is_named_with_the_place_and_the_reason(
    name: str, data: bytes, place: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        read_rows(path)
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"{path}{place}: ")
    assert reason in first
    assert error.value.exit_class == ExitClass.DATA


def damaged(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data))
        data = (
            data[:place]
            + bytes(draw.choices(b'"{}[],\n\0\xff:\\x0', k=draw.randrange(4)))
            + data[place + draw.randrange(4) :]
        )
    return data


@pytest.mark.parametrize("name", WRITERS)
def test_damage_is_named_and_never_ends_the_process(name: str, tmp_path: Path) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        path = tmp_path / name
        path.write_bytes(damaged(WRITERS[name](GOLDEN[draw.choice(list(GOLDEN))]), draw))
        try:
            assert read_rows(path)
        except DataError as error:
            assert str(path) in str(error)


def test_a_line_without_end_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(LINE + b" " + b"x" * (2 << 20))
    with pytest.raises(
        DataError, match=r"a.jsonl:2: a line of more than 1 MiB; rows are one JSON object a line"
    ):
        read_rows(tmp_path / "a.jsonl")


def test_a_quote_without_end_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "MAX_FIELD_CHARACTERS", 1 << 20)
    (tmp_path / "a.csv").write_bytes(b'question,answer\nq,a\n"q,a\n' + b"q,a\n" * (1 << 20))
    with pytest.raises(DataError, match=r"a.csv:3: a quote is opened in this row and never closed"):
        read_rows(tmp_path / "a.csv")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in [
        ("missing.jsonl", "no such data file"),
        ("folder.jsonl", "a folder or a device, not a file"),
        ("pipe.jsonl", "a folder or a device, not a file"),
        ("x" * 300 + ".jsonl", "cannot be read: File name too long"),
    ]:
        with pytest.raises(DataError, match=words):
            read_rows(tmp_path / name)


def test_a_bad_row_in_a_batch_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_of(question=["q", "q"], answer=bad_text(b"\xff")))
    (chunk,) = read_chunks(tmp_path / "a.parquet")
    assert list(parse_records(chunk)) == [
        {"question": "q", "answer": "q"},
        UnreadableRecord("a text is not UTF-8", "\\xff"),
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_row_is_set_aside_with_all_its_columns(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(
        WRITERS[name]([{**QA, "id": "1"}, {**QA, "answer": " ", "id": "2"}])
    )
    (chunk,) = read_chunks(tmp_path / name)
    _, bad = parse_rows(chunk, detect_format(tmp_path / name, {}))
    assert isinstance(bad, BadRow)
    assert (bad.reason, json.loads(bad.raw)) == (
        "answer is empty",
        {**QA, "answer": " ", "id": "2"},
    )


# From settings to files


def found(path: Path | str, **more: Any) -> Source:
    return find_source(SourceSection(path=str(path), **more), "data.train_path")


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    for name in (
        "b/2.csv",
        "b/10.parquet",
        "a.jsonl.gz",
        "README.md",
        "dataset_info.json",
        "_old.jsonl",
        ".cache/x.jsonl",
        "_more/x.txt",
        "run.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = found(tmp_path, weight=2.0, columns={"question": "q"})
    assert [path.relative_to(tmp_path).as_posix() for path in source.files] == [
        "a.jsonl.gz",
        "b/10.parquet",
        "b/2.csv",
    ]
    assert (source.name, source.weight, source.columns) == (str(tmp_path), 2.0, {"question": "q"})
    assert found(tmp_path / "b" / "2.csv").files == (tmp_path / "b" / "2.csv",)


def test_rows_that_datasets_saved_to_disk_are_read(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(GOLDEN["messages"] * 50)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    source = found(tmp_path / "one")
    assert len(source.files) == 3
    rows = [row for path in source.files for row in read_rows(path)]
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(GOLDEN["messages"]))
    assert without_origin(rows) == without_origin(read_rows(tmp_path / "a.jsonl")) * 50
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "two")
    with pytest.raises(
        DataError, match=r"two: holds the splits test, train; name one: .*/two/test"
    ):
        found(tmp_path / "two")
    assert found(tmp_path / "two" / "train").files


def test_a_folder_without_rows_or_with_files_that_would_be_left_out_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="no data file in this folder; data files end in"):
        found(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "more.jsonl.zst").touch()
    (tmp_path / "table.xlsx").touch()
    with pytest.raises(
        DataError,
        match=r"holds .*(zst|xlsx) and 1 more, which is not read; move it away, or begin its name with _",
    ):
        found(tmp_path)


def test_a_folder_that_links_to_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"again, which is not read"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data/trian.jsonl", r"no such file or folder; did you mean .*/data/train.jsonl\?"),
        ("dta/train.jsonl", r"no such file or folder; did you mean .*/data\?"),
        (
            "data/0000000.csv",
            "no such file or folder; write a data file, a folder of them, or a hub data set id",
        ),
        ("nothing", "no such file or folder; write a data file"),
        ("a/b/c", "no such file or folder; write a data file"),
        ("data/notes.txt", "a data file ends in .jsonl"),
    ],
)
def test_a_path_that_is_not_there_is_named_with_the_nearest(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    (tmp_path / "data" / "notes.txt").touch()
    with pytest.raises(DataError, match=rf"data.train_path=.*{path}: {words}"):
        found(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data.train_path={path}: {words.replace('.*/', '')}"):
        found(path)


@pytest.mark.parametrize(
    ("more", "words"), [({"split": "test"}, "split 'test'"), ({"subset": "en"}, "subset 'en'")]
)
def test_split_and_subset_are_of_hub_data_sets(
    more: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(
        DataError,
        match=f"{words} is of hub data sets, and this is a path; name the file or folder that holds it",
    ):
        found(tmp_path / "a.jsonl", **more)


def test_a_part_of_a_split_is_no_split() -> None:
    with pytest.raises(
        DataError, match=r"split 'train\[:10%\]' is no name; name a whole split, such as train"
    ):
        found("owner/name", split="train[:10%]")
