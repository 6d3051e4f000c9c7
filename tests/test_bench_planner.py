"""The planner's benchmark: errors, verdicts, tables, the searches of a sweep, and a toy run."""

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import ROOT, Machine
from benchmarks.planner.__main__ import choose_names
from benchmarks.planner.report import choices_table, largest_table, markdown, share_of_best
from benchmarks.planner.results import (
    BudgetResult,
    CardChoice,
    Combination,
    LargestMicroBatch,
    Memory,
    MemoryAndSpeed,
    PlannerResults,
    RunResult,
    SweepResult,
)
from benchmarks.planner.runs import Place, make_command, read_result, run_settings
from benchmarks.planner.search import cut, fastest_that_fits, find_largest, step_speed
from benchmarks.planner.sweep import predicted_bytes, probed_bytes
from benchmarks.planner.verdict import find_faults, relative_error, spread
from benchmarks.planner.workloads import SWEEPS, WORKLOADS
from benchmarks.speed.workloads import TOY
from sft_play.commands import call as calls
from sft_play.plan.memory import PHASES, step_bytes
from sft_play.plan.probe_fit import MeasuredFit, Point, ProbeReport
from sft_play.plan.run_plan import RunPlan
from sft_play.plan.step import Layout, StepSpec
from sft_play.runs.report import LoggedLoss, PeakBytes, PhasePeaks, RunReport
from sft_play.training.probe import ProbeResult

GIB = 2**30
WORKLOAD = WORKLOADS["8b-lora"]


def plan_json(**changed: Any) -> dict[str, Any]:
    """What `plan --json` holds that the benchmark reads."""
    phases = {
        name: {"weights": GIB, "total": (number + 1) * GIB} for number, name in enumerate(PHASES)
    }
    settings = {
        "per_device_batch_size": 4,
        "micro_batches": 2,
        "checkpointed_layers": 0,
        "packing": True,
    }
    return {
        **settings,
        "budget_bytes": 100 * GIB,
        "memory": {"predicted_peak": 6 * GIB},
        "phases": phases,
        **changed,
    }


def plan_of(gpus: str = "1x24GiB") -> RunPlan:
    settings = ["model.name=meta-llama/Llama-3.2-1B-Instruct", "train.predict_with_generate=false"]
    call = calls.read_call("configs/base.yaml", settings, gpus=gpus)
    return calls.plan_run(call, calls.load_config(call)).plan


def trained_plan(batch_size: int = 4, probe: ProbeReport | None = None) -> RunPlan:
    """What plan.json of a run holds that the benchmark reads."""
    layout = Layout(batch_size, grad_accum=2, world_size=1, max_seq_len=2048)
    return replace(plan_of(), layout=layout, packing=True, probe=probe)


def probe_report(**changed: Any) -> ProbeReport:
    report = ProbeReport((), {}, {}, None, seconds=2.5, cached=False, changed=False)
    return replace(report, **changed)


def run_report(**changed: Any) -> RunReport:
    """What run.json holds that the benchmark reads."""
    report = RunReport(
        status="done",
        global_step=8,
        loss=[LoggedLoss(8, 2.5)],
        tokens_per_second=1000.0,
        peak_bytes=PeakBytes(predicted=6 * GIB, measured=5 * GIB),
    )
    return replace(report, **changed)


def good_result(**changed: Any) -> RunResult:
    result = replace(read_result(plan_json(), trained_plan(), run_report(), 0), **changed)
    return replace(result, why_not=find_faults(WORKLOAD, result))


def results(runs: dict[str, RunResult]) -> PlannerResults:
    machine = Machine("NVIDIA H200", "3.12", {"torch": "2.11"}, None, None)
    return PlannerResults(machine=machine, runs=runs)


