"""From files to splits: every row is used or named, none is on both sides, the cache is used."""

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
from sft_play.data.ledger import PaddedTokens, Tally
from sft_play.data.order import StepSampler
from sft_play.data.pipeline import build_run_data, count_padding, packed_run
from sft_play.data.sources import find_sources
from sft_play.data.store import Store
from sft_play.data.tokenized import read_bad_rows
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


def test_a_set_with_every_defect_is_accounted_for_by_reason(config_of, tokenizer):
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
    data = build_run_data(
        config_of(
            train,
            val=[*numbered(5, 100), qa("Evaluated, too?")],
            on_bad_row="quarantine",
            special_tokens_in_text="allow",
            on_overlap="drop",
            max_lost=0.9,
        ),
        tokenizer,
    )
    facts = data.ledger.splits_as_json()["train"]
    assert facts["rows_in"] == len(train)
    assert facts["dropped"] == {"bad_row": 7, "unproven": 1, "too_long": 1, "evaluated_on": 2}
    assert facts["rows_used"] == 42
    assert facts["duplicates"] == {"exact": 1, "normalised": 2, "questions": 2}
    assert facts["overlap"] == {"validation": {"exact": 1, "normalised": 2, "questions": 2}}
    assert facts["lost_trained_tokens"] > 0 and facts["lost_fraction"] == pytest.approx(
        facts["lost_trained_tokens"]
        / (
            facts["lost_trained_tokens"]
            + data.ledger.splits_as_json()["train"]["sources"][0]["trained_tokens"]
        ),
        abs=1e-6,
    )
    assert_adds_up(data)
    aside = read_bad_rows(data.sources)
    assert [row.origin.rpartition(":")[2] for row in aside["train"]] == [
        str(line) for line in range(41, 49)
    ]
    assert all(row.reason and row.raw for row in aside["train"]) and "validation" not in aside


def test_one_bad_row_stops_the_run_unless_it_is_quarantined(config_of, tokenizer):
    train = [*numbered(20), qa("q", "a<|end|>b")]
    allow = {"special_tokens_in_text": "allow"}
    with pytest.raises(
        DataError, match=r"(?s)train.jsonl:21: .*DATA_ON_BAD_ROW=quarantine"
    ) as error:
        build_run_data(config_of(train, **allow), tokenizer)
    assert error.value.exit_class == 11
    assert not [
        path
        for path in Path(config_of(train).data.cache_dir).iterdir()
        if not path.name.endswith(".lock")
    ], "nothing half-written"
    assert (
        build_run_data(config_of(train, on_bad_row="quarantine", **allow), tokenizer)
        .ledger.splits["train"]
        .tally.dropped["unproven"]
        == 1
    )


@pytest.mark.parametrize(
    ("policy", "dropped", "samples"),
    [("drop", {"too_long": 1}, 20), ("truncate_left", {}, 21), ("split", {}, 22)],
)
def test_long_rows_become_what_the_policy_says_and_no_token_is_lost_unseen(
    config_of, tokenizer, policy, dropped, samples
):
    train = [*numbered(20), qa("Long?", "word " * 70)]
    full = build_run_data(config_of(train, val=numbered(3, 50)), tokenizer)
    limit = max(full.train.lengths) * 3 // 5
    cut = build_run_data(
        config_of(
            train, val=numbered(3, 50), max_seq_len=int(limit), too_long=policy, max_lost=0.9
        ),
        tokenizer,
    )
    facts = cut.ledger.splits_as_json()["train"]
    assert (facts["dropped"], facts["samples"]) == (dropped, samples)
    assert (
        facts["trained_tokens"] + facts["lost_trained_tokens"]
        == full.ledger.splits_as_json()["train"]["trained_tokens"]
    )
    assert facts["shortened"] == (
        {} if policy == "drop" else {{"truncate_left": "truncated"}.get(policy, policy): 1}
    )
    assert cut.train.lengths.max() <= limit
    assert_adds_up(cut)


def test_too_much_lost_stops_the_run_and_says_which_length_would_do(config_of, tokenizer):
    train = [*numbered(20), qa("Long?", "word " * 70), qa("Longer?", "word " * 80)]
    longest = int(
        build_run_data(config_of(train, val=numbered(3, 50)), tokenizer).train.lengths.max()
    )
    config = config_of(train, val=numbered(3, 50), max_seq_len=64)
    with pytest.raises(DataError) as error:
        build_run_data(config, tokenizer)
    first, second, last = str(error.value).splitlines()
    assert first == f"{config.data.train_path}:22: {longest} tokens, model.max_seq_len is 64"
    assert second.startswith(f"{config.data.train_path}:21: ")
    assert (
        last.startswith("2 of 22 rows are too long, and ")
        and f"set MODEL_MAX_SEQ_LEN={longest}, DATA_TOO_LONG=split, or raise DATA_MAX_LOST" in last
    )


