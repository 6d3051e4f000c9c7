"""sft_play.data.sources: the files that a path in the settings names."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from record_files import GOLDEN, read_rows, run_data, to_jsonl, without_origin, write_rows

from sft_play.config.schema import Config, SourceSection
from sft_play.data.ledger import ledger_lines
from sft_play.data.sources import Source, find_source, find_sources
from sft_play.errors import DataError


def found(path: Path | str, **more: Any) -> Source:
    return find_source(SourceSection(path=str(path), **more), "data.train_path")


def test_a_folder_is_its_data_files_in_order(tmp_path):
    names = "b/2.csv b/10.parquet a.jsonl.gz README.md dataset_info.json _old.jsonl"
    for name in f"{names} .cache/x.jsonl _more/x.txt run.py".split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = found(tmp_path, weight=2.0, columns={"question": "q"})
    assert [path.relative_to(tmp_path).as_posix() for path in source.files] == [
        "a.jsonl.gz",
        "b/10.parquet",
        "b/2.csv",
    ]
    assert (source.name, source.section.weight, source.columns) == (
        str(tmp_path),
        2.0,
        {"question": "q"},
    )
    assert found(tmp_path / "b" / "2.csv").files == (tmp_path / "b" / "2.csv",)


def test_rows_that_datasets_saved_to_disk_are_read(tmp_path):
    saved = datasets.Dataset.from_list(GOLDEN["messages"] * 50)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    source = found(tmp_path / "one")
    assert len(source.files) == 3
    rows = [row for path in source.files for row in read_rows(path)]
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(GOLDEN["messages"]))
    assert without_origin(rows) == without_origin(read_rows(tmp_path / "a.jsonl")) * 50
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "two")
    both = found(tmp_path / "two")
    assert both.files == found(tmp_path / "two" / "train").files
    assert both.left == ("test",)
    datasets.DatasetDict(a=saved, b=saved).save_to_disk(tmp_path / "three")
    with pytest.raises(DataError, match="name the file or folder of the train rows"):
        found(tmp_path / "three")


def test_a_folder_without_rows_or_with_files_that_would_be_left_out_is_refused(tmp_path):
    with pytest.raises(DataError, match="no data file"):
        found(tmp_path)
    (tmp_path / "a.jsonl").touch()
    for name in ("README.txt", "more.jsonl.xz"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=name):
            found(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(DataError, match="again"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("{}/a.jsonl", {"split": "test"}),
        ("{}/a.jsonl", {"subset": "en"}),
        ("a/b", {"split": "c+d"}),
    ],
)
def test_splits_are_of_hub_data_sets_and_one_at_a_time(path, more, tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=re.escape(repr(*more.values()))):
        found(path.format(tmp_path), **more)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data/trian.jsonl", r"no such file or folder; did you mean .*/data/train.jsonl\?"),
        ("dta/train.jsonl", r"no such file or folder; did you mean .*/data/train.jsonl\?"),
        ("dta/trian.jsonl", r"no such file or folder; did you mean .*/data/train.jsonl\?"),
        ("dta/other.json", r"no such file or folder; did you mean .*/data\?"),
        ("data/0000000.csv", "no such file or folder; write"),
        ("a/b/c", "no such file or folder; write"),
        ("data/notes.doc", "a data file ends in .jsonl"),
    ],
)
def test_a_path_that_is_not_there_is_named_with_the_nearest(path, words, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    (tmp_path / "data" / "notes.doc").touch()
    with pytest.raises(DataError, match=rf"data.train_path=.*{path}: {words}"):
        found(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data.train_path={path}: {words.replace('.*/', '')}"):
        found(path)


def test_a_folder_of_markdown_alone_is_read_as_plain_texts_if_that_is_asked_for(tmp_path):
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"# {name}\n\nA text.\n")
    config = Config.model_validate({"data": {"train_path": str(tmp_path)}})
    words = r"contains only \.md files \(2, the first is .*a\.md\); DATA_FORMAT=text reads them"
    with pytest.raises(DataError, match=words):
        find_sources(config)
    asked = {"train_path": str(tmp_path), "format": "text"}
    (source,) = find_sources(Config.model_validate({"data": asked}))["train"]
    assert [path.name for path in source.files] == ["a.md", "b.md"]
    assert {each.row_format.name for each in source.read()} == {"text"}


def test_files_of_a_folder_that_are_not_read_are_counted_by_ending(tmp_path, tokenizer):
    folder = tmp_path / "rows\x1b[31m"
    (folder / "sub").mkdir(parents=True)
    write_rows(folder / "rows.jsonl", *({"question": f"q{n}", "answer": "a"} for n in range(9)))
    for name in (
        "a.pdf",
        "sub/b.pdf",
        "c.docx",
        "notes.md",
        "d",
        "README.md",
        "LICENSE",
        ".hidden",
    ):
        (folder / name).touch()
    ledger = run_data(folder, tokenizer, val_size=0.1).ledger
    note = f"{folder}: 5 files are not read: 1 .docx, 1 .md, 2 .pdf, 1 without ending"
    assert ledger.notes == [note]
    assert ledger_lines(ledger)[-1] == note


def test_a_folder_of_the_system_is_not_walked():
    with pytest.raises(DataError, match=r"data\.train_path=/: a folder of the system; name the"):
        found("/")


def test_markdown_beside_rows_is_no_row(tmp_path):
    (tmp_path / "README.md").write_text("# Rows\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    config = Config.model_validate({"data": {"train_path": str(tmp_path)}})
    (source,) = find_sources(config)["train"]
    assert [path.name for path in source.files] == ["rows.jsonl"]
