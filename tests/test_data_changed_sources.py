"""Whether the files that the data settings name hold what a run was made of."""

import contextlib

import pytest

from sft_play.config.schema import Config
from sft_play.data.sources import changed_sources, digest_source, find_source, source_sections
from sft_play.errors import DataError


def config_of(train, **data) -> Config:
    return Config.model_validate({"data": {"train_path": train, **data}})


@pytest.fixture
def folder(tmp_path):
    """A folder with two files of a row each."""
    for name in "ab":
        row = f'{{"question": "{name}?", "answer": "{name}"}}\n'
        (tmp_path / f"{name}.jsonl").write_text(row)
    return tmp_path


def recorded(train, **own) -> dict:
    """Return data.json of a run on these sources, as far as it matters."""
    sources = []
    for section in source_sections(config_of(train).data.train_path):
        source = find_source(section, "data.train_path")
        sources.append(
            {
                "name": source.name,
                "weight": source.section.weight,
                "digest": digest_source(source),
                "file_bytes": source.file_bytes,
                **own,
            }
        )
    return {"sources": {"train": sources}}


def test_the_bytes_of_files_decide_not_where_they_lie_nor_when_they_were_written(folder):
    facts = recorded(str(folder))
    (folder / "a.jsonl").touch()
    moved = folder.rename(folder.with_name(f"{folder.name}-moved"))
    assert changed_sources(facts, config_of(str(moved))) == {}
    file = moved / "b.jsonl"
    file.write_text(file.read_text().replace("b?", "c?"))  # of the same size
    expected = {
        "data.train_path": [f"{moved} has other bytes than the files that it was trained with"]
    }
    assert changed_sources(facts, config_of(str(moved))) == expected
    old = recorded(str(moved), file_bytes=None)
    assert changed_sources(old, config_of(str(moved))) == {}, "an older version knew no size"


def test_a_file_that_is_gone_and_a_data_set_of_the_hub_are_known_by_name(folder):
    path = str(folder / "a.jsonl")
    facts = recorded(path)
    (folder / "a.jsonl").unlink()
    assert changed_sources(facts, config_of(path)) == {}
    with contextlib.chdir(folder):
        assert changed_sources(facts, config_of("a.jsonl")) == {}
    with pytest.raises(DataError, match="no such file or folder"):
        changed_sources(facts, config_of(str(folder / "other.jsonl")))
    of_hub = {"sources": {"train": [{"name": "org/set (en)", "weight": None}]}}
    assert changed_sources(of_hub, config_of([{"path": "org/set", "subset": "en"}])) == {}
    assert changed_sources(of_hub, config_of("org/set")) == {
        "data.train_path": [
            "org/set is another data set than org/set (en), with which it was trained"
        ]
    }


def test_other_weights_and_another_number_of_sources_are_no_longer_the_same_rows(folder):
    a, b = (str(folder / f"{name}.jsonl") for name in "ab")
    facts = recorded({a: 1, b: 3})
    assert changed_sources(facts, config_of({a: 1, b: 3})) == {}
    assert changed_sources(facts, config_of({a: 1, b: 2}, val_path=b)) == {
        "data.train_path": [f"{b} has weight 2.0, and it was trained with weight 3.0"],
        "data.val_path": ["sources=1, and it was trained with 0"],
    }
