"""From files to splits: every row is used or named, none is on both sides, the cache is used."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_examples import plan_for

from sft_play.config.schema import Config
from sft_play.data import tokenize
from sft_play.data.assemble import DataFacts, RunData, assemble
from sft_play.data.cache import read_bad_rows
from sft_play.data.ledger import PaddedTokens, Tally
from sft_play.data.order import StepSampler
from sft_play.data.pipeline import build_run_data, counted_run, packed_run
from sft_play.data.sources import find_sources
from sft_play.data.store import Store
from sft_play.errors import ConfigError, DataError

FILES = ("train", "val", "test")


@pytest.fixture
def config_of(tmp_path):
    """A function that writes rows to files and returns a config that reads them."""

    def config(
        train: list | None,
        max_seq_len: int = 512,
        train_settings: dict[str, Any] | None = None,
        **data: Any,
    ) -> Config:
        paths = {
            f"{name}_path": written(tmp_path / f"{name}.jsonl", rows)
            for name, rows in {"train": train, **data}.items()
            if name in FILES and rows
        }
        given = {name: value for name, value in data.items() if name not in FILES}
        settings = {"cache_dir": str(tmp_path / "samples"), **paths, **given}
        return Config.model_validate(
            {"model": {"max_seq_len": max_seq_len}, "train": train_settings or {}, "data": settings}
        )

    return config


@pytest.fixture
def built(config_of, tokenizer):
    """A function that returns the data of a run over some rows."""
    return lambda *rows, **data: build_run_data(config_of(*rows, **data), tokenizer)


def written(path: Path, rows: list[Any]) -> str:
    """Write a row a line; a text is a line as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return str(path)


def qa(question: str, answer: str = "yes") -> dict[str, str]:
    return {"question": question, "answer": answer}


def numbered(count: int, begin: int = 0) -> list[dict[str, str]]:
    return [
        qa(f"Is {n} more than {n - 1}?", " ".join(["yes"] * (n % 5 + 1)))
        for n in range(begin, begin + count)
    ]


def facts_of(data: RunData) -> dict[str, Any]:
    """The ledger of the training rows."""
    return data.ledger.splits_as_json()["train"]


def assert_adds_up(data: RunData) -> None:
    """The identities of the ledger, counted again from the samples."""
    for name, facts in data.ledger.splits_as_json().items():
        split = getattr(data, name)
        assert facts["rows_in"] == facts["rows_used"] + sum(facts["dropped"].values())
        if name != "train" or not any(source.weight for source in data.sources["train"]):
            assert facts["samples"] == len(split)
            assert (
                facts["tokens"] == sum(len(sample.ids) for sample in split) == split.lengths.sum()
            )
            assert facts["trained_tokens"] == sum(sample.trained_tokens for sample in split)
            assert facts["rows_used"] == len({split.origin(i) for i in range(len(split))})
        for source in facts["sources"]:
            Tally.from_json(
                {key: value for key, value in source.items() if key not in ("name", "weight")}
            ).check()


def test_a_set_with_every_defect_is_accounted_for_by_reason(built):
    good = numbered(40)
    train = [
        *good,
        '{"question": "cut off',
        qa("no answer", ""),
        {"question": "null", "answer": None},
        {"question": "wrong type", "answer": 7},
        {"text": "of another shape"},
        '{"question": "NaN", "answer": NaN}',
        '{"question": "half a pair", "answer": "\\ud83d"}',
        qa("a stop in the answer", "one<|end|>two"),
        qa("too long", "very " * 600),
        good[0],  # to the letter
        qa("IS 3 more than  2", good[3]["answer"]),  # in the same words
        qa("Evaluated, too?"),
        qa("evaluated too"),
    ]
    data = built(
        train,
        val=[*numbered(5, 100), qa("Evaluated, too?")],
        on_bad_row="quarantine",
        special_tokens_in_text="allow",
        on_overlap="drop",
        max_lost=0.9,
    )
    facts = facts_of(data)
    assert facts["rows_in"] == len(train)
    assert facts["dropped"] == {"bad_row": 7, "unproven": 1, "too_long": 1, "evaluated_on": 2}
    assert facts["rows_used"] == 42
    assert facts["duplicates"] == {"exact": 1, "normalized": 2, "questions": 2}
    assert facts["overlap"] == {"validation": {"exact": 1, "normalized": 2, "questions": 2}}
    lost, kept = facts["lost_trained_tokens"], facts["sources"][0]["trained_tokens"]
    assert lost > 0 and facts["lost_fraction"] == pytest.approx(lost / (lost + kept), abs=1e-6)
    assert_adds_up(data)
    aside = read_bad_rows(data.sources)
    assert [int(row.origin.rpartition(":")[2]) for row in aside["train"]] == [*range(41, 49)]
    assert all(row.reason and row.raw for row in aside["train"]) and "validation" not in aside


