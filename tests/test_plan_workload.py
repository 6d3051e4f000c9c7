"""How much a run trains: counted if its rows were prepared, else estimated from some of them."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from plan_examples import plan_for

from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.schema import Config
from sft_play.data import row_facts
from sft_play.data.pipeline import prepare_run_data
from sft_play.data.row_facts import count_rows_or_reason
from sft_play.plan.recipe import RowFacts
from sft_play.plan.speed import LABELLED
from sft_play.plan.workload import Counted, Workload, epoch_rows, workload

DESK = Counted(samples=1200, tokens=65_000)
LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(PROJECT_ROOT)  # the folder of the runs is relative to it


def work_of(*settings: str, gpus: str = "2xH200", counted: Counted = DESK) -> Workload:
    """Return what a config trains of counted rows."""
    planned = plan_for(gpus, *settings)
    return workload(planned.config, planned.plan, counted)


def config_of(*settings: str) -> Config:
    return plan_for("2xH200", *settings).config


# Steps and hours


@pytest.mark.parametrize(
    "settings, steps, epochs",
    [
        ((), 38, 1),
        (("train.epochs=4",), 152, 4),
        (("train.epochs=0.5",), 19, 0.5),
        (("train.max_steps=57",), 57, 1.5),
        (("train.epochs=0.01",), 1, 1 / 38),
    ],
)
def test_steps_follow_from_rows_epochs_and_the_effective_batch(settings, steps, epochs):
    found = work_of(*settings)  # 1200 rows / 32 = 37.5 steps
    assert (found.steps, found.epochs) == (steps, pytest.approx(epochs))


def test_steps_count_rows_and_the_cost_of_their_samples_is_told():
    plain = work_of()
    found = work_of(counted=Counted(4800, 100_000, samples_per_row=4, distinct=0.5))
    assert (found.steps, found.rows) == (plain.steps, plain.rows)
    assert "1,200 rows are 4,800 samples" in found.conversations
    assert "50,000 are different" in found.conversations


def test_a_warm_up_that_is_longer_than_the_run_is_told():
    long = ("train.warmup_steps=50", "train.epochs=1")
    assert work_of(*long, "train.lr_scheduler_type=linear").warning == (
        "train.warmup_steps=50 of 38 steps: the run ends at 76 % of its learning rate; lower "
        "TRAIN_WARMUP_STEPS: TRAIN_WARMUP_STEPS=0.1 is a tenth of the run"
    )
    assert work_of(*long, "train.lr_scheduler_type=constant").warning is None
    assert work_of("train.warmup_steps=38", "train.epochs=1").warning is None
    assert work_of("train.warmup_steps=0.5", "train.epochs=0.01").warning is None


def test_a_decay_that_is_longer_than_the_run_is_reported():
    stable = ("train.lr_scheduler_type=warmup_stable_decay", "train.epochs=1")
    assert work_of(*stable).warning is None
    warning = work_of(*stable, "train.lr_scheduler_kwargs={num_decay_steps: 50}").warning
    assert "num_decay_steps=50 are more than the run's 38 steps" in warning


def test_hours_are_steps_of_these_rows():
    found = work_of("train.epochs=2")
    assert found.gpu_hours == pytest.approx(2 * found.seconds / 3600)
    tokens = found.seconds * found.tokens_per_second
    # the last step of an epoch holds fewer rows
    assert tokens == pytest.approx(2 * DESK.tokens, rel=0.02)
    assert json.loads(json.dumps(asdict(found)))["is_estimated"] is False


def test_hours_are_not_known_where_the_speed_is_not():
    found = work_of(gpus="1x24GiB")
    assert found.steps == 38
    assert (found.seconds, found.gpu_hours, found.tokens_per_second) == (None, None, None)


def test_short_rows_take_less_time_packed():
    packed = work_of(LLAMA_8B, "train.packing=true", gpus="1xH200")
    padded = work_of(LLAMA_8B, "train.packing=false", gpus="1xH200")
    assert packed.seconds < 0.5 * padded.seconds


def test_rows_that_are_all_full_train_at_the_speed_of_full_rows():
    planned = plan_for("1xH200", LLAMA_8B, "train.packing=false")
    counted = Counted(samples=3200, tokens=3200 * planned.plan.layout.max_seq_len)
    found = workload(planned.config, planned.plan, counted)
    assert found.tokens_per_second == pytest.approx(planned.plan.speed.tokens_per_second)


# Estimates


def test_estimates_by_hand():
    assert epoch_rows([(100, None), (10, None)]) == [100, 10]
    # the second is repeated until one in four is of it
    assert sum(epoch_rows([(100, 3.0), (10, 1.0)])) == pytest.approx(133, abs=1)
    facts = RowFacts(900, (10, 50, 90))
    assert Counted.estimate(facts, 90) == Counted(900, 45_000, LABELLED, is_estimated=True)
    assert Counted.estimate(facts, 60).tokens == 36_000


def rows(count: int, characters: int) -> list[str]:
    """Return rows of so many characters as JSON."""
    row = {"question": "why?", "answer": ""}
    answer = "a" * (characters - len(json.dumps(row)))
    return [json.dumps({**row, "answer": answer})] * count


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv"])
def test_rows_of_a_file_are_counted_and_their_tokens_guessed(name, tmp_path):
    texts = rows(1000, 400)
    text = "\n".join(texts)
    if name.endswith("json"):
        text = f"[{','.join(texts)}]"
    elif name.endswith("csv"):
        lines = [f"why?,{json.loads(row)['answer']}\n" for row in texts]
        text = "question,answer\n" + "".join(lines)
    data = text.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    paths = (f"data.train_path={path}", f"data.val_path={path}")
    found = count_rows_or_reason(config_of(*paths, f"train.output_dir={tmp_path}"))
    assert isinstance(found, Counted)
    assert found.is_estimated and found.by_characters
    assert found.samples == 1000
    assert found.tokens == pytest.approx(100_000, rel=0.1)


def test_a_large_file_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(row_facts, "READ_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows(10_000, 400)))
    config = config_of(f"data.train_path={path}", f"train.output_dir={tmp_path}")
    found = count_rows_or_reason(config)
    held_out = min(10_000 * config.data.val_size, 500)
    assert isinstance(found, Counted)
    assert found.samples == pytest.approx(10_000 - held_out, rel=0.02)


@pytest.mark.parametrize(
    "text, reason",
    [("", "rows.jsonl: no rows"), ("[1, 2", r"rows.jsonl:1: the file begins with a JSON list")],
)
def test_what_cannot_be_counted_says_why(text, reason, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    config = config_of(f"data.train_path={path}", f"train.output_dir={tmp_path}")
    found = count_rows_or_reason(config)
    assert isinstance(found, str)
    assert reason in found


def test_rows_of_the_hub_are_not_asked_for(tmp_path):
    config = config_of("data.train_path=org/rows", f"train.output_dir={tmp_path}")
    reason = "org/rows is not on this machine yet; make data-check fetches it"
    assert count_rows_or_reason(config) == reason


def test_rows_that_were_prepared_are_counted_until_they_change(tmp_path):
    def is_estimated(config):
        found = count_rows_or_reason(config)
        assert isinstance(found, Counted)
        return found.is_estimated

    path = tmp_path / "rows.jsonl"
    records = [
        json.dumps({"question": f"what is {number}?", "answer": "a number"})
        for number in range(200)
    ]
    path.write_text("\n".join(records))
    settings = (f"data.train_path={path}", f"train.output_dir={tmp_path}")
    config = config_of(*settings)
    assert is_estimated(config)
    train = prepare_run_data(config).train
    tokens = train.lengths.sum()
    labelled = pytest.approx(train.records["trained"].sum() / tokens)
    assert count_rows_or_reason(config) == Counted(len(train), int(tokens), labelled)
    assert is_estimated(config_of(*settings, "model.max_seq_len=512"))
    written = path.stat()
    path.write_text("\n".join(records).replace("a number", "a letter"))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert path.stat().st_size == written.st_size and is_estimated(config)


def test_counting_loads_no_heavy_library():
    code = """
import sys
from sft_play.commands import call as calls
from sft_play.data.row_facts import count_rows_or_reason
call = calls.read_call(None, (), "2xH200")
planned = calls.plan_run(call, calls.load_config(call), True, False)
counted = count_rows_or_reason(planned.config)
assert counted.samples == 1200, counted
heavy = {"torch", "transformers", "numpy", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