def test_training_rows_that_are_evaluated_on_stop_the_run_by_name(config_of, tokenizer):
    train, val = numbered(10), [*numbered(4, 50), qa("is 3 MORE than 2", numbered(4)[3]["answer"])]
    config = config_of(train, val=val)
    with pytest.raises(DataError) as error:
        build_run_data(config, tokenizer)
    first, last = str(error.value).splitlines()
    assert first == f"{config.data.train_path}:4 is {config.data.val_path}:5 of the validation rows"
    assert (
        "1 training rows are validation rows, too (0 to the letter)" in last
        and "DATA_ON_OVERLAP=drop" in last
    )
    allowed = build_run_data(config_of(train, val=val, on_overlap="allow"), tokenizer)
    assert (
        len(allowed.train),
        allowed.ledger.splits_as_json()["train"]["overlap"]["validation"]["normalised"],
    ) == (
        10,
        1,
    )
    tested = config_of(train, val=numbered(4, 50), test=val[-1:])
    with pytest.raises(DataError, match=r"test.jsonl:1 of the test rows"):
        build_run_data(tested, tokenizer)


def test_the_seed_of_the_split_is_data_seed_else_seed(config_of, tokenizer):
    def held(**train: int) -> list[int]:
        return (
            build_run_data(config_of(numbered(40), train_settings=train), tokenizer)
            .validation.records["number"]
            .tolist()
        )

    assert held(seed=1) == held(seed=1, data_seed=1) == held(seed=9, data_seed=1)
    assert len({tuple(held(seed=seed)) for seed in range(8)}) > 1


def test_a_split_without_a_row_left_says_where_they_went(config_of, tokenizer):
    with pytest.raises(
        DataError, match=r"val.jsonl: no validation row is left \(bad_row 2\); make data-check"
    ):
        build_run_data(
            config_of(numbered(3), val=[qa("q", ""), qa("", "a")], on_bad_row="quarantine"),
            tokenizer,
        )


def test_sources_are_read_in_order_and_counted_each(config_of, tokenizer, tmp_path):
    one, two = (
        written(tmp_path / "one.jsonl", numbered(4)),
        written(tmp_path / "two.jsonl", numbered(3, 10)),
    )
    data = build_run_data(config_of(None, train_path=[one, two], val=numbered(2, 50)), tokenizer)
    assert [data.train.origin(i) for i in (0, 3, 4, 6)] == [
        f"{one}:1",
        f"{one}:4",
        f"{two}:1",
        f"{two}:3",
    ]
    assert [
        (source["name"], source["rows_in"])
        for source in data.ledger.splits_as_json()["train"]["sources"]
    ] == [
        (one, 4),
        (two, 3),
    ]
    assert_adds_up(data)


def test_a_weighted_mix_repeats_the_small_source_and_the_ledger_counts_rows_once(
    config_of, tokenizer, tmp_path
):
    one, two = (
        written(tmp_path / "one.jsonl", numbered(12)),
        written(tmp_path / "two.jsonl", numbered(2, 20)),
    )
    data = build_run_data(
        config_of(None, train_path={one: 3, two: 1}, val=numbered(2, 50)), tokenizer
    )
    assert len(data.train) == 16 and [
        part["samples"] for part in data.ledger.splits_as_json()["train"]["epoch"]
    ] == [12, 4]
    assert data.ledger.splits_as_json()["train"]["rows_used"] == 14
    assert_adds_up(data)
    half = [{"path": one, "weight": 2}, two]
    with pytest.raises(ConfigError, match=r"two.jsonl has no weight and others have one"):
        build_run_data(config_of(None, train_path=half, val=numbered(2, 50)), tokenizer)


def test_a_system_prompt_changes_what_is_trained(config_of, tokenizer):
    turns = {"system": "Own.", "user": "Why?", "assistant": "yes"}
    own = [{"messages": [{"role": role, "content": content} for role, content in turns.items()]}]
    texts = {}
    for name, settings in {
        "none": {},
        "add": {"system_prompt": "Ours."},
        "replace": {"system_prompt": "Ours.", "system_prompt_mode": "replace"},
    }.items():
        data = build_run_data(config_of(own, val=numbered(1, 50), **settings), tokenizer)
        texts[name] = tokenizer.decode(data.train[0].ids)
        assert ("Ours." in tokenizer.decode(data.validation[0].ids)) == (name != "none"), (
            "a row without its own gets it"
        )
    assert texts["none"] == texts["add"] and "Own." in texts["none"]
    assert "Ours." in texts["replace"] and "Own." not in texts["replace"]


