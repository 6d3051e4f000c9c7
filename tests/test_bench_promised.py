"""benchmarks.promised_hardware: what each case needs, how a run is read, and what the page says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import GIB, card

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inputs import fixed_rows
from benchmarks.machine import ROOT, Machine
from benchmarks.promised_hardware.__main__ import (
    make_command,
    on_these_gpus,
    parse_arguments,
    plan_of,
    runs_of,
)
from benchmarks.promised_hardware.cases import CASES
from benchmarks.promised_hardware.report import markdown
from benchmarks.promised_hardware.results import Outcome, PromisedResults, Trained, read_outcome
from sft_play.config.loader import load

QWEN = CASES["qwen-7b-4090"]
LORA = CASES["8b-lora-17-gib"]
REFUSED = "train.batch_size=auto: even 1 row of 2048 tokens needs 17.2 GiB; try TUNING_MODE=qlora"
PAGES = sorted((ROOT / "benchmarks" / "results").glob("promised-*.json"))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.promise])
def test_a_machine_of_the_guide_runs_the_numbers_of_its_shipped_config_and_fits(name: str) -> None:
    case = CASES[name]
    train = load(ROOT / case.config, {}, ()).config.train
    assert (train.batch_size, train.grad_accum) == (case.batch_size, case.grad_accum)
    plan = plan_of(case, case.gpus)
    assert plan.fits
    assert plan.layout.rows_per_step == case.step_rows
    assert plan.memory.predicted_peak < case.promise.gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "fits_alone"), [("8b-lora-17-gib", False), ("8b-qlora-7.7-gib", True)]
)
def test_what_one_gpu_has_hardly_room_for_is_planned_on_two(name: str, fits_alone: bool) -> None:
    case = CASES[name]
    assert runs_of(case) == [1, 2]
    assert plan_of(case, 1).fits == fits_alone
    two = plan_of(case, 2)
    assert two.fits and two.is_fsdp
    assert two.layout.rows_per_step == plan_of(case, 1).layout.rows_per_step == 4


def test_a_run_takes_its_memory_first_and_then_what_the_guide_says(tmp_path: Path) -> None:
    words = make_command(QWEN, 2, tmp_path, tmp_path, tmp_path, steps=6)
    assert words[1:6] == ["-m", "benchmarks.smaller_gpus", "--leave", "23.64", "make"]
    assert words[6] == "train-distributed"
    assert {"NUM_GPUS=2", "TRAIN_BATCH_SIZE=6", "TRAIN_GRAD_ACCUM=4"} < set(words)
    alone = make_command(LORA, 1, tmp_path, tmp_path, tmp_path, steps=6)
    assert alone[6] == "train-bnb"
    assert not [word for word in alone if word.startswith(("NUM_GPUS", "TRAIN_STRATEGY"))]
    llama = CASES["llama-70b-h200"].on(gpus=None, grad_accum=1)
    assert make_command(llama, 4, tmp_path, tmp_path, tmp_path, steps=6)[0] == "make"
    assert llama.step_rows == 64


def test_rows_that_score_a_run_are_none_that_it_trains_on(tmp_path: Path) -> None:
    fixed_rows(tmp_path / "rows.jsonl", 64, 8)
    fixed_rows(tmp_path / "held-out.jsonl", 64, 4, seed=1)
    trained = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert not set(trained) & set((tmp_path / "held-out.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("log", "status", "found"),
    [
        (f"GPU 0\n{REFUSED}\nexit class 15 (out_of_memory)\n", 2, ("refused", 15, REFUSED)),
        ("one\ntwo\n", 1, ("failed", None, "ended with 1: one two")),
        ("one\n", None, ("out of time", None, "not done within 300 s")),
    ],
)
def test_a_run_without_a_report_says_why(tmp_path: Path, log: str, status: int, found) -> None:
    (tmp_path / "log").write_text(log)
    outcome = read_outcome(status, 300, tmp_path)
    assert (outcome["status"], outcome.get("exit_class"), outcome["cause"]) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen"], "there is no case qwen; there are qwen-7b-4090"),
        (["--gpus", "9"], "--gpus 9: write a number from 1 to 8"),
        (["--steps", "1"], "the first is not timed"),
        (["--grad-accum", "0"], "write 1 or more"),
    ],
)
def test_an_option_that_cannot_be_is_refused(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "cases", "said"),
    [
        ([card()], [QWEN], "visible GPUs: 1; qwen-7b-4090 takes 2; --gpus takes another number"),
        (
            [card("a"), card("b")],
            [QWEN, CASES["llama-70b-h200"]],
            "visible GPUs: 2; llama-70b-h200 takes 4; name the others: qwen-7b-4090;",
        ),
        (
            [card("a"), card("b", used=130 * GIB)],
            [QWEN],
            "qwen-7b-4090 is to find 23.77 GiB free, and GPU 1 has 9.0",
        ),
    ],
)
def test_gpus_that_are_too_few_or_too_full_are_refused_before_anything_runs(
    plant, monkeypatch: pytest.MonkeyPatch, cards: list, cases: list, said: str
) -> None:
    plant(*cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit, match=said):
        on_these_gpus(cases)


@pytest.mark.parametrize(("gibibytes", "left"), [(80, None), (141, 79.1)])
def test_nothing_is_held_of_gpus_that_are_such_cards(
    plant, monkeypatch: pytest.MonkeyPatch, gibibytes: int, left: float | None
) -> None:
    plant(*(card(name, total=gibibytes * GIB) for name in "ab"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (case,) = on_these_gpus([CASES["gemma-27b-h100"]])
    assert case.leave_gib == left


def trained(**changed) -> Trained:
    values = {
        "strategy": "ddp",
        "batch_size": 6,
        "micro_batches": 4,
        "checkpointed_layers": 28,
        "planned_gib": 11.03,
        "measured_gib": 10.9,
        "reserved_gib": [9.7, 9.6],
        "tokens_per_second": 24000.0,
        "losses": [12.0, 11.0],
    }
    return Trained(**values | changed)


def test_the_page_has_what_was_measured_beside_what_was_promised(tmp_path: Path) -> None:
    path = tmp_path / "promised-h200.json"
    results = PromisedResults(machine=Machine("NVIDIA H200", "3.12", {}, None, None), path=path)
    results.add(Outcome(QWEN.name, 2, "make a", "done", 60, 12, trained=trained()))
    results.add(Outcome(LORA.name, 2, "make b", "done", 60, 12, trained=trained(strategy="fsdp")))
    results.add(Outcome(LORA.name, 1, "make c", "refused", 9, 12, exit_class=15, cause=REFUSED))
    page = markdown(PromisedResults.read(path))
    assert (
        "| Qwen2.5-7B-Instruct, `configs/rtx4090_sli.yaml` "
        "| 2 x NVIDIA H200 held to 23.77 GiB (a NVIDIA GeForce RTX 4090) | ddp | 6 x 2 x 4 "
        "| 10.9 | 11.0 | about 18 GB | 24,000 | 12,000 | about 1,200 | 12.000 to 11.000: it tells too little |"
    ) in page
    assert f"| refused, class 15: {REFUSED} |" in page
    assert page.index("refused, class 15") < page.index("| trained, fsdp |")
    cells = {line.count("|") for line in page.splitlines() if line.startswith("| Llama")}
    assert cells == {10}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_is_what_its_results_print(path: Path) -> None:
    assert markdown(PromisedResults.read(path)) == (ROOT / f"docs/{path.stem}.md").read_text()


@pytest.mark.long
def test_the_toy_is_trained_on_one_process_and_on_two(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.promised_hardware", "--toy", "--steps", "12"]
    command += ["--folder", str(tmp_path), "--results", str(tmp_path / "toy.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads((tmp_path / "toy.json").read_text())["outcomes"]
    assert [(found["gpus"], found["status"]) for found in outcomes] == [(1, "done"), (2, "done")]
    for found in outcomes:
        assert len(found["trained"]["losses"]) == 12
        assert len(found["trained"]["reserved_gib"]) == found["gpus"]
        assert found["trained"]["losses"][-1] < found["trained"]["losses"][0]
