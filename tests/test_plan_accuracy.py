"""How near the plan has been on this machine, from the run folders that are there; and what a plan writes down for it."""

import dataclasses
from pathlib import Path

import pytest
from run_files import run_json

from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load
from sft_play.plan.accuracy import Accuracy, Spread, lines, of_runs
from sft_play.plan.devices import GIB, Hardware, parse
from sft_play.plan.resolve import resolve
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

H200 = "NVIDIA H200"


@pytest.fixture
def add(tmp_path):
    """A function that writes down a run below the test's folder: measured over predicted peak, and what else is given."""

    def write(
        name: str,
        ratio: float | None,
        gpu: str | None = H200,
        status: str = "done",
        speed: float | None = None,
        **phases: float,
    ) -> Path:
        plan = {
            "device": "cuda" if gpu else "cpu",
            "gpu": gpu,
            "speed": {"tokens_per_second": 1000.0} if speed else None,
        }
        report = {
            "status": status,
            "tokens_per_second": speed and speed * 1000,
            "peak_bytes": {"predicted": 10 * GIB, "measured": ratio and int(ratio * 10 * GIB)},
        }
        report["memory"] = {
            "predicted": dict.fromkeys(phases, GIB),
            "measured": {phase: int(value * GIB) for phase, value in phases.items()},
        }
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        write_json(folder.path / "plan.json", plan)
        folder.write_report(RunReport.from_json(report))
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
    assert found.phases["forward"].median == pytest.approx(1.0) and set(found.phases) == {"forward"}
    assert of_runs(output, "cpu", None).peak.most == pytest.approx(3.0)


def test_a_person_reads_them_in_two_lines(add):
    add("one", 0.969, speed=0.95, backward=1.01, load=1.0)
    output = add("two", 1.024, speed=1.1, backward=1.03)
    assert lines(of_runs(output, "cuda", H200)) == [
        "on this machine: 2 runs on NVIDIA H200, peak within -3.1 .. +2.4 % of the prediction, tokens/s within -5.0 .. +10.0 %",
        "  median by phase: load +0.0 %, backward +2.0 %",
    ]


def test_one_run_has_one_number_and_none_no_line(add, tmp_path):
    assert (
        lines(of_runs(tmp_path / "nothing", "cuda", H200))
        == lines(Accuracy(None, 0, None, {}, None))
        == []
    )
    output = add("cpu", 0.9, gpu=None)
    assert lines(of_runs(output, "cpu", None)) == [
        "on this machine: 1 run on the CPU, peak -10.0 % of the prediction"
    ]
    assert of_runs(output, "cpu", None).as_json()["peak"] == pytest.approx(
        {"count": 1, "least": 0.9, "median": 0.9, "most": 0.9}
    )


def test_a_run_that_was_planned_and_never_began_does_not_count(add):
    output = add("begun", 1.0)
    folder = RunFolder(output / "planned")
    folder.path.mkdir()
    write_json(folder.path / "plan.json", {"device": "cuda", "gpu": H200})
    assert of_runs(output, "cuda", H200).runs == 1
    cause = "stopped on request while rows were tokenised; nothing was trained"
    folder.write_report(RunReport(status="stopped", cause=cause))
    assert of_runs(output, "cuda", H200).peak == Spread(1, 1.0, 1.0, 1.0)


def test_a_real_run_is_found_again(finished):
    folder = finished("lora")
    found = of_runs(folder.path.parent, "cpu", None)
    report = run_json(folder)["peak_bytes"]
    assert found.runs == 1 and found.peak.median == report["measured"] / report["predicted"]


def test_a_plan_says_what_others_hold_of_each_gpu(monkeypatch):
    monkeypatch.chdir(PROJECT_ROOT)
    gpus = tuple(
        dataclasses.replace(gpu, free_bytes=gpu.total_bytes - (gpu.index + 1) * GIB)
        for gpu in parse("4xH200").gpus
    )
    loaded = load("tests/fixtures/empty.yaml", {}, ())

    def facts(hardware: Hardware, distributed: bool, **environ: str) -> dict:
        return resolve(
            loaded, invocation.read(environ), hardware, environ, distributed, use_deepspeed=False
        ).as_json()

    all_of_them, one = (
        facts(Hardware("cuda", gpus, 8, 64 * GIB), distributed) for distributed in (True, False)
    )
    assert (all_of_them["gpu"], all_of_them["used_before_bytes"]) == (
        "NVIDIA H200",
        [GIB, 2 * GIB, 3 * GIB, 4 * GIB],
    )
    assert one["used_before_bytes"] == [GIB]
    on_cpu = facts(Hardware("cpu", (), 8, 64 * GIB), True, NUM_GPUS="2")
    assert (on_cpu["gpu"], on_cpu["used_before_bytes"]) == (None, [0, 0])
