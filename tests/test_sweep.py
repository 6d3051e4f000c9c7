"""`make sweep`: the grid, what is done already, and which run is the best."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import NO_CONFIG

from sft_play.commands import sweep
from sft_play.commands.call import Call
from sft_play.commands.sweep import grid
from sft_play.config.invocation import Invocation
from sft_play.config.messages import word
from sft_play.config.schema import SourceSection
from sft_play.data.sources import digest_source, find_source
from sft_play.errors import ConfigError
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport
from sft_play.runs.resumed import AskedRun

OVER = "train.learning_rate=1e-4,2e-4 tuning.lora.r=8,16"


def test_a_grid_has_every_combination_once():
    assert [" ".join(words) for words in grid(OVER)] == [
        "train.learning_rate=1e-4 tuning.lora.r=8",
        "train.learning_rate=1e-4 tuning.lora.r=16",
        "train.learning_rate=2e-4 tuning.lora.r=8",
        "train.learning_rate=2e-4 tuning.lora.r=16",
    ]
    assert len(grid("tuning.lora.target_modules=[q_proj,v_proj],all-linear")) == 2
    assert len(grid("train.seed=1,1")) == 1


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("", "write make sweep OVER="),
        ("train.seed", "train.seed names no values"),
        ("train.seed=1 train.seed=2", "train.seed appears twice"),
        ("train.run_name=a,b", "train.run_name cannot be swept"),
        (" ".join(f"s{n}={','.join(map(str, range(60)))}" for n in range(6)), "46656000000"),
    ],
)
def test_words_that_are_no_grid_are_refused(over: str, message: str):
    with pytest.raises(ConfigError, match=message):
        grid(over)


def call(tmp_path: Path) -> Call:
    return Call(Invocation(device="cpu"), {"TRAIN_OUTPUT_DIR": str(tmp_path)}, ())


def write_report(folder: RunFolder, **facts) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_report(RunReport(run=folder.name, **facts))


def write_run(folder: RunFolder, step: int, loss: float) -> None:
    """Write what a finished run with scores leaves."""
    metrics = {"after": {"eval_loss": loss, "rougeL": 0.5}}
    write_report(folder, status="done", metrics=metrics, global_step=step, seconds={"total": 90.0})
    AskedRun("make train", {}).write(folder)


def test_a_name_follows_from_the_settings_and_a_finished_run_is_not_trained_again(tmp_path):
    first, second, *_ = sweep.plan_trials(call(tmp_path), OVER)
    assert first.folder != second.folder
    write_report(first.folder, status="done")
    assert sweep.plan_trials(call(tmp_path), OVER)[0].is_done


def test_a_finished_run_whose_rows_were_changed_does_not_count_as_done(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a?", "answer": "a"}\n')
    environ = {**call(tmp_path).environ, "DATA_TRAIN_PATH": str(rows), "CONFIG": str(NO_CONFIG)}
    asked = Call(Invocation(device="cpu", config=str(NO_CONFIG)), environ, ())
    done = sweep.plan_trials(asked, OVER)[:2]
    source = find_source(SourceSection(path=str(rows)), "data.train_path")
    digest = digest_source(source)
    recorded = {"name": str(rows), "weight": None, "digest": digest}
    for trial in done:
        write_report(trial.folder, status="done")
        trial.folder.write_data({"sources": {"train": [recorded]}})
    sweep.refuse_other_rows(asked, done)
    rows.write_text('{"question": "b?", "answer": "a"}\n')
    with pytest.raises(ConfigError) as caught:
        sweep.refuse_other_rows(asked, done)
    assert str(caught.value) == (
        f"run {done[0].folder.path} of this sweep is finished, with other rows than these:\n"
        f"data.train_path={word(str(rows))} (environment DATA_TRAIN_PATH): {rows} has other bytes "
        "than the files that it was trained with\n"
        "write another RUN for a new sweep, or use the rows that it was trained on"
    )


def test_every_combination_is_checked_before_the_first_run(tmp_path):
    with pytest.raises(ConfigError, match=r"tuning\.lora\.r=none"):
        sweep.plan_trials(call(tmp_path), "train.learning_rate=1e-4 tuning.lora.r=8,none")
    one = call(tmp_path)
    stopped = Call(one.invocation, {**one.environ, "TRAIN_STOP_AFTER": "5"}, ())
    with pytest.raises(ConfigError, match="Leave TRAIN_STOP_AFTER out"):
        sweep.plan_trials(stopped, OVER)


def test_the_table_has_every_run_and_the_best_has_the_lowest_held_out_loss(tmp_path):
    trials = [sweep.Trial((f"train.seed={name}",), RunFolder(tmp_path / name)) for name in "abc"]
    write_run(trials[0].folder, 12, 1.25)
    write_run(trials[1].folder, 12, 0.75)
    write_report(trials[2].folder, status="failed", cause="diverged\nmore")
    assert sweep.table(trials) == [
        "settings        loss  ROUGE-L  step  minutes  status",
        "train.seed=a  1.2500    0.500    12      1.5  done a",
        "train.seed=b  0.7500    0.500    12      1.5  done b",
        "train.seed=c       -        -     -        -  failed c diverged",
    ]
    assert sweep.best_of(trials) is trials[1]
    assert sweep.lines_of_best(trials[1])[0] == "best b: train.seed=b"


def test_a_signal_stops_the_runs_of_a_sweep_once_and_its_handlers_go(tmp_path):
    script = "import time\ntry:\n    print('up', flush=True)\n    time.sleep(60)\n"
    script += "except KeyboardInterrupt:\n    print('saved')\n"
    log = tmp_path / "log"
    before = signal.getsignal(signal.SIGTERM)
    with sweep.Sweep(call(tmp_path), [None]) as running, ThreadPoolExecutor(1) as pool:
        done = pool.submit(running.run, [sys.executable, "-c", script], {}, log)
        while not (log.exists() and "up" in log.read_text()):
            assert not done.done(), log.read_text()
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        done.result(timeout=30)
    assert running.requested and log.read_text() == "up\nsaved\n"
    assert signal.getsignal(signal.SIGTERM) == before
