"""sft_play.data: splits, and the ledger of what was dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
from families import tokenizer

from sft_play.config.schema import Config
from sft_play.data.check import check_lines, check_rows
from sft_play.data.prepare import MOST_HELD_OUT, hold_out, prepare
from sft_play.data.rows import Message, Row
from sft_play.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def row(*contents: str, system: str | None = None) -> Row:
    """A conversation that the user begins."""
    turns = [Message(("user", "assistant")[number % 2], content) for number, content in enumerate(contents)]
    return Row(tuple(([Message("system", system)] if system else []) + turns), "rows.jsonl:7")


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Splits and the ledger


def rows_of(count: int) -> list[Row]:
    return [row(f"q{n}", f"a{n}") for n in range(count)]


def test_a_held_out_split_is_disjoint_whole_and_the_same_every_time() -> None:
    rows = rows_of(40)
    train, held = hold_out(rows, 0.1, 42, "f")
    assert (train, held) == hold_out(list(rows), 0.1, 42, "f")
    assert len(held) == 4
    order = {id(item): number for number, item in enumerate(rows)}
    for part in (train, held):
        assert [order[id(item)] for item in part] == sorted(order[id(item)] for item in part)
    assert sorted(order[id(item)] for item in train + held) == list(range(40))
    assert hold_out(rows, 0.1, 43, "f")[1] != held


@pytest.mark.parametrize(("rows", "fraction", "held"), [(2, 0.05, 1), (2, 0.49, 1), (3, 0.49, 1), (100, 0.05, 5), (20_000, 0.05, MOST_HELD_OUT)])
def test_at_least_one_and_at_most_500_rows_are_held_out(rows: int, fraction: float, held: int) -> None:
    assert [len(part) for part in hold_out(rows_of(rows), fraction, 1, "f")] == [rows - held, held]


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"f.jsonl: one row cannot be split into training and validation; set DATA_VAL_PATH"):
        hold_out(rows_of(1), 0.1, 1, "f.jsonl")


def settings(tmp_path: Path, train: int = 20, **data: Any) -> Config:
    """A config whose training rows have answers of 1 to `train` words."""
    path = write(tmp_path / "train.jsonl", *[{"question": "q", "answer": "a " * n + "b"} for n in range(train)])
    max_seq_len = data.pop("max_seq_len", 2048)
    return Config.model_validate({"model": {"max_seq_len": max_seq_len}, "data": {"train_path": str(path), **data}})


def test_every_row_is_used_or_its_loss_is_named(tmp_path: Path) -> None:
    tok = tokenizer(CHATML)
    full = prepare(settings(tmp_path), tok)
    lengths = sorted(len(item.ids) for part in (full.train, full.validation) for item in part.rendered)
    cut = prepare(settings(tmp_path, max_seq_len=lengths[10], max_lost=0.99), tok)
    for name, split in (("train", cut.train), ("validation", cut.validation)):
        ledger = cut.ledger[name]
        assert ledger.rows_in == ledger.rows_used + sum(ledger.dropped.values()) == full.ledger[name].rows_in
        assert ledger.rows_used == len(split.rows) == len(split.rendered)
        assert ledger.tokens == sum(len(item.ids) for item in split.rendered)
        assert ledger.trained_tokens == sum(item.trained_tokens for item in split.rendered)
        assert ledger.lost_trained_tokens + ledger.trained_tokens == full.ledger[name].trained_tokens
    assert sum(ledger.dropped["too_long"] for ledger in cut.ledger.values()) == sum(length > lengths[10] for length in lengths)
    assert max(len(item.ids) for item in cut.train.rendered) <= lengths[10]


def test_a_row_of_exactly_the_limit_is_used(tmp_path: Path) -> None:
    tok = tokenizer(CHATML)
    full = prepare(settings(tmp_path), tok)
    longest = max(len(item.ids) for part in (full.train, full.validation) for item in part.rendered)
    assert prepare(settings(tmp_path, max_seq_len=longest, too_long="error"), tok).ledger == full.ledger


def test_too_much_lost_stops_the_run_and_says_which_length_would_do(tmp_path: Path) -> None:
    tok = tokenizer(CHATML)
    longest = max(len(item.ids) for item in prepare(settings(tmp_path), tok).train.rendered)
    with pytest.raises(DataError) as error:
        prepare(settings(tmp_path, max_seq_len=longest - 4), tok)
    *named, last = str(error.value).splitlines()
    assert all(line.startswith(f"{tmp_path / 'train.jsonl'}:") and line.endswith(f"tokens, model.max_seq_len is {longest - 4}") for line in named)
    assert last.endswith(f"of the trained tokens; data.max_lost=0.05; set MODEL_MAX_SEQ_LEN={longest}, or raise DATA_MAX_LOST to go on without them")
    assert prepare(settings(tmp_path, max_seq_len=longest, too_long="error"), tok)


def test_too_long_is_an_error_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.too_long=error; set MODEL_MAX_SEQ_LEN=[0-9]+, or DATA_TOO_LONG=drop"):
        prepare(settings(tmp_path, max_seq_len=25, too_long="error", max_lost=0.9), tokenizer(CHATML))


def test_nothing_may_be_lost_and_nothing_is(tmp_path: Path) -> None:
    assert prepare(settings(tmp_path, max_lost=0), tokenizer(CHATML)).ledger["train"].lost_fraction == 0


def test_rows_without_anything_to_train_are_counted_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if 'b' not in m['content'] %}{{ m['content'] }}{% endif %}{% endfor %}"
    rows = [{"question": "q", "answer": "b"}] * 3
    config = settings(tmp_path, val_path=str(write(tmp_path / "val.jsonl", *rows)))
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"train_path": str(write(tmp_path / "t.jsonl", {"question": "q", "answer": "x"}))})}
    )
    with pytest.raises(DataError, match=r"val.jsonl: the chat template leaves nothing to train on in any of 3 rows"):
        prepare(config, tokenizer(template))


def test_rows_that_cannot_be_proven_stop_the_run_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"question": "q", "answer": "a<eos>b"}] * 9, {"question": "q", "answer": "a"})
    config = Config.model_validate({"data": {"train_path": str(path), "val_path": str(path)}})
    with pytest.raises(DataError) as error:
        prepare(config, tokenizer(CHATML))
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"{path}:1: messages[1] holds <eos>")
    assert lines[-1] == "9 rows cannot be rendered so that their answers are known"


def test_given_files_are_used_as_they_are_and_test_defaults_to_validation(tmp_path: Path) -> None:
    tok = tokenizer(CHATML)
    val = write(tmp_path / "val.jsonl", {"question": "v", "answer": "v"})
    test = write(tmp_path / "test.jsonl", {"question": "t", "answer": "t"}, {"question": "t", "answer": "t"})
    two = prepare(settings(tmp_path, val_path=str(val)), tok)
    assert (len(two.train), len(two.validation), two.test is two.validation) == (20, 1, True)
    assert [path.name for path in two.files] == ["train.jsonl", "val.jsonl"]
    three = prepare(settings(tmp_path, val_path=str(val), test_path=str(test)), tok)
    assert (len(three.test), sorted(three.ledger)) == (2, ["test", "train", "validation"])


def test_the_seed_of_the_split_is_data_seed_else_seed(tmp_path: Path) -> None:
    tok, base = tokenizer(CHATML), settings(tmp_path)

    def held(**train: Any) -> list[Row]:
        return prepare(base.model_copy(update={"train": base.train.model_copy(update=train)}), tok).validation.rows

    assert held(seed=1) == held(seed=1, data_seed=1) == held(seed=9, data_seed=1)
    assert len({held(seed=seed)[0].origin for seed in range(8)}) > 1


def test_the_ledger_is_plain_data_and_a_line_a_split(tmp_path: Path) -> None:
    ledger = check_rows(settings(tmp_path), tokenizer(CHATML))
    assert json.loads(json.dumps(ledger)) == ledger
    assert {"rows_in", "rows_used", "dropped", "tokens", "trained_tokens", "lost_fraction"} <= ledger.keys()
    assert (ledger["rows_in"], ledger["rows_used"], ledger["splits"]["validation"]["rows_used"]) == (19, 19, 1)
    assert check_lines(ledger)[0].startswith("train       rows_in=19 rows_used=19")
