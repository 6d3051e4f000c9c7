"""train, plan, preview and report of sft_play: the commands of make for notebooks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

import sft_play
from sft_play import api
from sft_play.commands import ask
from sft_play.errors import (
    ConfigError,
    DataError,
    DivergedError,
    ExitClass,
    SftPlayError,
    StoppedOnRequest,
    error_of_class,
)

SMALL = {
    "max_steps": 2,
    "batch_size": 2,
    "grad_accum": 1,
    "logging_steps": 1,
    "predict_with_generate": False,
    "reopen_saved": False,
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current folder that is not the project's, as a notebook's may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"batch_size": 2, "learning_rate": 2e-5}}, ["train.batch_size=2", "train.learning_rate=2e-05"]),
        ({"train.batch_size": 2}, ["train.batch_size=2"]),
        ({"tuning": {"lora": {"r": 8}}}, ["tuning.lora.r=8"]),
        ({"tuning.lora": {"target_modules": ["q_proj", "v_proj"]}}, ["tuning.lora.target_modules=q_proj,v_proj"]),
        ({"train": {"bf16": True, "run_name": None}}, ["train.bf16=true", "train.run_name=null"]),
        ({"data": {"train_path": Path("rows.jsonl")}}, ["data.train_path=rows.jsonl"]),
        ({"batch_size": 2}, ["train.batch_size=2"]),
        ({"lr": 1e-4, "epochs": 3}, ["train.learning_rate=0.0001", "train.epochs=3"]),
        ({"model": "x", "data": ["a.jsonl", "b.jsonl"]}, ["model.name=x", 'data.train_path=["a.jsonl", "b.jsonl"]']),
        ({"learning_rat": 2}, ["learning_rat=2"]),
    ],
)  # fmt: skip
def test_keywords_are_words_of_the_command_line(given, words):
    assert list(api.read_settings(given).overrides) == words


def test_the_package_lists_its_calls():
    assert {"train", "plan", "preview", "report"} <= set(dir(sft_play))


def test_settings_of_several_sources_arrive_as_they_were_given():
    from sft_play.config import loader

    sources = [{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"]
    given = api.read_settings({"data": {"train_path": sources}})
    data = loader.load_merged("tiny", overrides=given.overrides).config.data
    assert [data.train_path[0].path, data.train_path[0].weight] == ["a.jsonl", 2.0]


def test_makes_variables_are_keywords_in_small_letters():
    given = api.read_settings({"num_gpus": 2, "device": "cpu", "run": None})
    assert given.variables == {"NUM_GPUS": "2", "DEVICE": "cpu"}
    assert given.overrides == ()


def test_importing_the_package_is_light_and_plan_is_package_and_call():
    program = """
import sys
import sft_play
from sft_play import plan
assert not {"torch", "pydantic", "yaml"} & sys.modules.keys()
from sft_play import train, preview, report
from sft_play.plan import devices
from sft_play import plan as later
assert later is plan and callable(plan) and plan.devices is devices
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60)
    assert done.returncode == 0


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = sft_play.trane


def test_an_exit_class_comes_back_as_its_error():
    assert type(error_of_class(14, "loss is NaN")) is DivergedError
    lost = error_of_class(17, "rank 1 is gone")
    assert (type(lost), lost.exit_class) == (SftPlayError, ExitClass.PEER_LOST)


def test_a_plan_shows_itself_and_has_values(elsewhere, capsys):
    planned = sft_play.plan(tuning={"lora": {"r": 4}}, gpus="1xH200")
    assert planned.fits and planned.values["world_size"] == 1
    assert "lora of rank 4" in repr(planned)
    assert planned._repr_html_().startswith("<pre>plan ")


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"config": "tinyy"}, ConfigError, "did you mean CONFIG=.*tiny.yaml"),
        ({"data": {"train_path": "/no/rows.jsonl"}}, DataError, "/no/rows.jsonl.*no such file"),
    ],
)
def test_an_error_has_its_own_type_and_words(elsewhere, given, kind, words):
    with pytest.raises(kind, match=words):
        sft_play.plan(**given)


