"""sft_play.data: tables with other delimiters, other encodings, plain texts, compressed texts."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from openpyxl import Workbook
from record_files import contents, read_rows, zstd

from sft_play.errors import DataError

PAIR = ["q; r, s", "a"]


def texts(path: Path) -> list[tuple[str, str | None]]:
    """The place and the text of each row."""
    return [(row.origin.removeprefix(str(path)), row.text) for row in read_rows(path)]


@pytest.mark.parametrize(
    "table",
    [
        'question;answer\n"q; r, s";a\n',
        "question|answer\nq; r, s|a\n",
        "question\tanswer\nq; r, s\ta\n",
        'question,answer\n"q; r, s",a\n',
        'sep=;\nquestion;answer\n"q; r, s";a\n',
        'question,answer,,\n"q; r, s",a,,\n"q; r, s",a\n"q; r, s",a,,,,\n',
        ',question,answer\n0,"q; r, s",a\n1,"q; r, s",a\n',
        '"question, long";answer;question\nx;a;"q; r, s"\n',
    ],
)
def test_tables_are_read_as_spreadsheets_and_pandas_write_them(table, tmp_path):
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    rows = contents(tmp_path / "a.csv")
    assert rows == [PAIR] * table.count("q; r, s")


def test_lines_are_counted_behind_the_hint_for_excel(tmp_path):
    (tmp_path / "a.csv").write_text("sep=;\nquestion;answer\nq;a\nq;\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.csv:4: answer is empty"):
        read_rows(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("a.csv", "cp1252"), ("a.csv", "utf-16"), ("a.jsonl", "latin-1"), ("a.txt", "cp1252")],
)
def test_another_encoding_is_refused_with_the_command_that_converts_it(name, encoding, tmp_path):
    record = {"question": "Où est le café ?", "answer": "Près de l’église." if "cp" in encoding
              else "Près du théâtre."}  # fmt: skip
    text = {
        "a.csv": f"question,answer\n{record['question']},{record['answer']}\n",
        "a.jsonl": json.dumps(record, ensure_ascii=False) + "\n",
        "a.txt": record["question"],
    }[name]
    path = tmp_path / "my data" / name
    path.parent.mkdir()
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DataError) as error:
        read_rows(path)
    command = next(
        part for part in str(error.value).replace(": iconv", "; iconv").split("; ")
        if part.startswith("iconv")
    ).splitlines()[0]  # fmt: skip
    subprocess.run(command, shell=True, check=True)
    (target,) = path.parent.glob("*.utf8.*")
    assert shlex.split(command)[-1] == str(target)
    assert target.read_text(encoding="utf-8") == text
    (row,) = read_rows(target)
    assert (row.text or row.messages[0].content) == record["question"]


def test_files_of_two_encodings_that_were_joined_are_not_converted_as_one(tmp_path):
    utf8, western = (
        json.dumps({"question": "Grüße?", "answer": answer}, ensure_ascii=False).encode(encoding)
        for answer, encoding in (("日本", "utf-8"), ("Schöne!", "cp1252"))
    )
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([utf8, utf8, western]))
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert "a.jsonl:3: not UTF-8 at byte 16" in str(error.value)
    assert "2 of 3 lines with letters beyond ASCII are UTF-8, so texts of two" in str(error.value)
    assert "iconv" not in str(error.value), "it would spoil the lines that are right"


def test_no_encoding_is_guessed_from_a_few_letters(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"question,answer\nq,\xff\xfd\n")
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert "a.csv:2: not UTF-8; save the file as UTF-8" in str(error.value)
    assert "looks like" not in str(error.value)


def test_a_text_file_is_one_document_or_several(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == [(":1", "One.\n\nTwo.\n")]
    (tmp_path / "b.txt").write_text(
        "\ufeffOne.\n\nTwo.\n<|endoftext|>\n\n<|endoftext|>\nThree.", encoding="utf-8"
    )
    assert texts(tmp_path / "b.txt") == [(":1", "One.\n\nTwo.\n"), (":7", "Three.")]
    (tmp_path / "b.txt.zst").write_bytes(zstd(b"One.\n"))
    assert texts(tmp_path / "b.txt.zst") == [(":1", "One.\n")]


def test_excel_files_have_one_sheet(tmp_path):
    path = tmp_path / "a.xlsx"
    book = Workbook()
    for cells in (["question", "answer", None], [None, None, None], ["q; r, s", "a", None]):
        book.active.append(cells)
    book.active.append(["2 + 2?", 4])
    book.save(path)
    assert contents(path) == [PAIR, ["2 + 2?", "4"]]
    book.create_sheet("Other")
    book.save(path)
    with pytest.raises(DataError, match="the sheets are Sheet, Other; keep one"):
        read_rows(path)
