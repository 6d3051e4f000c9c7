"""A run's name, and which run the other commands take."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import run_files

from sft_play.commands import call as calls
from sft_play.commands import train as training
from sft_play.commands import use
from sft_play.config import invocation
from sft_play.errors import DataError, EnvironmentFault
from sft_play.monitor.watch import run_table
from sft_play.runs import folder as folders
from sft_play.runs import lock
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport


def ended(output: Path, name: str, status: str, weights: str | None = None, **facts) -> RunFolder:
    """Return a run folder with this end; later ones are newer."""
    folder = RunFolder(output / name)
    number = len(list(output.glob("*"))) if output.exists() else 0
    write_text(folder.path / "plan.json", "{}")
    os.utime(folder.path / "plan.json", (number, number))
    folder.write_report(RunReport(run=name, status=status, **facts))
    if weights:
        write_json(folder.path / weights / "stamp.json", {})
    return folder


def test_a_run_that_failed_in_its_rows_does_not_keep_its_name(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q"}\n')
    environ = {
        "DEVICE": "cpu",
        "RUN": "mine",
        "DATA_TRAIN_PATH": str(rows),
        "TRAIN_OUTPUT_DIR": str(tmp_path / "out"),
    }
    call = calls.Call(invocation.read_invocation(environ), environ, ())
    for _ in range(2):
        with pytest.raises(DataError):
            training.prepare_run(call, distributed=False, use_deepspeed=False)
    assert "an earlier run mine kept nothing; it is " in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == [
        "mine",
        "mine-untrained-1",
    ]
    assert RunFolder(tmp_path / "out" / "mine-untrained-1").read_report().exit_class == 11


@pytest.mark.parametrize(
    ("status", "weights", "facts"),
    [
        ("done", "adapter", {}),
        ("done", None, {"global_step": 3}),
        ("failed", "checkpoints/checkpoint-2", {}),
        ("stopped", "model", {"global_step": 0}),
        ("planned", None, {}),
        ("planned", None, {"launcher_pid": os.getpid(), "started_at": "2099-01-01T00:00:00"}),
        ("running", None, {"pid": os.getpid(), "started_at": "2099-01-01T00:00:00"}),
    ],
)
def test_a_run_that_trained_or_may_still_train_keeps_its_name(tmp_path, status, weights, facts):
    ended(tmp_path, "a", status, weights, **facts)
    assert folders.give_up_name(tmp_path, "a") is None


def test_a_front_end_that_was_killed_leaves_a_run_that_died(tmp_path):
    ended(tmp_path, "a", "planned")
    run_files.write_holder(tmp_path / "a")
    assert run_table(tmp_path)[0].split()[:2] == ["a", "died"]
    given_up = folders.give_up_name(tmp_path, "a")
    assert given_up is not None
    assert given_up.name == "a-untrained-1"


GONE = json.dumps(asdict(run_files.GONE))
HERE = "of this process"


@pytest.mark.parametrize(
    ("names", "holder", "expected"),
    [
        (("plan.json", "config.yaml", ".run.json.0123"), GONE, True),
        ((), "", True),
        (("plan.json", "config.yaml"), HERE, False),
        (("plan.json", "notes.txt"), GONE, False),
        (("plan.json", "config.yaml"), None, False),
        (("plan.json", "run.json"), GONE, False),
    ],
    ids=["killed", "killed before its name", "here", "other files", "no lock", "a report"],
)
def test_a_run_that_was_killed_before_its_first_report_gives_its_name_up(
    tmp_path, names, holder, expected
):
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    for name in names:
        (folder.path / name).touch()
    if holder == HERE:
        lock.take(folder.path, print)
    elif holder is not None:
        (folder.path / lock.NAME).write_text(holder)
    assert lock.is_abandoned(folder.path) == expected
    if "run.json" not in names:
        given_up = folders.give_up_name(tmp_path, "a")
        assert (given_up is not None) == expected


def test_a_report_that_was_cut_off_hides_no_other_run(tmp_path):
    for name in ("a", "b"):
        ended(tmp_path, name, "done", "adapter")
    (tmp_path / "a" / "run.json").write_text('{"status": "do')
    lines = run_table(tmp_path)
    assert "a  unknown" in lines[0] and "run.json cannot be read" in lines[0]
    assert lines[1].startswith("b  done")


def test_the_latest_run_is_the_latest_with_weights_and_the_skipped_ones_are_named(
    tmp_path, capsys, monkeypatch
):
    ended(tmp_path, "lora", "done", "adapter")
    ended(tmp_path, "full", "done", "model")
    ended(tmp_path, "bad", "failed", cause="rows.jsonl:2: not valid JSON\nmore")
    monkeypatch.setenv("TRAIN_OUTPUT_DIR", str(tmp_path))
    monkeypatch.delenv("RUN", raising=False)
    assert use.chosen_run(calls.read_call()).name == "full"
    assert capsys.readouterr().err.splitlines() == [
        f"skipped: {tmp_path}/bad has no adapter/ or model/ (failed: rows.jsonl:2: not valid JSON)",
        f"run {tmp_path}/full, the latest with weights; RUN= chooses another",
    ]
    assert use.chosen_run(calls.read_call(), ("adapter",)).name == "lora"
    assert f"skipped: {tmp_path}/full has no adapter/ (done)" in capsys.readouterr().err
    monkeypatch.setenv("RUN", "bad")
    assert use.chosen_run(calls.read_call()).name == "bad"
    assert capsys.readouterr().err == ""


def test_weights_that_are_not_whole_are_no_weights(tmp_path):
    folder = ended(tmp_path, "a", "failed", cause="disk full")
    write_text(folder.path / "adapter" / "adapter_model.safetensors", "half")
    with pytest.raises(EnvironmentFault, match=r"a has no adapter/ or model/ \(failed: disk full"):
        folders.latest_with_weights(tmp_path)


def test_machines_that_share_a_disk_write_a_folder_each(tmp_path):
    names = []
    for node_rank in ("0", "1"):
        environ = {
            "RUN": "mine",
            "NNODES": "2",
            "NODE_RANK": node_rank,
            "TRAIN_OUTPUT_DIR": str(tmp_path),
        }
        call = calls.Call(invocation.read_invocation(environ), environ, ())
        loaded = calls.load_config(call)
        names.append(training.new_run(call, loaded, loaded.config).name)
    assert names == ["mine", "mine-node1"]
