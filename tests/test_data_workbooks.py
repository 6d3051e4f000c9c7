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


@pytest.mark.parametrize("rows", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_workbook_is_told_in_words(rows, tmp_path):
    path = write_workbook(tmp_path / "a.xlsx", rows)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: no .xlsx file, or a damaged"):
        records(path)


def test_a_workbook_that_is_cut_off_is_told_in_words(tmp_path):
    path = write_workbook(tmp_path / "a.xlsx", PAIR)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"no \.xlsx file, or a damaged one"):
        records(path)


@pytest.mark.parametrize("rows", BOMBS.values(), ids=BOMBS)
def test_a_small_workbook_does_not_become_a_large_one(rows, tmp_path):
    path = write_workbook(tmp_path / "a.xlsx", rows, shared="word " * 2_000)
    with pytest.raises(DataError, match="over 200 times as many; if they are rows, save the sheet"):
        records(path)


def test_the_size_that_a_sheet_claims_and_a_far_row_cost_nothing(tmp_path):
    far = row(text("q"), text("a"), number=1 << 20)
    for rows in (PAIR, far):
        path = write_workbook(tmp_path / "a.xlsx", rows, before=WHOLE)
        assert records(path) == [{"question": "q", "answer": "a"}]


def test_a_row_beyond_the_last_of_excel_is_refused(tmp_path):
    path = write_workbook(tmp_path / "a.xlsx", row(text("q"), text("a"), number=10**9))
    with pytest.raises(DataError, match=r"a\.xlsx:1048577: no sheet has so many rows"):
        records(path)


def test_a_formula_has_the_value_that_was_saved_with_it_and_none_is_a_bad_row(
    tmp_path,
):
    saved = row(text("q"), '<c t="str"><f>A1</f><v>a</v></c>')
    path = write_workbook(tmp_path / "a.xlsx", saved)
    assert records(path) == [{"question": "q", "answer": "a"}]
    path = write_workbook(tmp_path / "b.xlsx", row(text("q"), "<c><f>A1</f></c>"))
    with pytest.raises(DataError, match=r"b.xlsx:2: .*answer"):
        read_rows(path)


def test_the_head_alone_has_no_rows(tmp_path):
    assert HEAD and records(write_workbook(tmp_path / "a.xlsx", "")) == []
