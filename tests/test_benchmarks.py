"""The benchmarks: which runs count, how logs become speeds, and the pages of results."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from calls import outcome_of
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ours, report
from benchmarks.machine import ROOT, Machine
from benchmarks.planner.figures import SWEEPS
from benchmarks.planner.report import markdown as planner_page
from benchmarks.planner.runs import find_faults, read_figures
from benchmarks.processes import Ended, clean_environment, run_limited
from benchmarks.promised_hardware import cases_of
from benchmarks.results import Result, Results
from benchmarks.samples import Inputs, Samples, TokenCount
from benchmarks.verdict import check_run, deviation, window_means
from benchmarks.workloads import ARMS, WORKLOADS, Case
from sft_play.commands import call as calls
from sft_play.plan.memory import PHASES
from sft_play.plan.step import Layout
from sft_play.runs.metrics import MetricsLine
from sft_play.runs.report import LoggedLoss, ReportedPeaks, RunReport

GIB = 2**30
RESULTS = ROOT / "benchmarks" / "results"
OURS = ARMS["ours-bnb"]


# When a speed counts

FALLING = [10 - 0.2 * step for step in range(25)]
TOKENS = [TokenCount(100, 20)] * 25
RAGGED = WORKLOADS["1b-ragged"]


def logged(losses: list[float]) -> list[LoggedLoss]:
    return [LoggedLoss(5 * number, loss) for number, loss in enumerate(losses, start=1)]


def honest(**changed: object) -> Result:
    figures = {"tokens": 2000, "labelled_tokens": 400, "least_grad_norm": 0.1, "rows_used": 800}
    losses = changed.pop("losses", logged(window_means(FALLING, 5)))
    return Result("1b-ragged", "hf-best", losses=losses, figures=figures | changed)


def test_the_deviation_is_that_of_the_worst_window_that_both_curves_have() -> None:
    curve = [9.6, 8.6 * 1.03, 7.6, 6.6, 5.6, 99.0]
    assert deviation(logged(curve), FALLING, 5) == pytest.approx(0.03)
    assert deviation(logged([9.6]), FALLING[:4], 5) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"losses": logged([9.8, 8.8, 7.8, 6.8, 5.8])}, "off the reference"),
        ({"losses": logged([float("nan")] * 5)}, "not finite"),
        ({"losses": []}, "not finite"),
        ({"losses": logged([9.6, 8.6])}, "falls by 18%"),
        ({"untrained": ["layers.0.q_proj.lora_B"]}, "1 adapters got no gradient"),
        ({"least_grad_norm": 0.0}, "without a gradient"),
        ({"tokens": 1999}, "trained 1999 tokens"),
        ({"rows_used": 799}, "799 rows of 800"),
    ],
)
def test_a_run_counts_only_if_it_trained_the_rows_to_the_reference_loss(changed, reason) -> None:
    faults = check_run(RAGGED, ARMS["hf-best"], honest(**changed), FALLING, TOKENS)
    assert bool(faults) == bool(reason)
    assert reason in "; ".join(faults)


def test_a_run_that_failed_does_not_count_and_says_why() -> None:
    result = replace(honest(), status="out of memory", cause="CUDA")
    faults = check_run(RAGGED, ARMS["hf-best"], result, FALLING, TOKENS)
    assert faults == ["out of memory: CUDA"]


# From logs to speeds


def test_the_time_of_some_steps_is_that_of_their_logs_since_the_first() -> None:
    times = {5: 9.0, 10: 0.5, 12: 1.0, 20: 7.0}
    lines = {step: MetricsLine(step, 20, 0.0, {"step_seconds": times[step]}) for step in times}
    assert ours.seconds_between(lines, 5, 12) == 5 * 0.5 + 2 * 1.0
    with pytest.raises(AssertionError, match="step 11 was not logged"):
        ours.seconds_between(lines, 5, 11)


@pytest.mark.parametrize(
    ("log", "status", "found"),
    [
        (
            "GPU 0\nneeds 17.2 GiB\nexit class 15 (out_of_memory)\n",
            2,
            ("refused", "needs 17.2 GiB"),
        ),
        ("one\ntwo\n", 1, ("failed", "ended with 1: one two")),
        ("one\n", None, ("out of time", "not done within 300 s")),
    ],
)
def test_a_run_without_a_report_says_why(tmp_path: Path, log: str, status, found) -> None:
    (tmp_path / "log").write_text(log)
    ended = Ended(status, 300, 0.0, 1.0, tmp_path / "log")
    made = Inputs(tmp_path, tmp_path)
    result = ours.read_run(Case(WORKLOADS["toy-fixed"], OURS), made, tmp_path, ended)
    assert (result.status, result.cause) == found


def test_our_arm_gets_no_setting_that_concerns_speed(tmp_path: Path) -> None:
    case = Case(WORKLOADS["8b-lora-2048"].scaled(2), OURS, 2, "fsdp")
    settings = ours.make_settings(case, Inputs(tmp_path, tmp_path), tmp_path, 25)
    command = ours.make_command(case, settings)
    assert command[:2] == ["make", "train-distributed"]
    assert {"NUM_GPUS=2", "TRAIN_STRATEGY=fsdp", "TRAIN_EFFECTIVE_BATCH_SIZE=8"} < set(command)
    chosen = {"BATCH_SIZE", "GRAD_ACCUM", "PACKING", "GRADIENT_CHECKPOINTING", "OPTIM"}
    assert not settings.keys() & {f"TRAIN_{name}" for name in chosen}
    assert clean_environment({"TRAIN_OPTIM": "sgd", "MAKEFLAGS": "-n", "A": "b"}) == {"A": "b"}


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    command = ["bash", "-c", "sleep 600 & echo $!; wait"]
    ended = run_limited(command, tmp_path / "log", 1.0, tmp_path, os.environ)
    assert ended.status is None
    child, deadline = int(ended.log.read_text()), time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{child} still runs"
        time.sleep(0.05)


# Several GPUs


def test_a_speed_up_is_over_one_gpu_with_its_own_rows_and_only_of_speeds_that_count() -> None:
    weak = Result("8b-lora-2048-times-2", "ours-bnb", 2, "ddp", tokens_per_second=19_600.0)
    one = Result("8b-lora-2048", "ours-bnb", tokens_per_second=10_000.0)
    strong = replace(one, gpus=2, strategy="fsdp", why_not=["its loss is off"])
    machine = Machine("NVIDIA H200", "3.12", {}, None, None)
    page = report.markdown(Results(machine=machine, gpus=2, results=[one, weak, strong]))
    assert "| ours-bnb | 2 | ddp | 8 | 19,600 | 9,800 | 1.96 | 98.0% |" in page
    assert "| ours-bnb | 2 | fsdp | 4 | ~~10,000~~ | ~~5,000~~ | - | - |" in page


# Limited memory


def plan_of(case: Case):
    workload = case.workload
    settings = ours.make_settings(case, Inputs(Path(), workload.shape), Path(), steps=1)
    kept = {name: settings[name] for name in settings if not name.endswith(("PATH", "DIR", "PY"))}
    size = workload.card if workload.free_gib is None else f"{workload.free_gib}GiB"
    call = calls.read_call(None, [], gpus=f"{case.gpus}x{size}", environ={**os.environ, **kept})
    return calls.plan_run(call, calls.load_config(call), distributed=case.gpus > 1).plan


@pytest.mark.parametrize("name", [each.name for each in WORKLOADS.values() if each.promise])
def test_a_machine_of_the_guide_runs_its_shipped_config_and_fits(name: str) -> None:
    (case,) = cases_of(WORKLOADS[name])
    plan = plan_of(case)
    assert plan.fits and plan.layout.rows_per_step == case.workload.rows_per_step
    assert plan.memory.predicted_peak < case.workload.promise[0] * 1e9


def test_what_one_small_gpu_has_no_room_for_is_planned_on_two() -> None:
    one, two = map(plan_of, cases_of(WORKLOADS["8b-lora-17-gib"]))
    assert not one.fits
    assert two.fits and two.is_fsdp and two.layout.rows_per_step == 4


# The planner


@pytest.mark.parametrize(("batch_size", "is_known"), [(4, True), (2, False)])
def test_the_closed_form_counts_only_for_the_step_that_was_trained(batch_size, is_known) -> None:
    phases = {name: {"total": (number + 1) * GIB} for number, name in enumerate(PHASES)}
    chosen = {"per_device_batch_size": 4, "checkpointed_layers": 0}
    before = {**chosen, "budget_bytes": 9, "phases": phases, "speed": {"tokens_per_second": 900.0}}
    layout = Layout(batch_size, grad_accum=2, world_size=1, max_seq_len=2048)
    case = Case(replace(WORKLOADS["1b-lora-2048"], card="H200"), OURS)
    trained = replace(plan_of(case), layout=layout, probe=None)
    predicted = read_figures(before, trained, RunReport()).predicted
    assert (predicted.peak == 6 * GIB) == (predicted.tokens_per_second == 900) == is_known


def test_a_refusal_counts_only_for_what_cannot_fit_and_a_peak_must_be_measured() -> None:
    before = {"per_device_batch_size": 1, "checkpointed_layers": 0, "budget_bytes": 9, "phases": {}}
    found = read_figures(before, None, RunReport(global_step=6, peak_bytes=ReportedPeaks(GIB)))
    for name, faults in (("14b-full-float32", 0), ("14b-lora", 1)):
        refused = Result(name, "ours-bnb", status="refused", cause="needs 248 GiB")
        assert len(find_faults(Case(WORKLOADS[name], OURS), refused, found)) == faults
    case = Case(WORKLOADS["14b-lora"], OURS)
    done = Result(*case.key, losses=[LoggedLoss(6, 2.5)], figures={"least_grad_norm": 1.0})
    assert find_faults(case, done, found) == ["its peak was not measured"]


# Results and pages


PAGES = ["speed-h200", "scaling-h200", "scaling-h100", "promised-h200", "planner-h200"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_results_print_and_results_are_read_as_written(name, tmp_path) -> None:
    results = Results.read(RESULTS / f"{name}.json")
    page = planner_page(results) if name.startswith("planner") else report.markdown(results)
    assert page == (ROOT / f"docs/evidence/{name}.md").read_text(encoding="utf-8")
    results.path = tmp_path / "again.json"
    results.write()
    assert json.loads(results.path.read_text()) == json.loads(
        (RESULTS / f"{name}.json").read_text()
    )


def bench(module: str, folder: Path, *words: str) -> Results:
    """Run a toy benchmark; return its results."""
    path = folder / f"{module}-toy.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--toy", "--results", str(path)]
    command += ["--folder", str(folder / "work"), *words]
    environ = clean_environment(os.environ)
    done = outcome_of(command, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return Results.read(path)


@pytest.mark.long
def test_the_arms_agree_on_the_tiny_model_and_the_reference_is_trained_once(tmp_path) -> None:
    words = ["--works", "toy-ragged", "--arms", "hf-best", "unsloth-best", "ours-bnb"]
    results = bench("speed", tmp_path, *words)
    for name in ("hf-best", "ours-bnb"):
        result = results.find("toy-ragged", name)
        assert result.counts, result.why_not
        assert result.off < 1e-4, "float32 throughout: the same rows, adapters and steps"
    failed = results.find("toy-ragged", "unsloth-best")
    assert failed.status == "failed" and "unsloth" in failed.cause
    page = (tmp_path / "speed-toy.md").read_text()
    assert page == report.markdown(results) and page.index("unsloth-best") > page.index("hf-best")
    reference = tmp_path / "work" / "toy-ragged-10" / "reference"
    (reference / "report.json").unlink()
    bench("speed", tmp_path, *words, "--keep")
    assert not (reference / "report.json").exists()


@pytest.mark.long
def test_of_chats_the_arms_agree_on_the_rows_and_each_counts_its_tokens(tmp_path) -> None:
    words = ["--works", "toy-chats", "--arms", "hf-best", "ours-bnb"]
    results = bench("speed", tmp_path, *words)
    peer, our = (results.find("toy-chats", name) for name in ("hf-best", "ours-bnb"))
    for result in (peer, our):
        assert result.counts, result.why_not
        speed = result.figures["rows_per_second"] * result.figures["tokens_per_row"]
        assert speed == pytest.approx(result.tokens_per_second, rel=0.2)
    samples, distinct = (our.figures[f"{name}tokens_per_row"] for name in ("", "distinct_"))
    assert samples > distinct > peer.figures["tokens_per_row"], "reasoning twice, then once"
    inputs = Inputs(tmp_path / "work" / "toy-chats-4", "")
    ids, labelled = Samples.read(inputs.samples).row(0)
    tok = AutoTokenizer.from_pretrained(tmp_path / "work" / "models" / "toy-qwen3-with-reasoning")
    trained = tok.decode(ids[labelled])
    assert trained.count("<|im_end|>") == trained.count("</think>") == 3


@pytest.mark.long
def test_the_planner_reads_runs_and_a_sweep_meets_real_out_of_memory_errors(tmp_path) -> None:
    results = bench("planner", tmp_path, "--works", "toy-lora", "toy-refused", "sweep-toy")
    assert all(result.counts for result in results.results), results.results
    held, _ = results.find("sweep-toy", "ours-bnb").figures["budgets"]
    assert {*held["choices"]} == {"plan", "probe"}
    assert 0 < held["largest"][0]["true"] < 2 * SWEEPS["sweep-toy"].most_tokens