def test_one_bad_row_stops_the_run_unless_it_is_quarantined(built, tmp_path):
    train = [*numbered(20), qa("q", "a<|end|>b")]
    allow = {"special_tokens_in_text": "allow"}
    words = r"(?s)train.jsonl:21: .*DATA_ON_BAD_ROW=quarantine"
    with pytest.raises(DataError, match=words) as error:
        built(train, **allow)
    assert error.value.exit_class == 11
    left = [path for path in (tmp_path / "samples").iterdir() if path.suffix != ".lock"]
    assert not left, "nothing half-written"
    data = built(train, on_bad_row="quarantine", **allow)
    assert facts_of(data)["dropped"]["unproven"] == 1


@pytest.mark.parametrize(
    ("policy", "dropped", "shortened", "samples"),
    [
        ("drop", {"too_long": 1}, {}, 20),
        ("truncate_left", {}, {"truncated": 1}, 21),
        ("split", {}, {"split": 1}, 22),
    ],
)
def test_long_rows_become_what_the_policy_says_and_no_token_is_lost_unseen(
    built, policy, dropped, shortened, samples
):
    rows = {"train": [*numbered(20), qa("Long?", "word " * 70)], "val": numbered(3, 50)}
    full = built(**rows)
    limit = int(max(full.train.lengths)) * 3 // 5
    cut = built(**rows, max_seq_len=limit, too_long=policy, max_lost=0.9)
    facts = facts_of(cut)
    assert (facts["dropped"], facts["samples"]) == (dropped, samples)
    found = facts["trained_tokens"] + facts["lost_trained_tokens"]
    assert found == facts_of(full)["trained_tokens"]
    assert facts["shortened"] == shortened
    assert cut.train.lengths.max() <= limit
    assert_adds_up(cut)


def test_too_much_lost_stops_the_run_and_says_which_length_would_do(built, tmp_path):
    long = [qa("Long?", "word " * 70), qa("Longer?", "word " * 80)]
    rows = {"train": [*numbered(20), *long], "val": numbered(3, 50)}
    longest = int(built(**rows).train.lengths.max())
    with pytest.raises(DataError) as error:
        built(**rows, max_seq_len=64)
    first, second, last = str(error.value).splitlines()
    path = tmp_path / "train.jsonl"
    assert first == f"{path}:22: {longest} tokens, model.max_seq_len is 64"
    assert second.startswith(f"{path}:21: ")
    assert last.startswith("2 of 22 rows are too long, and ")
    assert f"set MODEL_MAX_SEQ_LEN={longest}, DATA_TOO_LONG=split, or raise DATA_MAX_LOST" in last


def test_training_rows_that_are_evaluated_on_stop_the_run_by_name(built, tmp_path):
    again = qa("is 3 MORE than 2", numbered(4)[3]["answer"])
    rows = {"train": numbered(10), "val": [*numbered(4, 50), again]}
    with pytest.raises(DataError) as error:
        built(**rows)
    first, last = str(error.value).splitlines()
    names = (f"{tmp_path}/{name}.jsonl" for name in ("train", "val"))
    assert first == "{}:4 is {}:5 of the validation rows".format(*names)
    assert "1 training rows are validation rows, too (0 to the letter)" in last
    assert "DATA_ON_OVERLAP=drop" in last
    allowed = built(**rows, on_overlap="allow")
    assert len(allowed.train) == 10
    assert facts_of(allowed)["overlap"]["validation"]["normalized"] == 1
    with pytest.raises(DataError, match=r"test.jsonl:1 of the test rows"):
        built(numbered(10), val=numbered(4, 50), test=[again])


