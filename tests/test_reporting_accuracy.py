"""sft_play.reporting.accuracy: how near the plans of earlier runs on this machine were."""

import dataclasses
from pathlib import Path

import pytest
from plan_examples import CPU, plan_for
from run_files import run_json

from sft_play.plan.memory import GIB
from sft_play.plan.run_plan import PlannedRun
from sft_play.reporting.accuracy import Accuracy, Spread, accuracy_lines, of_runs
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import PhasePeaks, ReportedPeaks, RunReport

H200 = "NVIDIA H200"
ON_CPU = plan_for(CPU)
ON_H200 = plan_for("1xH200")


def planned_on(gpu: str | None) -> PlannedRun:
    if gpu is None:
        return ON_CPU
    return dataclasses.replace(ON_H200, plan=dataclasses.replace(ON_H200.plan, gpu_names=(gpu,)))


def new_folder(path: Path, gpu: str | None) -> RunFolder:
    """Return the folder of a run that has been planned."""
    path.mkdir()
    folder = RunFolder(path)
    planned_on(gpu).write(folder)
    return folder


@pytest.fixture
def add(tmp_path):
    """A function that writes a run below the test's folder, which it returns.

    Peak, speed and phases are given as measured / predicted.
    """

    def write(name, peak, gpu=H200, status="done", speed=None, **phases):
        folder = new_folder(tmp_path / name, gpu)
        measured_peak = int(peak * 10 * GIB) if peak else None
        measured = {phase: int(ratio * GIB) for phase, ratio in phases.items()}
        tokens_per_second = None
        if speed is not None:
            tokens_per_second = speed * planned_on(gpu).plan.speed.tokens_per_second
        report = RunReport(
            status=status,
            tokens_per_second=tokens_per_second,
            peak_bytes=ReportedPeaks(predicted=10 * GIB, measured=measured_peak),
            memory=PhasePeaks(predicted=dict.fromkeys(phases, GIB), measured=measured),
        )
        folder.write_report(report)
        return tmp_path

    return write


def test_runs_on_the_same_gpu_are_counted_with_median_and_worst(add):
    for number, ratio in enumerate((0.97, 1.0, 1.02)):
        output = add(f"run-{number}", ratio, forward=ratio)
    add("other-gpu", 2.0, gpu="NVIDIA L4")
    add("on-a-cpu", 3.0, gpu=None)
    add("failed", None, status="failed")
    found = of_runs(output, "cuda", H200)
    assert (found.runs, found.tokens_per_second) == (3, None)
    assert dataclasses.astuple(found.peak) == pytest.approx((3, 0.97, 1.0, 1.02))
    assert set(found.phases) == {"forward"}
    assert found.phases["forward"].median == pytest.approx(1.0)
    assert of_runs(output, "cpu", None).peak.most == pytest.approx(3.0)


def test_a_person_reads_them_in_two_lines(add):
    add("one", 0.969, speed=0.95, backward=1.01, load=1.0)
    output = add("two", 1.024, speed=1.1, backward=1.03)
    assert accuracy_lines(of_runs(output, "cuda", H200)) == [
        "on this machine: 2 runs on NVIDIA H200, peak within -3.1 .. +2.4 % of the prediction, "
        "tokens/s within -5.0 .. +10.0 %",
        "  median by phase: load +0.0 %, backward +2.0 %",
    ]


def test_where_no_run_has_finished_there_is_no_line(tmp_path):
    nothing = of_runs(tmp_path / "nothing", "cuda", H200)
    assert nothing == Accuracy(H200, 0, None, {}, None)
    assert accuracy_lines(nothing) == []


def test_a_run_that_never_began_and_one_of_another_version_do_not_count(add):
    output = add("begun", 1.0)
    folder = new_folder(output / "planned", H200)
    assert of_runs(output, "cuda", H200).runs == 1
    cause = "stopped on request while rows were tokenized; nothing was trained"
    folder.write_report(RunReport(status="stopped", cause=cause))
    write_json(
        new_folder(output / "then", H200).path / "plan.json", {"device": "cuda", "gpu": H200}
    )
    assert of_runs(output, "cuda", H200).peak == Spread(1, 1.0, 1.0, 1.0)


def test_a_real_run_is_found_again(finished):
    folder = finished("lora")
    found = of_runs(folder.path.parent, "cpu", None)
    peak = run_json(folder)["peak_bytes"]
    assert found.runs == 1
    assert found.peak.median == peak["measured"] / peak["predicted"]
