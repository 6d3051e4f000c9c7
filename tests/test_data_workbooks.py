"""Excel files as openpyxl reads them: those that people save, and those that are made to harm."""

import re
from pathlib import Path

import pytest
from record_files import read_rows
from workbooks import HEAD, PAIR, SHARED, row, text, write_workbook

from sft_play.data.files import parse_records, read_chunks
from sft_play.errors import DataError

WHOLE = '<dimension ref="A1:XFD1048576"/>'
DAMAGED = {
    "a column that no sheet has": row('<c r="ZZZZZZ2" t="n"><v>1</v></c>'),
    "a shared text that is not there": row('<c t="s"><v>7</v></c>'),
    "XML that breaks off": "<row><c",
    "a row whose number is none": row(number="x"),
    "an entity": row(text("&a;")),
}
BOMBS = {
    "a text of 64 MiB": row(text("a" * (64 << 20))),
    "a million empty rows": "<row/>" * 1_000_000,
    "one shared text in each cell": SHARED * 1_000,
    "cells at the right edge": "".join(
        f'<row r="{n}"><c r="XFD{n}" t="n"><v>1</v></c></row>' for n in range(2, 2000)
    ),
}


def records(path: Path) -> list:
    return [record for chunk in read_chunks(path) for record in parse_records(chunk)]


REFUSED = {name: (rows, ": no .xlsx file, or a damaged one") for name, rows in DAMAGED.items()}
REFUSED |= {
    name: (rows, ".* over 200 times as many; if they are rows, save the sheet")
    for name, rows in BOMBS.items()
}
REFUSED["a row beyond the last"] = (
    row(text("q"), text("a"), number=10**9),
    ":1048577: no sheet has so many rows",
)


@pytest.mark.parametrize(("rows", "words"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_workbook_or_one_that_would_become_large_is_told_in_words(rows, words, tmp_path):
    path = write_workbook(tmp_path / "a.xlsx", rows, shared="word " * 2_000)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}{words}"):
        records(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(
        DataError, match=f"^{re.escape(str(path))}: no .xlsx file, or a damaged one"
    ):
        records(path)


def test_the_size_that_a_sheet_claims_and_a_far_row_cost_nothing(tmp_path):
    far = row(text("q"), text("a"), number=1 << 20)
    for rows in (PAIR, far):
        path = write_workbook(tmp_path / "a.xlsx", rows, before=WHOLE)
        assert records(path) == [{"question": "q", "answer": "a"}]


def test_a_formula_has_the_value_that_was_saved_with_it_and_none_is_a_bad_row(tmp_path):
    saved = row(text("q"), '<c t="str"><f>A1</f><v>a</v></c>')
    path = write_workbook(tmp_path / "a.xlsx", saved)
    assert records(path) == [{"question": "q", "answer": "a"}]
    path = write_workbook(tmp_path / "b.xlsx", row(text("q"), "<c><f>A1</f></c>"))
    with pytest.raises(DataError, match=r"b.xlsx:2: .*answer"):
        read_rows(path)


def test_the_head_alone_has_no_rows(tmp_path):
    assert HEAD and records(write_workbook(tmp_path / "a.xlsx", "")) == []