def line_of(name: str, text: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return found


def test_an_error_is_above_zero_where_too_much_was_predicted() -> None:
    assert relative_error(110, 100) == pytest.approx(0.1)
    assert relative_error(90, 100) == pytest.approx(-0.1)
    assert relative_error(None, 100) is None
    assert relative_error(100, None) is None and relative_error(100, 0) is None


def test_the_spread_leaves_out_what_was_not_measured() -> None:
    assert spread([0.1, None, -0.2, 0.0]) == (-0.2, 0.0, 0.1, 3)
    assert spread([None]) is None


def test_a_run_that_trained_every_step_counts() -> None:
    assert good_result().why_not == []


@pytest.mark.parametrize(
    ("report", "status", "reason"),
    [
        (run_report(global_step=7), 0, "7 steps of 8"),
        (run_report(loss=[LoggedLoss(8, float("nan"))]), 0, "not finite"),
        (run_report(loss=[]), 0, "not finite"),
        (run_report(peak_bytes=PeakBytes(predicted=6 * GIB)), 0, "peak was not measured"),
        (run_report(status="failed"), 15, "out of memory"),
        (run_report(status="failed"), 1, "failed"),
        (run_report(), None, "failed"),
        (None, 15, "the plan refused it"),
    ],
)
def test_a_run_that_did_not_does_not_count(
    report: RunReport | None, status: int | None, reason: str
) -> None:
    result = read_result(
        plan_json(), trained_plan() if report else None, report or RunReport(), status
    )
    assert reason in "; ".join(find_faults(WORKLOAD, replace(result, cause="a cause")))


def test_what_cannot_fit_counts_where_the_plan_refused_it_and_not_where_it_ran() -> None:
    workload = WORKLOADS["14b-full-float32"]
    assert find_faults(workload, read_result(plan_json(), None, RunReport(), 15)) == []
    assert "the plan let it run" in find_faults(workload, good_result())


def test_without_a_probe_a_speed_and_measured_phases_there_are_none_of_them() -> None:
    result = good_result()
    phases = {name: (number + 1) * GIB for number, name in enumerate(PHASES)}
    assert result.predicted == MemoryAndSpeed(6 * GIB, phases, tokens_per_second=None)
    assert result.probed.peak is None and result.traced == Memory()
    assert result.measured == MemoryAndSpeed(5 * GIB, {}, tokens_per_second=1000.0)


def test_every_prediction_is_of_the_step_that_was_trained() -> None:
    speed = {"speed": {"tokens_per_second": 900.0}}
    full_rows = read_result(plan_json(**speed), trained_plan(), run_report(), 0)
    assert full_rows.predicted.tokens_per_second == 900
    before = plan_json(workload={"tokens_per_second": 700.0}, **speed)
    these_rows = read_result(before, trained_plan(), run_report(), 0)
    assert these_rows.predicted.tokens_per_second == 700
    unknown = read_result(plan_json(**speed), trained_plan(batch_size=2), run_report(), 0)
    assert unknown.predicted == MemoryAndSpeed()
    probe = probe_report(
        predicted_before={"forward": 3 * GIB},
        predicted_after={"forward": 2 * GIB, "backward": 4 * GIB},
    )
    report = run_report(memory=PhasePeaks(measured={"forward": GIB}))
    probed = read_result(plan_json(**speed), trained_plan(2, probe), report, 0)
    assert probed.predicted.peak == 3 * GIB and probed.probed.peak == 4 * GIB
    assert probed.probed.seconds == 2.5 and probed.probed.is_cached is False
    assert probed.settings.per_device_batch_size == 2
    assert probed.measured.phases == {"forward": GIB}


def test_a_line_says_by_how_much_a_prediction_is_off() -> None:
    text = markdown(results({"8b-lora": good_result()}))
    cells = [cell.strip() for cell in line_of("8b-lora", text).split("|")]
    assert cells[1:7] == ["8b-lora", "4", "8 of 8", "5.00", "6.00", "+20.0%"]
    assert cells[7:11] == ["5.00", "1,000", "-", "-"]  # no speed was predicted
    assert "- peak, closed form: +20.0% to +20.0%, median +20.0%, of 1 runs" in text
    assert "probe GiB" not in text and "No run measured its phases" in text


def test_what_does_not_count_is_struck_out_with_its_reason_and_left_out_of_the_summary() -> None:
    bad = good_result(steps=3)
    text = markdown(results({"8b-lora": good_result(), "8b-qlora": bad}))
    assert "~~5.00~~" in line_of("8b-qlora", text) and "3 steps of 8" in line_of("8b-qlora", text)
    assert "~~" not in line_of("8b-lora", text)
    assert "of 1 runs" in text


def test_a_refusal_is_a_line_and_a_work_without_a_plan_is_one_too() -> None:
    refused = replace(read_result(plan_json(), None, RunReport(), 15), cause="needs 250.1 GiB")
    failed = RunResult("failed", cause="plan: exit 10")
    failed = replace(failed, why_not=find_faults(WORKLOAD, failed))
    text = markdown(results({"14b-full-float32": refused, "8b-lora": failed}))
    assert "refused, as it should be: needs 250.1 GiB" in line_of("14b-full-float32", text)
    assert "failed: plan: exit 10" in line_of("8b-lora", text)


def test_phases_are_shown_with_both_predictions() -> None:
    before = {name: (number + 1) * GIB for number, name in enumerate(PHASES)}
    probe = probe_report(predicted_before=before, predicted_after={"forward": 3 * GIB})
    report = run_report(memory=PhasePeaks(measured={"forward": 3 * GIB, "load": 2 * GIB}))
    result = read_result(plan_json(), trained_plan(probe=probe), report, 0)
    text = markdown(results({"8b-lora": result}))
    of_phases = [line for line in text.splitlines() if line.startswith("| 8b-lora |")][1]
    assert of_phases == "| 8b-lora | 2.00 -50.0% | 3.00 -33.3% +0.0% | - | - | - | - |"


def test_a_micro_batch_is_cut_into_the_fewest_rows_of_equal_length() -> None:
    for tokens in random.Random(0).sample(range(1, 50000), 50):
        rows, width = cut(tokens, 2048)
        assert width <= 2048 and 0 <= tokens - rows * width < rows and (rows - 1) * 2048 < tokens


def test_the_largest_that_fits_is_found_from_below_and_from_above_in_few_questions() -> None:
    draw = random.Random(0)
    for _ in range(50):
        limit, start = draw.randrange(200, 40000), draw.randrange(200, 40000)
        asked: list[int] = []

        def fits(tokens: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(tokens)
            return tokens <= limit

        found = find_largest(fits, start, most=65536, granule=128, precision=0.015)
        assert found <= limit < found + max(128, 0.015 * limit) * 1.02 + 1
        assert len(asked) <= 40 and len(asked) == len(set(asked))


def test_the_largest_stops_where_it_is_told_and_is_none_where_nothing_fits() -> None:
    assert find_largest(lambda tokens: True, start=1000, most=5000) == 5000
    assert find_largest(lambda tokens: False, start=1000, most=5000) == 0


def combination(batch: int, layers: int, speed: float | None) -> Combination:
    seconds = None if speed is None else 1.0
    return Combination(batch, layers, seconds, 10 * GIB, 11 * GIB, speed)


def test_the_speed_of_a_step_counts_its_micro_batches_and_its_optimizer() -> None:
    speed = step_speed(0.5, 4, rows_per_step=16, max_seq_len=2048, optimizer_seconds=0.25)
    assert speed == pytest.approx(16 * 2048 / 2.25)
    assert step_speed(None, 4, 16, 2048, 0.25) is None


def test_the_best_is_the_fastest_of_those_that_fit() -> None:
    speeds = {1: 100, 2: 150, 4: 180, 8: None}
    tried = [combination(batch, 0, speed) for batch, speed in speeds.items()]
    assert fastest_that_fits(tried, lambda found: found.batch_size < 4) == tried[1]
    assert fastest_that_fits(tried, lambda found: False) is None


BEST = combination(4, 8, 100)
CHOSEN = CardChoice.of(combination(2, 8, 96), fits=True)


def budget(**changed: Any) -> BudgetResult:
    choices = {"plan": CHOSEN, "probe": CardChoice.of(combination(2, 4, 98), fits=True)}
    largest = [LargestMicroBatch(0, plan=880, probe=950, true=1000)]
    return replace(BudgetResult(24, True, choices, BEST, largest), **changed)


def test_a_choice_is_held_to_the_best_that_fits() -> None:
    too_large = {"plan": replace(CHOSEN, fits=False)}
    assert share_of_best(CHOSEN, BEST) == pytest.approx(0.96)
    assert share_of_best(too_large["plan"], BEST) is None
    assert share_of_best(CHOSEN, None) is None
    text = choices_table([budget()])
    assert (
        "| 24 GiB | plan | 2 rows, 8 layers | 96 | 4 rows, 8 layers | 100 | **96.0%** |" in text
    ), "a missed goal is bold"
    assert "| 24 GiB | probe | 2 rows, 4 layers | 98 | 4 rows, 8 layers | 100 | 98.0% |" in text
    assert "~~96~~ does not fit" in choices_table([budget(choices=too_large)])
    nothing_fits = budget(choices=too_large, plan_fits=False, best=None)
    assert "| refused | nothing fits | - | - |" in choices_table([nothing_fits])


def test_more_tokens_than_fit_are_struck_out() -> None:
    def line(plan: int, probe: int | None, true: int) -> str:
        largest = [LargestMicroBatch(0, plan, probe, true)]
        return largest_table([budget(largest=largest)]).splitlines()[-1]

    assert line(880, 950, 1000) == "| 24 GiB | 0 | 1,000 | 880 | **88.0%** | 950 | 95.0% |"
    over = "| 24 GiB | 0 | 1,000 | ~~1,100~~ does not fit | **110.0%** | - | - |"
    assert line(1100, None, 1000) == over
    assert line(0, 0, 0) == "| 24 GiB | 0 | 0 | 0 | - | 0 | - |"


def test_a_probe_that_measures_the_closed_form_takes_the_same_micro_batches_to_fit() -> None:
    plan = plan_of()
    small, large = (measured_as_predicted(plan.step, tokens) for tokens in (1024, 2048))
    for more in (0, GIB):
        phases = {name: peak + more for name, peak in large.phases.items()}
        fit = MeasuredFit(plan.step, small, replace(large, phases=phases))
        memory = fit.memory(plan.layout)
        points = (small, large)
        result = ProbeResult(plan.layout, points, fit, memory, plan.budget_bytes, is_cached=False)
        for tokens in (1024, 8192, 16384):
            predicted = predicted_bytes(plan, *cut(tokens, 2048), layers=0)
            off = probed_bytes(result, tokens, layers=0) - predicted
            assert off == pytest.approx(more * (tokens - 1024) / 1024, abs=0.03 * more + 1), (
                "what the fit adds is a line in the tokens"
            )


def measured_as_predicted(step: StepSpec, tokens: int) -> Point:
    """A point that says what the closed form does, which counts the context, too."""
    layout = Layout(batch_size=1, grad_accum=2, world_size=1, max_seq_len=tokens)
    closed = step_bytes(step, layout)
    phases = {}
    for name in ("forward", "backward", "optimizer"):
        phases[name] = closed.phases[name].total - closed.phases[name].context
    return Point(tokens, 0, accumulates=True, phases=phases)


def test_a_sweep_is_a_grid_of_what_was_tried() -> None:
    tried = [combination(1, 0, 100), combination(2, 8, 150), combination(2, 0, None)]
    found = results({})
    found.sweeps["sweep-1b-lora"] = SweepResult(
        "done", layers=16, combinations=tried, budgets=[budget()]
    )
    text = markdown(found)
    assert "| micro-batch | 0 of 16 layers | 8 of 16 layers |" in text
    assert line_of("1", text) == "| 1 | 100, 10.00 GiB, +10.0% |  |"
    assert line_of("2", text) == "| 2 | out of memory | 150, 10.00 GiB, +10.0% |"
    found.sweeps["sweep-1b-lora"] = SweepResult("failed", cause="not done within 240 s")
    assert "~~sweep-1b-lora~~: failed: not done within 240 s" in markdown(found)


def test_the_committed_results_read_and_write_the_same_json(tmp_path: Path) -> None:
    path = ROOT / "benchmarks" / "results" / "planner-h200.json"
    found = PlannerResults.read(path)
    found.path = tmp_path / "planner.json"
    found.write()
    assert json.loads(found.path.read_text()) == json.loads(path.read_text())
    assert markdown(found) == (ROOT / "docs" / "planner-h200.md").read_text()


def test_a_run_is_told_nothing_of_its_micro_batch(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "runs", 1.0, on_cpu=True)
    words = run_settings(WORKLOADS["toy-lora"], place)
    assert (
        not {"train.batch_size", "train.grad_accum", "train.packing", "train.optim"} & words.keys()
    )
    assert make_command("plan", words, ["--json"])[1:7] == [
        "-m",
        "sft_play",
        "plan",
        "--config",
        "configs/base.yaml",
        "--json",
    ]
    rows = [
        (tmp_path / "rows-64" / name).read_text().splitlines()
        for name in ("rows.jsonl", "held-out.jsonl")
    ]
    assert len(rows[1]) == 4 and not set(rows[0]) & set(rows[1]), (
        "no row is trained and evaluated on"
    )


def asked(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"works": [], "parts": None, "toy": False, **changed})


def test_parts_are_asked_for_one_by_one_and_extra_works_by_name() -> None:
    everything = choose_names(asked())
    assert {*everything} == {name for name in (*WORKLOADS, *SWEEPS) if TOY not in name} - {
        "14b-full-ckpt"
    }
    assert choose_names(asked(parts=["long"])) == ["1b-long"]
    assert choose_names(asked(parts=["sweep"], toy=True)) == ["sweep-toy"]
    assert choose_names(asked(works=["14b-full-ckpt"])) == ["14b-full-ckpt"]
    ran = [name for name in everything if name in WORKLOADS and WORKLOADS[name].part == "accuracy"]
    assert (
        sum(name.startswith(("1b", "8b")) for name in ran) == 12
        and sum(name.startswith("14b") for name in ran) == 5
    )


def bench(folder: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark on the tiny model; return its results file."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.planner",
        "--toy",
        "--folder",
        str(folder),
        "--results",
        str(folder / "planner-cpu.json"),
        *options,
    ]
    environ = {
        name: value for name, value in os.environ.items() if name not in ("WORKS", "SECONDS")
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "planner-cpu.json").read_text())
    assert (folder / "planner-cpu.md").read_text() == markdown(
        PlannerResults.read(folder / "planner-cpu.json")
    )
    return found