def test_the_seed_of_the_split_is_data_seed_else_seed(built):
    def held(**train: int) -> list[int]:
        return built(numbered(40), train_settings=train).validation.records["number"].tolist()

    assert held(seed=1) == held(seed=1, data_seed=1) == held(seed=9, data_seed=1)
    assert len({tuple(held(seed=seed)) for seed in range(8)}) > 1


def test_a_split_without_a_row_left_says_where_they_went(built):
    words = r"val.jsonl: no validation row is left \(bad_row 2\); make data-check"
    with pytest.raises(DataError, match=words):
        built(numbered(3), val=[qa("q", ""), qa("", "a")], on_bad_row="quarantine")


def test_sources_are_read_in_order_and_counted_each(built, tmp_path):
    one = written(tmp_path / "one.jsonl", numbered(4))
    two = written(tmp_path / "two.jsonl", numbered(3, 10))
    data = built(None, train_path=[one, two], val=numbered(2, 50))
    origins = [data.train.origin(number) for number in (0, 3, 4, 6)]
    assert origins == [f"{one}:1", f"{one}:4", f"{two}:1", f"{two}:3"]
    sources = facts_of(data)["sources"]
    assert [(source["name"], source["rows_in"]) for source in sources] == [(one, 4), (two, 3)]
    assert_adds_up(data)


def test_a_weighted_mix_repeats_the_small_source_and_the_ledger_counts_rows_once(built, tmp_path):
    one = written(tmp_path / "one.jsonl", numbered(12))
    two = written(tmp_path / "two.jsonl", numbered(2, 20))
    data = built(None, train_path={one: 3, two: 1}, val=numbered(2, 50))
    facts = facts_of(data)
    assert len(data.train) == 16
    assert [part["samples"] for part in facts["epoch"]] == [12, 4]
    assert facts["rows_used"] == 14
    assert_adds_up(data)
    half = [{"path": one, "weight": 2}, two]
    with pytest.raises(ConfigError, match=r"two.jsonl has no weight and others have one"):
        built(None, train_path=half, val=numbered(2, 50))


def test_a_system_prompt_changes_what_is_trained(built, tokenizer):
    turns = {"system": "Own.", "user": "Why?", "assistant": "yes"}
    own = [{"messages": [{"role": role, "content": content} for role, content in turns.items()]}]
    texts = {}
    for name, settings in {
        "none": {},
        "add": {"system_prompt": "Ours."},
        "replace": {"system_prompt": "Ours.", "system_prompt_mode": "replace"},
    }.items():
        data = built(own, val=numbered(1, 50), **settings)
        texts[name] = tokenizer.decode(data.train[0].ids)
        assert ("Ours." in tokenizer.decode(data.validation[0].ids)) == (name != "none"), (
            "a row without its own gets it"
        )
    assert texts["none"] == texts["add"] and "Own." in texts["none"]
    assert "Ours." in texts["replace"] and "Own." not in texts["replace"]


# What was tokenized is found again


def folders(data: RunData) -> list[str]:
    return [source.folder for parts in data.sources.values() for source in parts]


def test_a_moved_file_finds_its_samples_and_names_its_new_place(built, tmp_path, monkeypatch):
    train = [*numbered(9), qa("q", "a<|end|>b")]
    settings = {"on_bad_row": "quarantine", "special_tokens_in_text": "allow"}
    first = built(train, **settings)
    moved = shutil.move(tmp_path / "train.jsonl", tmp_path / "moved.jsonl")
    monkeypatch.setattr(tokenize, "build_store", lambda *_: pytest.fail("tokenized again"))
    again = built(None, train_path=str(moved), **settings)
    assert folders(again) == folders(first)
    assert again.train.origin(0) == f"{moved}:{again.train.records['number'][0]}"
    assert read_bad_rows(again.sources)["train"][0].origin == f"{moved}:10"


