"""`make sweep`: the grid, what is done already, and which run is the best."""

from pathlib import Path

import pytest

from sft_play.commands import sweep
from sft_play.commands.call import Call
from sft_play.config.invocation import Invocation
from sft_play.errors import ConfigError
from sft_play.plan.sweep import Point, grid
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

OVER = "train.learning_rate=1e-4,2e-4 tuning.lora.r=8,16"


def test_a_grid_has_every_combination_once():
    assert [str(point) for point in grid(OVER)] == [
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
        ("train.seed=1 train.seed=2", "train.seed stands there twice"),
        ("train.run_name=a,b", "train.run_name cannot be swept"),
    ],
)
def test_words_that_are_no_grid_are_refused(over: str, message: str):
    with pytest.raises(ConfigError, match=message):
        grid(over)


def call(tmp_path: Path) -> Call:
    return Call(Invocation(device="cpu"), {"TRAIN_OUTPUT_DIR": str(tmp_path)}, ())


def write_report(folder: RunFolder, **facts) -> None:
    folder.path.mkdir()
    folder.write_report(RunReport(run=folder.name, **facts))


def test_a_name_follows_from_the_settings_and_a_failed_run_is_tried_under_the_next(tmp_path):
    first, second, *_ = sweep.plan_trials(call(tmp_path), OVER)
    assert first.folder.name != second.folder.name
    write_report(first.folder, status="done")
    write_report(second.folder, status="failed", cause="no room")
    first_again, second_again, *_ = sweep.plan_trials(call(tmp_path), OVER)
    assert first_again.folder == first.folder, "done: it is not trained again"
    assert second_again.folder.name == f"{second.folder.name}-2"


def test_every_combination_is_checked_before_the_first_run(tmp_path):
    with pytest.raises(ConfigError, match=r"tuning\.lora\.r=none"):
        sweep.plan_trials(call(tmp_path), "train.learning_rate=1e-4 tuning.lora.r=8,none")


def test_the_table_has_every_run_and_the_best_has_the_lowest_held_out_loss(tmp_path):
    trials = []
    for name, loss in (("a", 1.25), ("b", 0.75)):
        folder = RunFolder(tmp_path / name)
        metrics = {"after": {"eval_loss": loss, "rougeL": 0.5}}
        write_report(folder, status="done", metrics=metrics, seconds={"total": 90.0})
        trials.append(sweep.Trial(Point((f"train.seed={name}",)), folder))
    failed = RunFolder(tmp_path / "c")
    write_report(failed, status="failed", cause="diverged\nmore")
    trials.append(sweep.Trial(Point(("train.seed=c",)), failed))
    assert sweep.table(trials) == [
        "settings          loss  ROUGE-L  minutes  status",
        "train.seed=a    1.2500    0.500      1.5  done a",
        "train.seed=b    0.7500    0.500      1.5  done b",
        "train.seed=c         -        -        -  failed c diverged",
    ]
    assert sweep.best_of(trials) is trials[1]
    assert sweep.lines_of_best(trials[1])[0] == "best b: train.seed=b"