@pytest.mark.long
def test_the_tiny_model_is_planned_run_and_read_and_what_counts_is_kept(tmp_path: Path) -> None:
    found = bench(tmp_path, "--works", "toy-lora", "toy-refused")["runs"]
    lora, refused = found["toy-lora"], found["toy-refused"]
    assert not lora["why_not"] and not refused["why_not"], (lora["why_not"], refused["why_not"])
    assert lora["steps"] == 4 and lora["measured"]["tokens_per_second"] > 0
    assert 0.5 < lora["predicted"]["peak"] / lora["measured"]["peak"] < 2
    assert refused["status"] == "refused" and "1000000000 tokens" in refused["cause"]

    path = tmp_path / "planner-cpu.json"
    there = json.loads(path.read_text())
    there["runs"]["toy-lora"]["wall_seconds"] = -1.0  # a mark: what is measured again loses it
    there["runs"]["toy-refused"] |= {"wall_seconds": -1.0, "why_not": ["it was cut off"]}
    path.write_text(json.dumps(there))
    kept = bench(tmp_path, "--works", "toy-lora", "toy-refused", "--keep")["runs"]
    assert kept["toy-lora"]["wall_seconds"] == -1.0
    assert kept["toy-refused"]["wall_seconds"] > 0 and not kept["toy-refused"]["why_not"]


@pytest.mark.long
def test_a_sweep_of_the_tiny_model_meets_real_out_of_memory_errors(tmp_path: Path) -> None:
    sweep = bench(tmp_path, "--works", "sweep-toy")["sweeps"]["sweep-toy"]
    assert not sweep["why_not"]
    assert {(one["batch_size"], one["checkpointed_layers"]) for one in sweep["combinations"]} >= {
        (4, 0),
        (4, 6),
    }
    assert all(one["tokens_per_second"] > 0 for one in sweep["combinations"])
    held, whole = sweep["budgets"]
    for budget in (held, whole):
        assert {*budget["choices"]} == {"plan", "probe"}
        assert all(
            chosen["fits"]
            and 0 < chosen["tokens_per_second"] <= budget["best"]["tokens_per_second"]
            for chosen in budget["choices"].values()
        )
    (found,) = held["largest"]
    assert found["plan"] > 0 and found["probe"] is None, "a CPU's probe fits nothing"
    assert 0 < found["true"] < 2 * SWEEPS["sweep-toy"].most_tokens, "memory was the limit"
    assert whole["largest"] == []
