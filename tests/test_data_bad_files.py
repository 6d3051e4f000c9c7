"""sft_play.data.files: a file that is damaged or not what its name says is named."""

import gzip
import json
import lzma
import os
import random
from functools import partial

import pytest
from record_files import (
    GOLDEN,
    LINE,
    QA,
    WRITERS,
    bad_text,
    format_of,
    parquet_of,
    parse_rows,
    read_rows,
    to_arrow_file,
    to_arrow_stream,
    to_parquet,
    zstd,
)

from sft_play.data import tables
from sft_play.data.files import read_chunks
from sft_play.data.rows import BadRow
from sft_play.errors import DataError, ExitClass

packed = partial(gzip.compress, mtime=0)  # names of tests have the bytes
PARQUET, STREAM, ARROW_FILE = (
    to_parquet([QA] * 100),
    to_arrow_stream([QA] * 100),
    to_arrow_file([QA] * 100),
)
LAST_BATCH = STREAM.rindex(b"\xff\xff\xff\xff", 0, -8)


BAD_FILES: list[tuple[str, bytes, str, str]] = [
    # name, bytes, place, reason
    ("a.jsonl", b"", "", 'no rows; a row is such as {"question": "...", "answer": "..."}'),
    ("a.jsonl", b"\n \n\r\n", "", "no rows"),
    ("a.jsonl", b"[" + LINE + b"]", ":1",
     "the file begins with a JSON list; "
     "rows are one JSON object a line, and a list of them is a .json file"),
    ("a.jsonl", json.dumps(QA, indent=1).encode(), ":1",
     "the line ends after the first bracket; write each row on one line"),
    ("a.jsonl", LINE + LINE[:20], ":2",
     'not valid JSON: Unterminated string starting at column 19; '
     'the file ends with this line, perhaps cut off'),
    ("a.jsonl", LINE.decode().encode("utf-16"), "",
     "the text is UTF-16; iconv -f UTF-16 -t UTF-8 "),
    ("a.jsonl", LINE.decode().encode("utf-16-le"), ":1",
     "not valid JSON: it contains NUL bytes; if the file is UTF-16, save it as UTF-8"),
    ("a.jsonl", LINE * 3 + "é".encode("latin-1") + LINE, ":4", "not UTF-8 at byte 0"),
    ("a.jsonl", LINE + b"\xef\xbb\xbf" + LINE, ":2",
     "begins with a byte order mark, as in joined files; delete the mark"),
    ("a.jsonl", b'{"text": "x", "text": "y"}', ":1",
     "not valid JSON: the key 'text' appears twice in one object"),
    ("a.jsonl", b"question,answer\nq,a\n", ":1", "not valid JSON: Expecting value at column 1"),
    ("a.jsonl.gz", LINE, "", "no gzip file, or a damaged one"),
    ("a.jsonl.gz", packed(LINE * 1000)[:-20], "",
     "the compressed text breaks off or is damaged"),
    ("a.json", b"[]", "", "no rows"),
    ("a.json", b'{"data": []}', "", "no rows"),
    ("a.json", b'{"question": "q"}', "",
     'contains a list of rows, or {"data": [...]} and no other list; '
     'this is one object with the keys question'),
    ("a.json", b'{"data": [1], "more": [2, 3]}', "",
     "this is one object with the lists data, more"),
    ("a.json", b'{"train": [{"question": "q"}], "test": []}', "",
     "this is one object with the lists train, test; "
     "write each to its own file: jq -c '.train[]' "),
    ("a.json", b'"text"', "", "a .json data file contains a list of rows, not a text"),
    ("a.json", LINE * 3 + b"{", "[3]",
     "the line ends after the first bracket; write each row on one line"),
    ("a.json", b'{"data": [1}', "", "not valid JSON: Expecting ',' delimiter at column 12"),
    ("a.json", b"[{]", "[0]",
     "not valid JSON: Expecting property name enclosed in double quotes at column 3"),
    ("a.json", b"[" + LINE + b', {"x": 1, "x": 2}]', "[1]",
     "not valid JSON: the key 'x' appears twice in one object"),
    ("a.json", b"[" + LINE + b"," + b"[" * 100_000, "[1]", "not valid JSON: nested too deeply"),
    ("a.json", b"[" + LINE + b"," + LINE + b"{}]", "[2]",
     "not valid JSON: no comma before this row, at line 3 column 1"),
    ("a.json", b"[" + LINE + b"," + LINE, "[2]",
     "not valid JSON: the list has no end; the file is perhaps cut off"),
    ("a.json", b"[" + LINE + b"]]", "[1]",
     "more text after the end of the list, at line 2 column 2; "
     "a .json file contains one list of rows"),
    ("a.json", b"[" + LINE + b", 5]", "[1]", "a row is a JSON object, not a number"),
    ("a.json", b"[" + LINE + b', {"question": "q"}]', "[1]",
     "the keys are question; the rows of this file have question and answer"),
    ("a.json", b'[{"question": "\xff"}]', "", "not UTF-8 in line 1; save the file as UTF-8"),
    ("a.csv", b"question,answer\n", "", "no rows"),
    ("a.csv", b"question,answer\nq,a\nq\n", ":3",
     "1 fields, and the first line names 2 columns; "
     "put a field that contains the separator in quotes"),
    ("a.csv", b'question,answer\n"q\nr",a\n"s', ":4",
     "a quote is opened in this row and never closed; quotes inside a field are doubled"),
    ("a.csv", b'question,answer\n"q"r,a\n', ":2",
     "not valid CSV: ',' expected after '\"'; quotes inside a field are doubled"),
    ("a.csv", b"question,question\nq,a\n", ":1",
     "the first line names the columns, and 'question' appears twice"),
    ("a.csv", b"question,answer,,\nq,a,,\nq,a,b,\n", ":3",
     "3 fields, and the first line names 2 columns"),
    ("a.csv", "question,answer\nq,a\n".encode("utf-16"), "",
     "the text is UTF-16; iconv -f UTF-16 -t UTF-8 "),
    ("a.txt", b" \n\n", "", "no rows"),
    ("a.txt", b"A rose.\nA caf\xe9.", ":1", "not UTF-8 in line 2; save the file as UTF-8"),
    ("a.jsonl.zst", zstd(LINE * 9)[:-5], "", "cannot be read: Truncated compressed stream"),
    ("a.csv", b"question,,answer\nq,a,b\n", ":1",
     "the first line names the columns, and number 2 of 3 has no name"),
    ("a.tsv", b"question,answer\nq,a\n", ":1",
     "this has one, 'question,answer'; separate fields by tabs, not by ','"),
    ("a.csv", b"What is red?,A rose.\nWhat is blue?,The sea.\n", "",
     "the columns are What is red?, A rose. (its first line); no row format has these"),
    ("a.csv", b"question,answer\nq,a\n\xe9t\xe9,a\n", ":3", "not UTF-8; save the file as UTF-8"),
    ("a.csv", b"question,answer\nq,a\nq\0,a\n", ":3", "question contains a NUL character"),
    ("a.csv", b"messages\nhello\n", ":2",
     "messages is a text that is no JSON (not valid JSON: Expecting value at column 1): hello"),
    ("a.parquet", b"", "", "no .parquet file, or a damaged one (Parquet file size is 0 bytes)"),
    ("a.parquet", LINE * 10, "",
     "no .parquet file, or a damaged one (Parquet magic bytes not found"),
    ("a.parquet", to_parquet([QA])[:4] + b"\xff" * 40 + to_parquet([QA])[44:], "",
     "cannot be read: "),
    ("a.parquet", parquet_of(question=["q", None], answer=["a", "a"]), "[1]",
     "question is null, not a text"),
    ("a.parquet", parquet_of(question=["q", "q"], answer=[1.5, float("nan")]), "[0]",
     "answer is 1.5, not a text; write it as a text, \"1.5\""),
    ("a.parquet", parquet_of(question=["q", "q"], answer=[b"a", b"a"]), "[0]",
     "answer is \"b'a'\", not a text"),
    ("a.parquet", parquet_of(question=["q", "q"], answer=bad_text(b"\xff")), "[1]",
     "a text is not UTF-8"),
    ("a.parquet", parquet_of(question=[], answer=[]), "", "no rows"),
    ("a.parquet", parquet_of(problem=["q"], answer=["a"]), "",
     "the columns are problem, answer; no row format has these. Name the columns"),
    ("a.csv", b"wish,reply\nCancel,Done\n", "",
     "(a guess from their order): DATA_COLUMNS='{question: wish, answer: reply}'"),
    ("a.arrow", b"", "", "not a complete Arrow stream"),
    ("a.arrow", STREAM[:-8], "", "not a complete Arrow stream"),
    ("a.arrow", STREAM[:LAST_BATCH], "", "not a complete Arrow stream"),
    ("a.arrow", ARROW_FILE[: len(ARROW_FILE) // 2], "", "no .arrow file, or a damaged one"),
    ("a.doc", LINE, "", "a data file ends in .jsonl, .ndjson, .csv, .tsv, .json, .txt, .md, .jsonl.gz"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "place", "reason"), BAD_FILES)
def test_a_bad_file_is_named_with_the_place_and_the_reason(name, data, place, reason, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        read_rows(path)
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"{path}{place}: ")
    assert reason in first
    assert error.value.exit_class == ExitClass.DATA


ZIP = b"PK\x03\x04"
PAGE = b"<!DOCTYPE html>\n<html></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
OTHER_CONTENTS = [
    ("a.jsonl", packed(LINE), "compressed (gzip); rename it to a.jsonl.gz, or unpack it"),
    ("a.jsonl.gz", zstd(LINE), "compressed (zstd); rename it to a.jsonl.zst, or unpack it"),
    ("a.parquet", packed(PARQUET), "mv {0} {0}.gz && gzip -d {0}.gz"),
    ("a.csv", lzma.compress(LINE), "compressed (xz); unpack it: mv {0} {0}.xz && xz -d {0}.xz"),
    ("a.jsonl.gz", packed(PARQUET), "a Parquet file; unpack it"),
    ("a.txt", PARQUET, "a Parquet file; rename it to a.parquet"),
    ("a.csv", STREAM, "an Arrow file; rename it to a.arrow"),
    ("a.json", ZIP + b"\0\0xl/workbook.xml", "an Excel workbook; rename it to a.xlsx"),
    ("a.xlsx", ZIP + b"\0\0word/document.xml", "a Word document; save it as plain text"),
    ("a.jsonl", PAGE, "an HTML page, not rows; was it downloaded without signing in?"),
    ("a.txt.gz", packed(PAGE), "an HTML page, not rows"),
    ("a.parquet", b"%PDF-1.7", "a PDF document"),
    ("a.csv", b"SQLite format 3\0", "an SQLite database"),
    *((name, POINTER, "run git lfs pull") for name in ("a.txt", "a.parquet", "a.csv.gz", "a.xlsx")),
]


@pytest.mark.parametrize(("name", "data", "words"), OTHER_CONTENTS)
def test_a_file_that_is_not_what_its_name_says_is_called_what_it_is(name, data, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path} is ")
    assert words.format(path) in str(error.value) and "\n" not in str(error.value)


def test_what_an_error_says_to_rename_is_read_then(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(packed(LINE))
    assert read_rows((tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.gz"))


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
def test_damage_is_named_and_never_ends_the_process(name, tmp_path):
    for seed in range(30):
        draw = random.Random(seed)
        path = tmp_path / name
        path.write_bytes(damaged(WRITERS[name](GOLDEN[draw.choice(list(GOLDEN))]), draw))
        try:
            assert read_rows(path)
        except DataError as error:
            assert str(path) in str(error)


def test_a_quote_without_end_is_refused_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_FIELD_CHARACTERS", 1 << 16)
    (tmp_path / "a.csv").write_bytes(b'question,answer\nq,a\n"q,a\n' + b"q,a\n" * (1 << 16))
    with pytest.raises(DataError, match=r"a.csv:3: a quote is opened in this row and never closed"):
        read_rows(tmp_path / "a.csv")


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in [
        ("missing.jsonl", "no such data file"),
        ("folder.jsonl", "a folder"),
        ("pipe.jsonl", "a FIFO"),
        ("x" * 300 + ".jsonl", "File name too long"),
    ]:
        with pytest.raises(DataError, match=words):
            read_rows(tmp_path / name)


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_row_is_set_aside_with_all_its_columns(name, tmp_path):
    (tmp_path / name).write_bytes(
        WRITERS[name]([{**QA, "id": "1"}, {**QA, "answer": " ", "id": "2"}])
    )
    (chunk,) = read_chunks(tmp_path / name)
    _, bad = parse_rows(chunk, format_of(tmp_path / name))
    assert isinstance(bad, BadRow)
    assert (bad.reason, json.loads(bad.raw)) == (
        "answer is empty",
        {**QA, "answer": " ", "id": "2"},
    )
