"""Inputs that nobody means: each ends with one message that names the value."""

import json
import os
from pathlib import Path

import pytest
from plan_examples import load_shape

from sft_play.config import loader
from sft_play.data.messages import MAX_WEIGHT, parse_weight
from sft_play.data.rows import InvalidRowError
from sft_play.data.tables import read_sheet
from sft_play.data.templates import render_template
from sft_play.errors import ConfigError, DataError, EnvironmentFault
from sft_play.runs import lock, metrics

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


@pytest.mark.parametrize("source", ["environment", "--set"])
def test_a_setting_that_is_nested_too_deeply_is_refused(source: str) -> None:
    value = "[" * 3000
    environ = {"DATA_TRAIN_PATH": value} if source == "environment" else {}
    words = [f"data.train_path={value}"] if source == "--set" else []
    with pytest.raises(ConfigError, match=r"data\.train_path"):
        loader.load_merged("base", environ, words)


@pytest.mark.parametrize("weight", [10**400, 1e308, -1, float("nan"), MAX_WEIGHT + 1, "2"])
def test_a_weight_has_a_range(weight: object) -> None:
    with pytest.raises(InvalidRowError, match="weight is"):
        parse_weight(weight, "weight")
    assert parse_weight(MAX_WEIGHT, "weight") == MAX_WEIGHT


@pytest.mark.parametrize("jinja", ["{{ (10**1000000)|string }}", "{{ 2 ** messages }}"])
def test_a_power_in_a_template_is_refused_before_it_is_compiled(jinja: str) -> None:
    with pytest.raises(DataError, match=r"\*\*"):
        render_template(jinja, [], {})


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_of_zero_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: 0}))
    with pytest.raises(EnvironmentFault, match=f"{key}=0"):
        load_shape(str(tmp_path), None, {})


def test_a_config_that_is_a_link_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(EnvironmentFault, match="is a link to config"):
        load_shape(str(tmp_path), None, {})


def test_odd_metrics_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert metrics.read_metrics(tmp_path / "pipe").lines == []  # and does not wait
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 200_000 + '\n{"step": 1, "steps": 2}\n')
    assert [line.step for line in metrics.read_metrics(path).lines] == [1]


@pytest.mark.parametrize("shown", ["0000", '0 "EUR"', "0%", "#,##0"])
def test_a_number_that_a_sheet_shows_otherwise_is_no_text(tmp_path: Path, shown: str) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["question", "answer", "plain"])
    book.active.append(["a?", 7, 7])
    book.active["B2"].number_format = shown
    book.save(tmp_path / "rows.xlsx")
    (row,) = read_sheet(tmp_path / "rows.xlsx")
    assert row.record == {"question": "a?", "answer": 7, "plain": "7"}, "a number is refused later"


def test_two_commands_do_not_write_to_one_run(tmp_path: Path) -> None:
    with (
        lock.keeping_lock(tmp_path),
        pytest.raises(EnvironmentFault, match="another command"),
        lock.keeping_lock(tmp_path),
    ):
        pytest.fail("both have it")
    with lock.keeping_lock(tmp_path):
        assert (tmp_path / lock.NAME).is_file()


def test_a_pipe_in_the_place_of_a_lock_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lock.NAME)
    with pytest.raises(FileExistsError, match="Not a regular file"), lock.keeping_lock(tmp_path):
        pytest.fail("it was used")
