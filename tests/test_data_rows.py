"""sft_play.data: which row a record is, and why it is none; the cases are in tests/fixtures."""

import json
import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from record_files import QA, cases, format_of, parse_rows, read_rows, write_rows

from sft_play.config.loader import PROJECT_ROOT
from sft_play.data.files import read_chunks
from sft_play.data.row_formats import ROW_FORMATS
from sft_play.data.row_parsing import SystemPrompt
from sft_play.data.rows import BadRow, Row
from sft_play.errors import DataError, ExitClass

Json = dict[str, Any]


def as_json(value: Any) -> Any:
    """Return a row as its case has it: without its origin, and without fields at their default."""
    if is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        defaults = {field.name: field.default for field in fields(value)} | {"messages": ()}
        return {
            name: as_json(one)
            for name, one in held.items()
            if name in ("role", "content") or (name != "origin" and one != defaults[name])
        }
    return list(map(as_json, value)) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("case", cases("rows"), ids=lambda case: case["case"])
def test_a_record_is_the_row_of_its_case(case, tmp_path):
    path, columns = write_rows(tmp_path / "a.jsonl", case["record"]), case.get("columns", {})
    assert format_of(path, columns).name == case["format"]
    (row,) = read_rows(path, columns)
    assert row.origin == f"{path}:1"
    assert json.dumps(as_json(row)) == json.dumps(case["row"])


@pytest.mark.parametrize("kind", ROW_FORMATS.values(), ids=ROW_FORMATS)
def test_the_documentation_has_each_format_with_a_row_that_is_one(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(kind.example + "\n")
    assert format_of(path).name == kind.name
    (row,) = read_rows(path)
    assert row.messages or row.text or row.segments
    line = f"| `{kind.name}` | `{kind.example}` | {kind.of} |\n"
    assert line in (PROJECT_ROOT / "docs" / "data.md").read_text(encoding="utf-8"), line


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ("text messages question answer", "messages"),
        ("conversations instruction output", "conversations"),
        ("instruction input output", "instruction"),
        ("prompt completion question answer", "prompt"),
        ("question answer text", "question"),
        ("system user assistant text", "user"),
        ("input target output", "target"),
        ("input output text", "input"),
    ],
)
def test_of_several_shapes_the_first_holds(keys, shape, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", dict.fromkeys(keys.split(), "x"))
    assert format_of(path).name == shape


def test_a_system_prompt_goes_before_rows_that_bring_none_or_before_all(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    own = {"messages": [{"role": "system", "content": "own"}, *turns]}
    path = tmp_path / "a.jsonl"
    write_rows(path, own, {"messages": turns}, {"messages": turns, "system": "column"})
    (chunk,), shape = read_chunks(path), format_of(path)

    def first(*how: Any) -> list[str]:
        rows = parse_rows(chunk, shape, SystemPrompt(*how))
        return [row.messages[0].content for row in rows]

    assert first(None, False) == first("", False) == ["own", "q", "column"]
    assert first("ours", False) == ["own", "ours", "column"]
    assert first("ours", True) == ["ours", "ours", "ours"]
    assert first(None, True) == ["own", "q", "column"]
    write_rows(path, {"text": " Once\n"})
    assert read_rows(path, system_prompt="ours") == [Row((), f"{path}:1", text=" Once\n")]


def test_a_shape_travels_to_other_processes(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"problem": "q", "answer": "a"}, {"problem": "q"})
    shape = format_of(path, {"question": "problem"})
    assert pickle.loads(pickle.dumps(shape)) == shape
    (chunk,) = read_chunks(path)
    moved = pickle.loads(pickle.dumps(chunk))
    assert list(parse_rows(moved, shape)) == list(parse_rows(chunk, shape))


def refusal(path: Path, columns: Json | None = None) -> str:
    with pytest.raises(DataError) as error:
        read_rows(path, columns)
    assert error.value.exit_class == ExitClass.DATA
    return str(error.value)


BAD = cases("bad_rows")
OF_OTHERS = [case for case in BAD if "first" in case]
TOO_DEEP, TOO_LONG = b"[" * 100_000, b"1" * 5000


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        *((case["first"], case.get("line", case.get("record")), case["reason"])
          for case in OF_OTHERS),
        (QA, TOO_DEEP, "not valid JSON: nested too deeply"),
        (QA, TOO_LONG, "not valid JSON: a number has too many digits"),
        (QA, b'{"question": "\xff", "answer": "a"}', "not UTF-8 at byte 14; save the file as UTF-8"),
        (QA, b'{"question": "q\0", "answer": "a"}', "not valid JSON: it contains NUL bytes"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_row_is_named_by_file_line_and_reason(good, bad, reason, tmp_path):
    path, first = tmp_path / "a.jsonl", json.dumps(good).encode()
    line = bad if isinstance(bad, str | bytes) else json.dumps(bad)
    line = line.encode() if isinstance(line, str) else line
    path.write_bytes(first + b"\n\n" + line + b"\n" + first)
    assert refusal(path).startswith(f"{path}:3: {reason}")
    (chunk,) = read_chunks(path)
    before, aside, after = parse_rows(chunk, format_of(path))
    assert isinstance(before, Row) and isinstance(aside, BadRow) and isinstance(after, Row)
    assert aside.raw == line.decode("utf-8", "backslashreplace")


@pytest.mark.parametrize(
    "case", [case for case in BAD if "first" not in case], ids=lambda case: case["reason"][:40]
)
def test_a_file_of_no_format_is_refused_with_what_to_write(case, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", case["record"])
    assert case["reason"] in refusal(path, case.get("columns"))


def test_five_bad_rows_are_shown_and_the_others_counted(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", QA, *[{}] * 8)
    *shown, more, remedy = refusal(path).splitlines()
    assert [line.split(": ")[0] for line in shown] == [f"{path}:{n}" for n in range(2, 7)]
    assert "3 more" in more and "DATA_ON_BAD_ROW=quarantine" in remedy
