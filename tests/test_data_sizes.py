"""Sizes: what small files may become, and the large ones that are read anyway."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from notebook_converter import code
from sft_play import reading
from sft_play.commands.notebook import read_notebook
from sft_play.config.yaml_source import parse_flow, read_commented_json, read_mapping
from sft_play.data import json_files, text_files
from sft_play.data.files import parse_records, read_chunks
from sft_play.data.row_formats import parse_message_list, split_marked_text
from sft_play.data.row_parsing import NO_SYSTEM_PROMPT, read_prompts
from sft_play.data.rows import InvalidRowError, shorten
from sft_play.data.text_files import parse_json
from sft_play.errors import ConfigError, DataError

MIB = 1 << 20
SECONDS = 10
# Reads files in a process of 1 GiB of memory for them, and says of each what became of it
READER = """
import resource, sys
from pathlib import Path
from sft_play.data import arrow
from sft_play.data.files import parse_records, read_chunks
from sft_play.errors import DataError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
for name in sys.argv[1:]:
    try:
        for chunk in read_chunks(Path(name), 500):
            for record in parse_records(chunk):
                pass
        print(name, "was read")
    except DataError as error:
        print(error)
"""


def zstd(path: Path, unit: bytes, size: int, begin: bytes = b"") -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(begin)
        block = unit * (MIB // len(unit))
        for _ in range(size // len(block) + 1):
            file.write(block)


def nested(path: Path) -> None:
    texts = pa.array(["a" * MIB, "b" * MIB])  # which the file has once
    content = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 1000), texts)
    role = pa.array(["user", "assistant"] * 1000)
    turns = pa.StructArray.from_arrays([role, content], ["role", "content"])
    messages = pa.ListArray.from_arrays(pa.array(range(0, 2001, 2), pa.int32()), turns)
    table = pa.table({"messages": messages})
    limits = {"dictionary_pagesize_limit": 4 * MIB, "store_schema": False}
    pq.write_table(table, path, compression="zstd", **limits)


def nulls(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.nulls(20_000_000, pa.int8())}), path, compression="zstd")


def one_page(path: Path) -> None:
    table = pa.table({"text": ["a" * (100 * MIB)]})
    options = {"use_dictionary": False, "write_statistics": False}  # which take 2 seconds
    pq.write_table(table, path, compression="zstd", **options)


BOMBS: dict[str, Callable[[Path], object]] = {
    "line.jsonl.zst": lambda path: zstd(path, b"a", 1 << 28, b'{"text": "'),
    "blank.jsonl.zst": lambda path: zstd(path, b"\n", 1 << 28),
    "rows.json.zst": lambda path: zstd(path, b'{"text": "a"},', 1 << 28, b"["),
    "object.json.zst": lambda path: zstd(path, b'"a",', 1 << 28, b'{"data": ['),
    "quoted.csv.zst": lambda path: zstd(path, b'"a\n",', 1 << 28, b"text\n"),
    "document.txt.zst": lambda path: zstd(path, b"word ", 1 << 28),
    "lists.jsonl": lambda path: path.write_bytes(b'{"text": [' + b"[]," * (9 * MIB) + b"0]}\n"),
    "nested.parquet": nested,
    "nulls.parquet": nulls,
    "page.parquet": one_page,
}


def test_bombs_are_refused_within_a_gibibyte_and_ten_seconds_each(tmp_path):
    for name, fill in BOMBS.items():
        fill(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", READER, *BOMBS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
        timeout=SECONDS * len(BOMBS),
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-500:]
    assert [line.split(":")[0] for line in said] == list(BOMBS)
    for line in said:
        assert "times as many" in line or "more than 16 MiB" in line


def records(path: Path) -> list:
    return [record for chunk in read_chunks(path) for record in parse_records(chunk)]


def test_rows_that_compress_well_are_read(tmp_path):
    prompt = " ".join(f"rule {number}" for number in range(500))
    draw = random.Random(1)
    rows = [
        {"system": prompt, "question": f"{n * n}?", "answer": str(draw.getrandbits(200))}
        for n in range(3000)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    assert len(lines) > 50 * (tmp_path / "a.parquet").stat().st_size
    for name in ("a.jsonl.zst", "a.parquet", "a.json"):
        assert records(tmp_path / name) == rows


def test_dictionaries_of_long_texts_are_read_in_small_batches(tmp_path):
    texts = [str(number) * (MIB // 2) for number in range(10)]
    column = pa.array([texts[number % 10] for number in range(40)])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="none")
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema({"text": pa.string_view()})) as file:
        file.write_table(pa.table({"text": column.cast(pa.string_view())}))
    encoded = pa.table({"text": column.dictionary_encode()})
    with pa.ipc.new_file(tmp_path / "b.arrow", encoded.schema) as file:
        file.write_table(encoded)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        chunks = list(read_chunks(tmp_path / name, 500))
        assert len(chunks) >= 2
        numbers = [number for chunk in chunks for number in chunk.numbers]
        assert numbers == list(range(40))
        assert [record["text"] for chunk in chunks for record in parse_records(chunk)] == list(
            column.to_pylist()
        )


def test_a_row_of_a_table_that_is_too_long_is_named(tmp_path):
    table = pa.table({"text": ["a", "b" * (17 * MIB), "c"]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none")
    with pytest.raises(DataError, match=r"a.parquet\[1\]: a row of 17,825,\d+ bytes"):
        records(tmp_path / "a.parquet")


def test_a_list_is_read_in_parts_with_the_places_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "READ_BYTES", 7)
    rows = [
        {"text": f"ä😀\\u00e4 {n}", "n": n * 1.5, "deep": [[n], {"a": None}]} for n in range(50)
    ]
    path = tmp_path / "a.json"
    path.write_text("\ufeff\n [" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    assert records(path) == rows
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    assert records(path) == rows
    text = json.dumps(rows, indent=2)
    path.write_text(text.replace('"n": 60.0', '"n" 60.0'))
    line = text[: text.index('"n": 60.0')].count("\n") + 1
    with pytest.raises(DataError, match=rf"a.json\[40\]: .* at line {line} column 9"):
        records(path)
    path.write_bytes(text.encode().replace(b"60.0", b'"\xff"'))
    line = text[: text.index("60.0")].count("\n") + 1
    with pytest.raises(DataError, match=f"not UTF-8 in line {line};"):
        records(path)


def test_lines_in_a_json_file_are_read_one_by_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n{"text": "a"}\n\n{"text": "b\u2028\x85"}\n', encoding="utf-8")
    assert records(path) == [{"text": "a"}, {"text": "b\u2028\x85"}]
    path.write_text('{"text": "a"}\n{"text": "' + "b" * text_files.MAX_LINE_BYTES + '"}\n')
    with pytest.raises(DataError, match=r"a.json\[1\]: a line of more than 16 MiB; split"):
        records(path)


def test_the_remedy_for_long_lines_leaves_the_others(tmp_path):
    path = tmp_path / "a.jsonl"
    long = '{"text": "' + "b" * text_files.MAX_LINE_BYTES + '"}\n'
    path.write_text('{"text": "a"}\n' + long + '{"text": "c"}\n')
    with pytest.raises(DataError) as error:
        records(path)
    command = str(error.value).partition("leave them out: ")[2].splitlines()[0]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert records(tmp_path / "shorter.jsonl") == [{"text": "a"}, {"text": "c"}]


def test_the_remedy_for_a_long_line_cuts_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("words" * (4 * MIB))
    with pytest.raises(DataError) as error:
        records(path)
    command = str(error.value).partition("name the folder: ")[2]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    texts = sorted((tmp_path / "texts").iterdir())
    assert len(texts) == 3
    assert sum(len(record["text"]) for part in texts for record in records(part)) == 20 * MIB


def test_prompts_may_be_compressed_and_must_be_text(tmp_path):
    path = tmp_path / "asked.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\n two \n"))
    assert [found.question for found in read_prompts(path, {}, NO_SYSTEM_PROMPT)] == ["one", "two"]
    (tmp_path / "bad.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(DataError, match=r"bad.txt:2: not UTF-8 in line 2"):
        read_prompts(tmp_path / "bad.txt", {}, NO_SYSTEM_PROMPT)


def test_a_config_that_is_too_large_is_named(tmp_path):
    path = tmp_path / "a.yaml"
    lines = [f"key_{number}: 1\n" for number in range(20_000)]
    path.write_text("".join(lines[:2000]))
    assert len(read_mapping(path)) == 2000
    for text, words in (
        ("".join(lines), r"a.yaml:10001: .*over 20,000 in all"),
        ("# comment\n" * 200_000, "2,000,000 bytes, more than the 1,048,576"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_mapping(path)


def test_aliases_of_an_override_multiply_no_more_than_those_of_a_file():
    parts = ["&a0 [x]", *(f"&a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 31))]
    with pytest.raises(Exception, match="aliases repeat values"):
        parse_flow(f"[{', '.join(parts)}]")


@pytest.mark.parametrize("text", ['{"a": 1} /* open', '{"a": "open', '{"a": "\\', "/*/"])
def test_what_is_never_closed_in_json_is_an_error(text, tmp_path):
    path = tmp_path / "a.json"
    for times in (1, 40_000):
        path.write_text(text * times)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_commented_json(path)


def test_many_marks_keys_and_calls_take_no_time():
    turns = split_marked_text("Human: q\n\nAssistant: a" + " </s>" * 50_000, "text")
    assert turns == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    keys = ",".join(f'"{number}": 1' for number in range(60_000))
    with pytest.raises(ValueError, match="the key '59999' appears twice"):
        parse_json("{" + keys + ', "59999": 1}')
    parsed = code.parse(1, "!pip install x\n" * 20_000)
    assert parsed.tree is None and "line" in parsed.problem


def test_a_conversation_of_too_many_turns_is_refused(tmp_path):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 20_000
    with pytest.raises(InvalidRowError, match="messages has 40,000 turns, and a row has 2,000"):
        parse_message_list(turns, "messages")


def test_special_files_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((Path("/dev/zero"), "a device"), (tmp_path / "pipe", "a FIFO")):
        for read, error in (
            (reading.read_bytes, OSError),
            (read_mapping, ConfigError),
            (read_notebook, ConfigError),
        ):
            with pytest.raises(error, match=f"{kind}, not a regular file"):
                read(path)


def test_what_a_value_shows_has_no_control_characters():
    assert shorten("a\x1b[31m\ud800\0") == "a⟨U+001B⟩[31m\\ud800⟨U+0000⟩"


def test_batches_without_rows_are_passed_over(tmp_path):
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as to:
        for texts in ([], ["a", "b"], []):
            to.write_batch(pa.record_batch([pa.array(texts, pa.string())], schema))
    assert records(tmp_path / "a.arrow") == [{"text": "a"}, {"text": "b"}]


def test_a_long_text_is_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(40)))
    texts = []
    for chunk in read_chunks(tmp_path / "a.txt"):
        texts += [record["text"] for record in parse_records(chunk)]
    assert len(texts) > 2 and "".join(texts) == (tmp_path / "a.txt").read_text()


VIEWS = {
    "texts within lists": pa.array([["a"], None, ["b", "c"]] * 9, pa.list_(pa.string_view())),
    "texts within structs": pa.array(
        [{"a": "b"}, None, {"a": None}] * 9, pa.struct([("a", pa.string_view())])
    ),
    "lists": pa.array([["a"], None, ["b", "c"]] * 9, pa.list_view(pa.string())),
    "runs of equal values": pa.RunEndEncodedArray.from_arrays([10, 27], ["a", "b"]),
}


@pytest.mark.parametrize("column", VIEWS.values(), ids=VIEWS)
def test_views_as_polars_writes_them_and_runs_are_read_in_parts(column, tmp_path):
    table = pa.table({"text": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    chunks = list(read_chunks(tmp_path / "a.arrow", 5))
    assert [len(chunk.numbers) for chunk in chunks] == [5] * 5 + [2]
    values = [record["text"] for chunk in chunks for record in parse_records(chunk)]
    absent = [value if value != {"a": None} else {} for value in column.to_pylist()]
    assert values == absent


def test_compressed_buffers_are_refused_before_they_are_decompressed(tmp_path, monkeypatch):
    table = pa.table({"text": ["word " * (2 * MIB)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema, options=options) as file:
        file.write_table(table)
    monkeypatch.setattr(pa.ipc, "open_file", lambda source: pytest.fail("it is decompressed"))
    with pytest.raises(DataError, match=r"a.arrow: cannot be read: .* write them as JSON lines"):
        list(read_chunks(tmp_path / "a.arrow", 5))
