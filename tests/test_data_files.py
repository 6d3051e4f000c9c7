"""sft_play.data.files: the same rows are read from every format, in chunks of any size."""

import pickle
import random
import tracemalloc

import pyarrow as pa
import pytest
from record_files import (
    GOLDEN,
    LINE,
    WRITERS,
    format_of,
    read_rows,
    to_jsonl,
    to_table,
    without_origin,
)

from sft_play.data import files
from sft_play.data.files import format_origin, parse_records, read_chunks
from sft_play.errors import DataError


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", GOLDEN)
def test_the_same_rows_are_read_from_every_format(name, shape, tmp_path):
    reference = tmp_path / "reference.jsonl"
    reference.write_bytes(to_jsonl(GOLDEN[shape]))
    path = tmp_path / name
    path.write_bytes(WRITERS[name](GOLDEN[shape]))
    assert format_of(path).name == shape
    assert without_origin(read_rows(path)) == without_origin(read_rows(reference))


def random_text(draw: random.Random) -> str:
    marks = [*"aΩ🙂 \n\t,;\"'\\{]\u2028\x85\ufeff", "\r\n", "null", "NaN"]
    return "x" + "".join(draw.choices(marks, k=draw.randrange(12)))


@pytest.mark.parametrize("name", WRITERS)
def test_random_rows_come_back_as_they_were_written(name, tmp_path):
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
def test_chunks_hold_all_rows_with_their_places_and_bytes(name, tmp_path):
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


def test_blanks_around_the_names_of_columns_are_no_part_of_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"question, answer \nq, a\n")
    assert [message.content for message in read_rows(path)[0].messages] == ["q", " a"]
    path.write_bytes(b"question, question\nq, a\n")
    with pytest.raises(DataError, match="and 'question' appears twice"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "data", "places"),
    [
        ("a.csv", b'question,answer\r\n\r\n"two\r\nlines",a\r\n,\r\nq,a\r\n', [":3", ":5", ":6"]),
        ("a.jsonl", LINE[:-1] + b"\r\n\r\n  \n" + LINE, [":1", ":4"]),
        ("a.json", b"[" + LINE + b"," + LINE + b"]", ["[0]", "[1]"]),
    ],
)
def test_a_chunk_says_where_a_row_begins(name, data, places, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + data)
    (chunk,) = read_chunks(path)
    origins = [format_origin(path, number) for number in chunk.numbers]
    assert origins == [f"{path}{place}" for place in places]


def test_long_rows_make_chunks_of_fewer_rows(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", pytest.param("a.csv", marks=pytest.mark.long)]
)
def test_memory_does_not_grow_with_the_file(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(
        WRITERS["A.CSV" if name == "a.csv" else name](
            [{"question": f"question {number}", "answer": "a" * 100} for number in range(40_000)]
        )
    )
    tracemalloc.start()
    try:
        rows = sum(len(chunk.records) for chunk in read_chunks(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 40_000
    assert peak < 3 << 20  # of 5 MB of text


def test_a_field_of_a_table_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_bytes(to_table([{"question": "q" * 300_000, "answer": "a"}]))
    assert len(read_rows(tmp_path / "a.csv")[0].messages[0].content) == 300_000


def test_the_first_rows_of_views_are_taken_as_those_of_texts(tmp_path):
    texts = [f"{number}?" for number in range(300)]
    columns = {"question": pa.array(texts, pa.string_view()), "answer": texts}
    table = pa.table({**columns, "notes": [[{"a": None}]] * 300})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    assert [row.messages[0].content for row in read_rows(tmp_path / "a.arrow")] == texts
