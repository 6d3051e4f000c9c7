"""sft_play.data: files and folders as pandas, Spark, datasets and the hub lay them out."""

import json
import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas
import pytest
from families import tokenizer
from record_files import contents, read_rows, run_data
from renderings import CHATML

from sft_play.config.schema import Config, SourceSection
from sft_play.data.sources import find_source, find_sources
from sft_play.errors import DataError

ROWS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


EXPECTED = [list(row.values()) for row in ROWS]


@pytest.mark.parametrize(
    "orient", ["columns", "index", "records", "split", "table", "list", "lines"]
)
def test_a_json_file_is_read_as_pandas_and_spark_write_it(orient, tmp_path):
    path = tmp_path / "a.json"
    frame = pandas.DataFrame(ROWS)
    if orient == "lines":
        path.write_text(LINES)
    elif orient == "list":
        path.write_text(json.dumps(frame.to_dict(orient="list")))
    else:
        frame.to_json(path, orient=orient)
    assert contents(path) == EXPECTED


def test_an_object_of_splits_is_refused_with_commands_that_write_them(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": ROWS, "test": ROWS[:1]}))
    with pytest.raises(DataError) as error:
        read_rows(path)
    for command in str(error.value).partition("to its own file: ")[2].split("; "):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert contents(tmp_path / "train.jsonl") == EXPECTED
    assert contents(tmp_path / "test.jsonl") == EXPECTED[:1]


def test_nan_is_read_where_it_is_not_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**ROWS[0], "score": float("nan"), "system": float("nan")}) + "\n")
    assert contents(path) == EXPECTED[:1]


def test_a_folder_of_spark_is_read_without_its_empty_parts(tmp_path):
    for number, line in enumerate([*LINES.splitlines(), ""]):
        (tmp_path / f"part-0000{number}-ab-c000.json").write_text(line and line + "\n")
    for name in ("_SUCCESS", "._SUCCESS.crc", ".part-00000-ab-c000.json.crc"):
        (tmp_path / name).touch()
    files = found(tmp_path).files
    assert [row for file in files for row in contents(file)] == EXPECTED
    (tmp_path / "part-00009").write_text(LINES)
    with pytest.raises(DataError, match="part-00009, which is not read"):
        found(tmp_path)


def found(folder: Path, setting: str = "data.train_path", **more: Any) -> Any:
    return find_source(SourceSection(path=str(folder), **more), setting)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(LINES)


LAYOUTS = [
    ("data/train-00000-of-00002.parquet", "data/validation-00000-of-00001.parquet",
     "data/test-00000-of-00001.parquet"),
    ("train.jsonl", "val.jsonl", "test.jsonl"),
    ("train/part-0.jsonl", "dev/part-0.jsonl", "test/part-0.jsonl"),
    ("my_train.csv", "my_eval.csv", "my_test.csv"),
    ("training_data.json", "valid_data.json", "testing_data.json"),
    ("train_sft/0.arrow", "evaluation_sft/0.arrow", "test_sft/0.arrow"),
    ("en/train.jsonl", "en/dev.jsonl", "en/test.jsonl"),
    ("Train/a.jsonl", "Validation/a.jsonl", "Test/a.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_a_folder_with_splits_gives_each_setting_its_own(names, tmp_path):
    touch(tmp_path, *names)
    splits = ("train", "validation", "test")
    for split, name, setting in zip(splits, names, ("train", "val", "test"), strict=True):
        source = found(tmp_path, f"data.{setting}_path")
        assert source.files == (tmp_path / name,)
        assert source.left == tuple(sorted({*splits} - {split}))
        if split != "train":
            assert found(tmp_path, split=split).files == (tmp_path / name,)


@pytest.mark.parametrize(
    "names", [("test.jsonl",), ("a.jsonl", "b.jsonl"), ("train/a.jsonl", "train/b.jsonl")]
)
def test_a_folder_of_one_split_or_of_none_is_read_whole(names, tmp_path):
    touch(tmp_path, *names)
    source = found(tmp_path)
    assert (len(source.files), source.left) == (len(names), ())


@pytest.mark.parametrize("names", [("a.jsonl", "test.jsonl"), ("dev.jsonl", "test.jsonl")])
def test_a_folder_whose_training_rows_are_not_named_is_refused(names, tmp_path):
    touch(tmp_path, *names)
    with pytest.raises(DataError) as error:
        found(tmp_path)
    assert "name the file or folder of the train rows" in str(error.value)
    assert found(tmp_path / names[0]).files


def test_what_is_left_is_named_with_the_setting_that_takes_it(tmp_path, caplog):
    touch(tmp_path, *LAYOUTS[1])
    data = {"train_path": str(tmp_path), "test_path": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        sources = find_sources(Config.model_validate({"data": data}))
    assert [source.files for parts in sources.values() for source in parts] == [
        (tmp_path / "train.jsonl",),
        (tmp_path / "test.jsonl",),
    ]
    (note,) = [record.getMessage() for record in caplog.records]
    assert note.endswith(f"the validation rows are left out; DATA_VAL_PATH={tmp_path} takes them")


def test_one_plain_text_trains_and_holds_out_pieces_of_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"The number {n} comes after {n - 1}." for n in range(1, 400)))
    data = run_data(path, tokenizer(CHATML))
    facts = data.ledger.as_json()["splits"]
    assert facts["train"]["shortened"] == {"split": 1}
    assert facts["train"]["rows_in"] == facts["train"]["rows_used"] == 1
    held_out, trained = len(data.validation), len(data.train)
    assert held_out == round(0.05 * (held_out + trained)) > 0
    assert max(data.train.lengths) == 64


TURNS = [("developer", "Be brief."), ("system", "Be kind."), ("user", "Hi."), ("user", "You there?"),
         ("assistant", "Yes."), ("assistant", "I am.")]  # fmt: skip


def test_turns_that_a_template_refuses_are_joined_by_the_command_of_the_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"role": role, "content": content} for role, content in TURNS]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 6)
    strict = tokenizer(
        "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    with pytest.raises(DataError) as error:
        run_data(path, strict)
    command = re.search(r"jq -c .*", str(error.value))
    assert command, error.value
    subprocess.run(command[0], shell=True, cwd=tmp_path, check=True)
    for row in read_rows(tmp_path / "joined.jsonl"):
        assert [(message.role, message.content) for message in row.messages] == [
            ("system", "Be brief.\n\nBe kind."),
            ("user", "Hi.\n\nYou there?"),
            ("assistant", "Yes.\n\nI am."),
        ]