def test_train_on_last_leaves_earlier_answers_as_context(config_of, tokenizer):
    turns = [
        {"role": role, "content": text}
        for role, text in (
            ("user", "a?"),
            ("assistant", "one"),
            ("user", "b?"),
            ("assistant", "two"),
        )
    ]
    both, last = (
        build_run_data(
            config_of([{"messages": turns}], val=numbered(1, 50), train_on=which), tokenizer
        ).train[0]
        for which in ("all", "last")
    )
    assert tokenizer.decode(both.labels[both.labels >= 0]) == "one<|end|>two<|end|>"
    assert tokenizer.decode(last.labels[last.labels >= 0]) == "two<|end|>"
    assert last.answer_start == both.answer_start == np.flatnonzero(last.labels >= 0)[0]


# What was tokenised is found again


def folders(data: RunData) -> list[str]:
    return [source.folder for parts in data.sources.values() for source in parts]


def test_a_moved_file_finds_its_samples_and_names_its_new_place(
    config_of, tokenizer, tmp_path, monkeypatch
):
    config = config_of(
        [*numbered(9), qa("q", "a<|end|>b")],
        on_bad_row="quarantine",
        special_tokens_in_text="allow",
    )
    first = build_run_data(config, tokenizer)
    moved = shutil.move(config.data.train_path, tmp_path / "moved.jsonl")
    monkeypatch.setattr(tokenize, "build_store", lambda *_: pytest.fail("tokenised again"))
    again = build_run_data(
        config.model_copy(
            update={"data": config.data.model_copy(update={"train_path": str(moved)})}
        ),
        tokenizer,
    )
    assert folders(again) == folders(first)
    assert again.train.origin(0) == f"{moved}:{again.train.records['number'][0]}"
    assert read_bad_rows(again.sources)["train"][0].origin == f"{moved}:10"


@pytest.mark.parametrize(
    "change", ["row", "template", "max_seq_len", "train_on", "system_prompt", "too_long", "code"]
)
def test_whatever_changes_a_sample_is_tokenised_anew(config_of, tokenizer, monkeypatch, change):
    import copy

    before = build_run_data(config_of(numbered(9)), tokenizer)
    tokenizer, rows, settings = copy.deepcopy(tokenizer), numbered(9), {}
    if change == "row":
        rows[4] = qa(rows[4]["question"], "no")
    elif change == "template":
        tokenizer.chat_template = "{# ours #}" + tokenizer.chat_template
    elif change == "code":
        monkeypatch.setattr("sft_play.data.cache._digest_code", lambda: "another")
    else:
        settings = {
            change: {
                "max_seq_len": 256,
                "train_on": "last",
                "system_prompt": "s",
                "too_long": "split",
            }[change]
        }
    assert not set(folders(build_run_data(config_of(rows, **settings), tokenizer))) & set(
        folders(before)
    )


def test_data_json_brings_every_rank_to_the_same_samples(config_of, tokenizer, monkeypatch):
    config = config_of(numbered(30))
    data = build_run_data(config, tokenizer)
    facts = json.loads(json.dumps(DataFacts(data.sources, PaddedTokens(3, 5, 4)).to_json()))
    monkeypatch.setattr(tokenize, "build_store", lambda *_: pytest.fail("tokenised again"))
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
    with pytest.raises(DataError, match="are gone; start the run anew"):
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
        monkeypatch.setattr(tokenize, "count_processes", lambda *_, count=processes: count)
        tokenize.build_store(source, config, tokenizer, Tally(), None, tmp_path / str(processes))
        made[processes] = {
            path.name: path.read_bytes() for path in (tmp_path / str(processes)).iterdir()
        }
    assert made[1] == made[3]
    assert len(Store(tmp_path / "3")) == 2500


def test_padding_is_counted_with_the_micro_batches_of_the_run(config_of, tokenizer):
    rows = [qa(f"{n}?", "yes " * (200 + 30 * n)) for n in range(16)]
    data = build_run_data(config_of(rows, max_seq_len=2048, val_size=0.1), tokenizer)
    planned = plan_for(
        "1xH200", "model.name=meta-llama/Llama-3.1-8B-Instruct", "train.effective_batch_size=16"
    )
    packed = packed_run(planned, data)
    layout = packed.plan.layout
    assert (planned.plan.layout.batch_size, layout.batch_size, layout.micro_batches) == (4, 8, 1)
    padded = count_padding(planned, packed, data)
    samplers = [StepSampler(data.train.lengths, one, 0) for one in (planned.plan.layout, layout)]
    computed = [sum(math.prod(one.shape(batch)) for batch in one) for one in samplers]
    assert [padded.unpacked, padded.packed] == computed


def test_the_last_step_of_an_epoch_does_not_make_a_usual_one_smaller(config_of, tokenizer):
    data = build_run_data(config_of(numbered(12), val=numbered(2, begin=20)), tokenizer)
    tokens = sum(data.train.lengths)
    for rows, share in ((8, 8 / 12), (32, 1)):
        planned = plan_for(
            "1xH200",
            "model.name=meta-llama/Llama-3.1-8B-Instruct",
            f"train.effective_batch_size={rows}",
        )
        step_tokens = packed_run(planned, data).plan.request.step_tokens
        assert step_tokens == pytest.approx(share * tokens)
