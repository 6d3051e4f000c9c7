"""A count or a part of a source's rows: which rows they are, in which file formats, and errors."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from record_files import WRITERS

from sft_play.config.schema import Config, SourceSection
from sft_play.data.assemble import DataFacts
from sft_play.data.ledger import PaddedTokens, ledger_lines
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_facts import count_rows_or_reason
from sft_play.data.sources import changed_sources
from sft_play.errors import DataError

FORMS = ("jsonl", "parquet", "csv", "json", "folder")


def write(path: Path, first: int, count: int) -> None:
    rows = [{"question": f"Q {n}?", "answer": f"A {n}."} for n in range(first, first + count)]
    path.write_bytes(WRITERS["A.CSV" if path.suffix == ".csv" else f"a{path.suffix}"](rows))


@pytest.fixture
def written(tmp_path):
    """A function that writes 1,200 rows in a form, and returns their path."""

    def make(form: str = "jsonl", count: int = 1200) -> str:
        path = tmp_path / (f"rows.{form}" if form != "folder" else "rows")
        if form != "folder":
            write(path, 0, count)
            return str(path)
        path.mkdir()
        for number, suffix in enumerate(("jsonl", "parquet", "csv")):
            write(path / f"{number}.{suffix}", number * count // 3, count // 3)
        return str(path)

    return make


@pytest.fixture
def built(tmp_path, tokenizer):
    """A function that returns the data of a run over sources."""
    write(tmp_path / "val.jsonl", 90_000, 3)

    def build(train_path: Any, seed: int = 0, **data: Any):
        return build_run_data(config_of(tmp_path, train_path, seed, **data), tokenizer)

    return build


def config_of(folder: Path, train_path: Any, seed: int = 0, **data: Any) -> Config:
    settings = {"val_path": str(folder / "val.jsonl"), "cache_dir": str(folder / "cache"), **data}
    return Config.model_validate(
        {
            "model": {"max_seq_len": 512},
            "train": {"seed": seed},
            "data": {"train_path": train_path, **settings},
        }
    )


def numbers(split, tokenizer) -> list[int]:
    """The number of each sample's question, in order."""
    texts = [tokenizer.decode(sample.prompt) for sample in split]
    return [int(text.split("Q ")[1].split("?")[0]) for text in texts]


SLICES = {
    "train[:10%]": range(12),
    "[:5]": range(5),
    "train[10%:20%]": range(12, 24),
    "[59:61]": range(59, 61),
    "train[-3:]": range(117, 120),
    "[-1%:]": range(119, 120),
    "[:]": range(120),
    "train": range(120),
    "[115:100%]": range(115, 120),
}


@pytest.mark.parametrize(
    ("form", "split"),
    [("jsonl", split) for split in SLICES] + [(form, "[59:61]") for form in FORMS],
)
def test_a_part_is_that_of_the_datasets_library(form, split, written, built, tokenizer):
    data = built([{"path": written(form, 120), "split": split}])
    assert numbers(data.train, tokenizer) == list(SLICES[split])
    tally = data.ledger.splits["train"].tally
    assert (tally.rows_in, tally.rows_used) == (120, len(SLICES[split]))
    assert tally.dropped["not_chosen"] == 120 - len(SLICES[split])


