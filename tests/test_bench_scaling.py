"""benchmarks.scaling: which cases are compared with which, and what the tables say."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.loader import PROJECT_ROOT

sys.path.insert(0, str(PROJECT_ROOT))

from benchmarks.machine import Machine
from benchmarks.scaling.__main__ import choose_cases, every_loss, parse_arguments, powers_of_two
from benchmarks.scaling.report import markdown
from benchmarks.scaling.results import Case, CaseResult, ScalingResults
from benchmarks.speed.ours import LoggedStep, _seconds_between, make_command
from benchmarks.speed.results import ArmResult, ArmRun, Measurement, PeakShares, Verdict
from benchmarks.speed.samples import Inputs
from benchmarks.speed.workloads import ARMS, WORKLOADS, Launch, find_workload
from sft_play.runs.report import LoggedLoss

WORK = "8b-lora-2048"
ONE = Case(WORK, "ours-bnb", "single", 1, 1)
ONE_WITH_TWICE = Case(WORK, "ours-bnb", "single", 1, 2)
WEAK = Case(WORK, "ours-bnb", "ddp", 2, 2)
STRONG = Case(WORK, "ours-bnb", "fsdp", 2, 1)


def measured(speed: float, why_not: tuple[str, ...] = ()) -> ArmResult:
    run = ArmRun(
        "done",
        0.0,
        measured=Measurement(
            seconds=10.0,
            real_tokens=round(10 * speed),
            trained_tokens=round(2 * speed),
            ready_seconds=30.0,
            losses=[LoggedLoss(5, 2.0), LoggedLoss(10, 1.0)],
            least_grad_norm=1.0,
            untrained=[],
            peak_reserved_gib=40.0,
            peak_allocated_gib=None,
            predicted_gib=41.0,
            unhidden_communication=0.03,
        ),
    )
    verdict = Verdict(counts=not why_not, why_not=list(why_not), off=0.001)
    return ArmResult(run, verdict, PeakShares(), timed_steps=5, versions={}, commit=None)


def results(path: Path, found: dict[Case, ArmResult]) -> ScalingResults:
    machine = Machine("NVIDIA H200", "3.12", {}, 1.0, 1.0)
    cases = [CaseResult(case, result) for case, result in found.items()]
    return ScalingResults(machine=machine, path=path, gpus=2, cases=cases)


def test_a_speed_up_is_over_one_gpu_with_its_own_rows_and_a_loss_is_compared_on_the_same() -> None:
    assert (WEAK.baseline, WEAK.reference) == (ONE, ONE_WITH_TWICE)
    assert (STRONG.baseline, STRONG.reference) == (ONE, ONE)
    peer = replace(WEAK, arm="unsloth-best")
    assert peer.baseline.arm == "unsloth-best"
    assert peer.reference.arm == "ours-bnb"
    assert find_workload(WEAK.workload_name).rows_per_step == 2 * WORKLOADS[WORK].rows_per_step


def test_every_case_comes_after_those_that_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", "--works", WORK, "1b-ragged", "--gpus", "1", "2"])
    cases = list(choose_cases(parse_arguments(), [1, 2]))
    assert len(cases) == len(set(cases))
    for number, case in enumerate(cases):
        if case.gpus > 1:
            assert {case.baseline, case.reference} <= set(cases[:number])
    assert {case.strategy for case in cases} == {"single", "ddp", "fsdp", "zero2", "zero3"}
    assert Case(WORK, "unsloth-best", "ddp", 2, 2) in cases


def test_recorded_layers_are_scaled_from_one_gpu_that_records_them_and_have_its_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--works", WORK, "--weak", "--no-peer", "--graphs", "--strategies", "ep"]
    monkeypatch.setattr(sys, "argv", ["scaling", *words])
    recorded = Case(WORK, "ours-graphs", "ep", 2, 2)
    expected = [recorded.baseline, recorded.reference, recorded]
    assert list(choose_cases(parse_arguments(), [2])) == expected
    assert (recorded.baseline.arm, recorded.reference.arm) == ("ours-graphs", "ours-bnb")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "dpp"], "there is no dpp; there are ddp, fsdp, zero2, zero3"),
        (["--gpus", "2xH200"], 'GPUS: 2xH200 is no number of GPUs; write such as GPUS="1 2"'),
    ],
)
def test_a_word_that_means_nothing_is_refused_with_those_that_do(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", *words])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert said in capsys.readouterr().err


def test_our_command_names_processes_and_strategy_and_nothing_of_speed(tmp_path: Path) -> None:
    command = make_command(
        find_workload(WEAK.workload_name),
        ARMS["ours-bnb"],
        Inputs(tmp_path, tmp_path),
        tmp_path,
        steps=10,
        on_cpu=False,
        launch=Launch(2, "fsdp"),
    )
    assert command[:2] == ["make", "train-distributed"]
    assert {"NUM_GPUS=2", "TRAIN_STRATEGY=fsdp", "TRAIN_EFFECTIVE_BATCH_SIZE=8"} < set(command)
    assert not any(word.startswith("TRAIN_BATCH_SIZE") for word in command)


def test_a_guides_recipe_runs_beside_our_own_choice_of_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work = "8b-recipe-2048"
    monkeypatch.setattr(sys, "argv", ["scaling", "--works", work, "--gpus", "1", "2"])
    cases = list(choose_cases(parse_arguments(), [1, 2]))
    recipe = Case(work, "recipe", "ddp", 2, 2)
    assert {recipe, recipe.baseline, Case(work, "ours-bnb", "ddp", 2, 2)} <= set(cases)
    assert not any(case.arm == "recipe" and case.times < case.gpus for case in cases)
    commands = {}
    for arm in ("recipe", "ours-bnb"):
        commands[arm] = make_command(
            find_workload(recipe.workload_name),
            ARMS[arm],
            Inputs(tmp_path, tmp_path),
            tmp_path,
            steps=10,
            on_cpu=False,
            launch=Launch(2, "ddp"),
        )
    more = set(commands["recipe"]) - set(commands["ours-bnb"])
    assert more == {"TRAIN_BATCH_SIZE=8", "TRAIN_GRAD_ACCUM=4"}
    assert "TRAIN_EFFECTIVE_BATCH_SIZE=64" in commands["recipe"], "8 rows x 4 x 2 GPUs"


def test_the_table_has_speed_ups_beside_those_promised_and_strikes_out_what_does_not_count(
    tmp_path: Path,
) -> None:
    found = {
        ONE: measured(10_000),
        ONE_WITH_TWICE: measured(10_400),
        WEAK: measured(19_600),
        STRONG: measured(15_000, ("its loss is 3.00% off the reference, of 1.00%",)),
    }
    text = markdown(results(tmp_path / "r.json", found))
    assert "Measured on a host with 2 NVIDIA H200" in text
    assert (
        "| 2 | ours-bnb | ddp | 19,600 | 9,800 | 1.96 | 98.0% | 1.8 | 40.0 | 41.0 | 3.0% | 0.10% |"
    ) in text
    assert "| 2 | ours-bnb | fsdp | ~~15,000~~ | ~~7,500~~ | - | - | 1.8 |" in text


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    results(path, {ONE: measured(10_000), WEAK: measured(19_600)}).write()
    text = path.read_text(encoding="utf-8")
    again = ScalingResults.read(path)
    assert again.speedup(WEAK) == pytest.approx(1.96)
    again.write()
    assert path.read_text(encoding="utf-8") == text


def test_the_loss_of_each_step_is_that_of_its_window() -> None:
    assert every_loss(measured(1.0).run) == [2.0] * 5 + [1.0] * 5
    assert every_loss(ArmRun("failed", 0.0)) == []


def test_the_numbers_of_gpus_are_powers_of_two() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4]
    assert powers_of_two(8) == [1, 2, 4, 8]


def test_the_time_of_some_steps_is_that_of_their_logs_since_the_first() -> None:
    logged = {
        step: LoggedStep(clock=0.0, grad_norm=1.0, step_seconds=seconds)
        for step, seconds in ((5, 9.0), (10, 0.5), (12, 1.0), (20, 7.0))
    }
    assert _seconds_between(logged, 5, 12) == 5 * 0.5 + 2 * 1.0
    with pytest.raises(AssertionError, match="step 11 was not logged"):
        _seconds_between(logged, 5, 11)