@pytest.mark.parametrize(
    "changed",
    [
        {"max_seq_len": 256},
        {"train_on": "last"},
        {"system_prompt": "s"},
        {"too_long": "split"},
        {"row": 4},
        {"template": "{# ours #}"},
        {"code": "another"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changes_a_sample_is_tokenized_anew(
    changed, built, config_of, tokenizer, monkeypatch
):
    rows, settings = numbered(9), dict(changed)
    before = folders(built(rows))
    if settings.pop("row", None):
        rows[4] = qa(rows[4]["question"], "no")
    if settings.pop("code", None):
        monkeypatch.setattr("sft_play.data.cache._digest_code", lambda: "another")
    own = copy.deepcopy(tokenizer)
    own.chat_template = settings.pop("template", "") + own.chat_template
    after = build_run_data(config_of(rows, **settings), own)
    assert not set(folders(after)) & set(before)


def test_data_json_brings_every_rank_to_the_same_samples(config_of, tokenizer, monkeypatch):
    config = config_of(numbered(30))
    data = build_run_data(config, tokenizer)
    facts = json.loads(json.dumps(DataFacts(data.sources, PaddedTokens(3, 5, 4)).to_json()))
    monkeypatch.setattr(tokenize, "build_store", lambda *_: pytest.fail("tokenized again"))
    read = DataFacts.from_json(facts)
    assert read == DataFacts(data.sources, PaddedTokens(3, 5, 4))
    opened = assemble(config, read.sources)
    assert opened.ledger == data.ledger
    assert json.loads(json.dumps(opened.ledger.as_json())) == opened.ledger.as_json()
    assert all(
        np.array_equal(one.ids, two.ids) and np.array_equal(one.labels, two.labels)
        for one, two in zip(opened.train, data.train, strict=True)
    )
    shutil.rmtree(folders(data)[0])
    with pytest.raises(DataError, match="are gone; start the run again"):
        DataFacts.from_json(facts)


def test_several_processes_make_the_same_store_as_one(config_of, tokenizer, tmp_path, monkeypatch):
    config = config_of(
        [*numbered(2500), qa("q", "a<|end|>b")],
        on_bad_row="quarantine",
        special_tokens_in_text="allow",
    )
    (source,) = find_sources(config)["train"]
    made = {}
    for processes in (1, 3):
        monkeypatch.setattr(
            tokenize, "count_tokenizing_processes", lambda *_, count=processes: count
        )
        tokenize.build_store(source, config, tokenizer, Tally(), None, tmp_path / str(processes))
        made[processes] = {
            path.name: path.read_bytes() for path in (tmp_path / str(processes)).iterdir()
        }
    assert made[1] == made[3]
    assert len(Store(tmp_path / "3")) == 2500


def test_padding_is_counted_with_the_micro_batches_of_the_run(built):
    rows = [qa(f"{n}?", "yes " * (200 + 30 * n)) for n in range(16)]
    data = built(rows, max_seq_len=2048, val_size=0.1)
    planned = plan_for(
        "1xH200", "model.name=meta-llama/Llama-3.1-8B-Instruct", "train.effective_batch_size=16"
    )
    packed = packed_run(planned, data)
    layout = packed.plan.layout
    assert (planned.plan.layout.batch_size, layout.batch_size, layout.micro_batches) == (4, 8, 1)
    _, _, padded = counted_run(planned, data)
    samplers = [StepSampler(data.train.lengths, one, 0) for one in (planned.plan.layout, layout)]
    computed = [sum(math.prod(one.shape(batch)) for batch in one) for one in samplers]
    assert [padded.unpacked, padded.packed] == computed
    assert padded.real == data.train.lengths.sum()


def test_the_last_step_of_an_epoch_does_not_make_a_usual_one_smaller(built):
    data = built(numbered(12), val=numbered(2, begin=20))
    tokens = sum(data.train.lengths)
    for rows, share in ((8, 8 / 12), (32, 1)):
        planned = plan_for(
            "1xH200",
            "model.name=meta-llama/Llama-3.1-8B-Instruct",
            f"train.effective_batch_size={rows}",
        )
        step_tokens = packed_run(planned, data).plan.request.step_tokens
        assert step_tokens == pytest.approx(share * tokens)