@pytest.mark.parametrize(("count", "percent"), [(7, 50), (10, 25), (3, 33), (999, 1), (15, 90)])
def test_a_share_is_rounded_as_the_datasets_library_rounds_it(
    count, percent, written, built, tokenizer
):
    from datasets.arrow_reader import ReadInstruction

    path = written("jsonl", count)
    (expected,) = ReadInstruction.from_spec(f"train[:{percent}%]").to_absolute({"train": count})
    data = built([{"path": path, "split": f"train[:{percent}%]"}])
    assert len(numbers(data.train, tokenizer)) == expected.to


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_drawn_by_the_seed_from_the_whole_source(form, written, built, tokenizer):
    path = written(form)
    one, again, other = (
        numbers(built([{"path": path, "rows": 100}], seed).train, tokenizer) for seed in (1, 1, 2)
    )
    assert one == again == sorted(one) and one != other
    assert len(set(one)) == 100
    thirds = [sum(n // 400 == third for n in one) for third in range(3)]
    assert min(thirds) > 15, "from the beginning alone"
    fewer = numbers(built([{"path": path, "rows": 50}], 1).train, tokenizer)
    assert set(fewer) < set(one), "a larger count adds rows to a smaller one"


def test_rows_of_a_part_beside_weights(written, built, tokenizer, tmp_path):
    path = written()
    write(tmp_path / "other.jsonl", 5000, 30)
    sources = {
        path: {"rows": 60, "split": "train[50%:]", "weight": 3},
        str(tmp_path / "other.jsonl"): 1,
    }
    data = built(sources)
    found = numbers(data.train, tokenizer)
    first = {n for n in found if n < 5000}
    assert len(first) == 60 and min(first) >= 600
    assert [share.samples for share in data.ledger.splits["train"].epoch] == [90, 30]
    shown = "\n".join(ledger_lines(data.ledger))
    assert "rows.jsonl rows=60 of [50%:]" in shown
    assert "not_chosen: by rows or split of its source" in shown


def test_bad_rows_outside_the_part_are_not_read(tmp_path, built, tokenizer):
    path = tmp_path / "bad.jsonl"
    write(path, 0, 20)
    path.write_text(path.read_text() + "{broken")
    assert len(numbers(built([{"path": str(path), "split": "[:20]"}]).train, tokenizer)) == 20
    with pytest.raises(DataError, match=r"bad.jsonl:21"):
        built([{"path": str(path), "split": "[-1:]"}])


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        ({"rows": 31}, {"rows": 30}),
        ({"rows": 4, "split": "[:10%]"}, {"rows": 3, "split": "[:10%]"}),
        ({"split": "[:31]"}, {"split": "[:30]"}),
        ({"split": "[20:10]"}, {"split": "[:30]"}),
        ({"split": "[:200%]"}, {"split": "[:30]"}),
    ],
)
def test_more_rows_than_there_are_is_an_error_whose_remedy_works(wanted, remedy, written, built):
    path = written("jsonl", 30)
    text = r"rows.jsonl: .* takes no row, or more than there are; write rows of at most (\d+), or a"
    with pytest.raises(DataError, match=text) as error:
        built([{"path": path, **wanted}])
    if "rows" in remedy:
        assert f"at most {remedy['rows']}," in str(error.value)
    else:
        assert str(error.value).endswith(f"within {remedy['split']}")
    assert len(built([{"path": path, **remedy}]).train)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": "10%"},
        {"split": "train[5]"},
        {"split": "train[:1.5%]"},
        {"split": "train[:5]", "part": "[:6]", "rows": -1},
    ],
)
def test_other_forms_are_refused(wrong):
    with pytest.raises(ValidationError):
        SourceSection.model_validate({"path": "a.jsonl", **wrong})


def test_the_same_file_has_an_entry_for_each_choice_and_each_seed_of_a_draw(written, built):
    path = written()

    def folder(seed: int = 0, **choice: Any) -> str:
        return built([{"path": path, **choice}], seed).sources["train"][0].folder

    assert folder(0) == folder(1)
    assert folder(0, split="[:10]") == folder(1, split="[:10]")
    folders = [folder(0), folder(0, split="[:10]"), *(folder(seed, rows=10) for seed in (0, 1))]
    assert len(set(folders)) == 4


def test_a_resumed_run_must_have_the_same_choice(written, built, tmp_path):
    path = written()
    sources = [{"path": path, "rows": 10}]
    data = built(sources)
    facts = DataFacts(data.sources, PaddedTokens(1, 1, 1)).to_json()
    assert changed_sources(facts, config_of(tmp_path, sources)) == {}
    assert DataFacts.from_json(facts).sources == data.sources
    for other, words in (([path], "all rows"), ([{"path": path, "rows": 11}], "rows=11")):
        (reason,) = changed_sources(facts, config_of(tmp_path, other))["data.train_path"]
        assert f"has {words}, and it was trained with rows=10" in reason
        assert data.digests != built(other).digests


@pytest.mark.parametrize(("choice", "rows"), [({"rows": 40}, 40), ({"split": "[:25%]"}, 300)])
def test_a_plan_counts_the_chosen_rows_before_and_after_they_are_read(
    choice, rows, written, built, tmp_path
):
    path = written()
    estimate = count_rows_or_reason(config_of(tmp_path, [{"path": path, **choice}]))
    assert estimate.samples == rows and estimate.is_estimated