def test_what_crashes_before_it_answers_says_so(elsewhere, monkeypatch):
    monkeypatch.setattr(ask, "PROGRAM", "raise SystemExit(3)")
    with pytest.raises(SftPlayError, match="plan ended with exit code 3"):
        sft_play.plan()


@pytest.mark.long
def test_a_preview_has_text_and_a_page_in_a_frame(elsewhere, capsys):
    shown = sft_play.preview("tiny", rows=1)
    assert "⟦The museum opens at 10:30.<|end|>⟧" in repr(shown)
    assert shown.page == Path("outputs/preview.html") and shown.page.exists()
    html = shown._repr_html_()
    assert html.startswith("<iframe sandbox srcdoc=") and "<!doctype" not in html
    assert capsys.readouterr().out == ""


@pytest.fixture
def few_rows(elsewhere):
    """Settings of a run on a few of the rows that ship."""
    data = {}
    for split in ("train", "val", "test"):
        rows = (ROOT / "data" / "desk" / f"{split}.jsonl").read_text().splitlines()
        Path(f"{split}.jsonl").write_text("\n".join(rows[:8]))
        data[f"{split}_path"] = f"{split}.jsonl"
    return data


def test_a_run_shows_its_verdict_and_its_report(finished):
    folder = finished("lora")
    run = sft_play.report(folder.path)
    assert run.report.status == "done"
    assert set(run.scores) == {"before", "after"}
    assert repr(run).endswith(f"run {folder.path}")
    assert run._repr_html_().startswith("<iframe sandbox srcdoc=")
    assert folder.name in run._repr_html_()


def test_training_raises_what_make_would_print(elsewhere, capsys):
    Path("outputs/taken").mkdir(parents=True)
    Path("outputs/taken/notes.txt").touch()  # an empty folder is used
    with pytest.raises(ConfigError, match="RUN=taken: outputs/taken exists already"):
        sft_play.train("tiny", run="taken")
    assert "plan device=cpu" not in capsys.readouterr().out


@pytest.mark.long
def test_a_run_is_trained_and_shown(few_rows, capsys):
    run = sft_play.train("tiny", train=SMALL, data=few_rows, run="first")
    assert run.path == Path("outputs/first")
    assert run.report.status == "done"
    assert run.scores["after"]["eval_loss"] < run.scores["before"]["eval_loss"]
    assert "step 2/2 loss=" in capsys.readouterr().out
    assert repr(sft_play.report()) == repr(run) == repr(sft_play.report("first"))
    sft_play.train("tiny", train=SMALL, data=few_rows, run="second", quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.long
def test_an_interrupt_stops_a_run_with_a_checkpoint(few_rows, monkeypatch):
    settings = {**SMALL, "max_steps": 10000}
    printed = []

    def interrupt_at_a_step(line: str, **_: object) -> None:
        if line.startswith("step 1/") and not any(text.startswith("step 1/") for text in printed):
            printed.append(line)
            raise KeyboardInterrupt
        printed.append(line)

    monkeypatch.setattr("builtins.print", interrupt_at_a_step)
    with pytest.raises(
        StoppedOnRequest, match="continue with make train TRAIN_RESUME_FROM="
    ) as stopped:
        sft_play.train("tiny", train=settings, data=few_rows, run="stopped")
    assert stopped.value.__notes__ == [f"run {Path('outputs/stopped')}"]
    assert os.listdir("outputs/stopped/checkpoints")


@pytest.mark.long
def test_a_run_stops_with_a_checkpoint_when_its_program_is_killed(few_rows):
    settings = {**SMALL, "max_steps": 10000}
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import sft_play
sft_play.train("tiny", train={settings!r}, data={few_rows!r}, run="left")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as notebook:
        assert any(line.startswith(b"step 2/") for line in notebook.stdout)
        notebook.kill()
    run = sft_play.report("left")
    deadline = time.monotonic() + 60
    while run.report.state == "running" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert run.report.state == "stopped"
    assert os.listdir("outputs/left/checkpoints")
