"""The inputs of the benchmarks, which speeds of `make bench` count, and a toy run of it."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record_files import read_rows

from benchmarks import inputs, smaller_gpus
from benchmarks.inputs import TINY, alpaca_rows, fixed_rows, ragged_rows
from benchmarks.machine import ROOT
from benchmarks.processes import busy_cores, clean_environment, run_limited
from benchmarks.speed import ours
from benchmarks.speed.report import markdown
from benchmarks.speed.results import (
    ArmRun,
    Measurement,
    SpeedResults,
    TokenCount,
    Verdict,
)
from benchmarks.speed.runner import Benchmark, Options, number_of_steps
from benchmarks.speed.samples import Inputs, Samples, make_inputs
from benchmarks.speed.verdict import check_run, deviation, window_means
from benchmarks.speed.workloads import ARMS, WARM_UP, WORKLOADS, runs_by_default
from sft_play.data.order import steps
from sft_play.runs.report import LoggedLoss


def test_alpaca_rows_are_the_same_each_time(tmp_path):
    for turn in ("first", "second"):
        alpaca_rows(tmp_path / f"{turn}-alpaca.jsonl", tmp_path / f"{turn}-messages.jsonl", rows=50)
    for shape in ("alpaca", "messages"):
        assert (tmp_path / f"first-{shape}.jsonl").read_bytes() == (
            tmp_path / f"second-{shape}.jsonl"
        ).read_bytes()


def test_alpaca_rows_say_the_same_in_both_shapes(tmp_path):
    alpaca_rows(tmp_path / "alpaca.jsonl", tmp_path / "messages.jsonl", rows=50)
    said = [
        [row.messages for row in read_rows(tmp_path / f"{shape}.jsonl")]
        for shape in ("alpaca", "messages")
    ]
    assert said[0] == said[1]


def test_alpaca_rows_have_the_lengths_of_alpaca(tmp_path):
    alpaca_rows(tmp_path / "alpaca.jsonl", tmp_path / "messages.jsonl", rows=2000)
    rows = [
        json.loads(line)
        for line in (tmp_path / "alpaca.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    words = [len(row["output"].split()) for row in rows]
    assert 40 <= statistics.median(words) <= 60
    assert max(words) > 6 * statistics.median(words), "a long tail"
    assert 0.35 < sum(bool(row["input"]) for row in rows) / len(rows) < 0.45


def rendered_lengths(path: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    turns = [
        [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        for row in rows
    ]
    return [
        len(
            tokenizer(tokenizer.apply_chat_template(one, tokenize=False), add_special_tokens=False)[
                "input_ids"
            ]
        )
        for one in turns
    ]


def test_rows_of_a_fixed_length_have_it_to_the_token(tmp_path: Path) -> None:
    fixed_rows(tmp_path / "rows.jsonl", tokens=100, rows=8)
    assert rendered_lengths(tmp_path / "rows.jsonl") == [100] * 8


def test_ragged_rows_have_a_long_tail_and_are_the_same_however_many_follow(tmp_path: Path) -> None:
    ragged_rows(tmp_path / "few.jsonl", rows=20, median=60, most=400)
    ragged_rows(tmp_path / "many.jsonl", rows=60, median=60, most=400)
    few, many = ((tmp_path / name).read_text().splitlines() for name in ("few.jsonl", "many.jsonl"))
    assert many[:20] == few
    lengths = rendered_lengths(tmp_path / "many.jsonl")
    assert 40 <= statistics.median(lengths) <= 90
    assert max(lengths) > 3 * statistics.median(lengths)


def test_our_shuffle_draws_the_rows_of_the_file_in_the_order_of_the_others(tmp_path: Path) -> None:
    work = WORKLOADS["toy-ragged"]
    inputs = make_inputs(work, steps=2, folder=tmp_path)
    rows = inputs.rows.read_text(encoding="utf-8").splitlines()
    in_order = (inputs.folder / "in-order.jsonl").read_text(encoding="utf-8").splitlines()
    drawn = [
        rows[place]
        for step in steps(len(rows), work.rows_per_step, seed=42, epoch=0)
        for place in step
    ]
    assert drawn == in_order != rows
    samples = Samples.read(inputs.samples)
    assert samples.lengths.tolist() == rendered_lengths(inputs.folder / "in-order.jsonl")
    ids, trained = samples.row(1)
    answer = json.loads(in_order[1])["answer"]
    assert (
        AutoTokenizer.from_pretrained(TINY).decode(ids[trained], skip_special_tokens=True).strip()
        == answer
    )


def logged(losses: list[float]) -> list[LoggedLoss]:
    return [LoggedLoss(WARM_UP * number, loss) for number, loss in enumerate(losses, start=1)]


FALLING = [10 - 0.2 * step for step in range(25)]
FOLLOWED = window_means(FALLING)


def test_a_curve_that_is_the_reference_is_not_off() -> None:
    assert pytest.approx([9.6, 8.6, 7.6, 6.6, 5.6]) == FOLLOWED
    assert deviation(logged(FOLLOWED), FALLING) == pytest.approx(0)


def test_the_worst_window_that_both_have_is_what_a_curve_is_off_by() -> None:
    assert deviation(logged([9.6, 8.6 * 1.03, 7.6, 6.6, 5.6, 99.0]), FALLING) == pytest.approx(0.03)
    assert deviation(logged([9.6]), FALLING[:4]) is None


def honest_run(**changed: object) -> ArmRun:
    honest = {
        "seconds": 2.0,
        "real_tokens": 2000,
        "trained_tokens": 400,
        "ready_seconds": 1.0,
        "losses": logged(FOLLOWED),
        "least_grad_norm": 0.1,
        "untrained": [],
        "peak_reserved_gib": 1.0,
        "peak_allocated_gib": None,
    }
    return ArmRun("done", started=0.0, measured=Measurement(**honest | changed))


TOKENS = [TokenCount(100, 20)] * 25


def test_an_arm_that_trained_the_rows_counts() -> None:
    verdict = check_run(WORKLOADS["1b-ragged"], ARMS["hf-best"], honest_run(), FALLING, TOKENS)
    assert verdict == Verdict(counts=True, why_not=[], off=pytest.approx(0))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"losses": logged([loss * 1.02 for loss in FOLLOWED])}, "off the reference"),
        ({"losses": logged([float("nan")] * 5)}, "not finite"),
        ({"losses": []}, "not finite"),
        ({"losses": logged(FOLLOWED[:2])}, "falls by 18%"),
        ({"untrained": ["layers.0.self_attn.q_proj.lora_B"]}, "1 adapters got no gradient"),
        ({"least_grad_norm": 0.0}, "without a gradient"),
        ({"real_tokens": 1999}, "trained 1999 tokens"),
        ({"rows_used": 799}, "799 rows of 800"),
    ],
)
def test_an_arm_that_did_not_does_not_count_and_the_table_says_why(
    changed: dict[str, object], reason: str
) -> None:
    run = honest_run(**changed)
    verdict = check_run(WORKLOADS["1b-ragged"], ARMS["hf-best"], run, FALLING, TOKENS)
    assert not verdict.counts
    assert reason in "; ".join(verdict.why_not)


def test_a_loss_that_hardly_falls_counts_for_nothing_whatever_it_follows() -> None:
    slow = [10 - 0.1 * step for step in range(25)]
    run = honest_run(losses=logged(window_means(slow)))
    verdict = check_run(WORKLOADS["1b-ragged"], ARMS["hf-best"], run, slow, TOKENS)
    assert verdict.off == pytest.approx(0)
    assert verdict.why_not == ["the reference's loss falls by 24%, of 25%"]


def test_a_run_that_failed_does_not_count_and_says_why() -> None:
    run = ArmRun("out of memory", started=0.0, error="CUDA out of memory")
    verdict = check_run(WORKLOADS["1b-ragged"], ARMS["hf-best"], run, FALLING, TOKENS)
    assert verdict == Verdict(False, ["out of memory: CUDA out of memory"], None)


def test_the_committed_results_read_and_write_the_same_json(tmp_path: Path) -> None:
    path = ROOT / "benchmarks" / "results" / "speed-h200.json"
    results = SpeedResults.read(path)
    results.path = tmp_path / "results.json"
    results.write()
    assert json.loads(results.path.read_text()) == json.loads(path.read_text())


def test_packed_arms_are_for_ragged_rows() -> None:
    assert not runs_by_default(WORKLOADS["8b-lora-2048"], ARMS["trl-packed"])
    assert runs_by_default(WORKLOADS["1b-ragged"], ARMS["trl-packed"])
    assert runs_by_default(WORKLOADS["8b-lora-2048"], ARMS["ours-bnb"])


def test_our_arm_is_told_nothing_of_speed() -> None:
    work = WORKLOADS["8b-lora-2048"]
    command = ours.make_command(
        work, ARMS["ours-bnb"], Inputs(Path("inputs"), Path("model")), Path("out"), 25, on_cpu=False
    )
    assert command[:2] == ["make", "train-bnb"]
    told = {word.partition("=")[0] for word in command[2:]}
    of_speed = {
        "TRAIN_BATCH_SIZE",
        "TRAIN_GRAD_ACCUM",
        "TRAIN_PACKING",
        "TRAIN_GRADIENT_CHECKPOINTING",
        "TRAIN_OPTIM",
        "MODEL_ATTN_IMPLEMENTATION",
    }
    assert not told & of_speed


def test_settings_of_the_callers_shell_stay_out_of_our_arm() -> None:
    assert clean_environment({"TRAIN_OPTIM": "sgd", "MAKEFLAGS": "-n", "PATH": "/bin"}) == {
        "PATH": "/bin"
    }


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    done = run_limited(
        ["bash", "-c", "sleep 600 & echo $!; wait"], tmp_path / "log", 1.0, tmp_path, os.environ
    )
    assert done is None
    child = int((tmp_path / "log").read_text())
    deadline = (
        time.monotonic() + 30
    )  # a signal is sent at once and takes effect when the kernel comes to it
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{child} still runs"
        time.sleep(0.05)


@pytest.mark.long
def test_the_whole_benchmark_runs_on_the_tiny_model_and_its_arms_agree(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed",
        "--toy",
        "--works",
        "toy-ragged",
        "--arms",
        "hf-best",
        "unsloth-best",
        "ours-bnb",
    ]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "work"), "--results", str(tmp_path / "toy.json")],
        cwd=ROOT,
        env={
            name: value
            for name, value in os.environ.items()
            if name not in ("WORKS", "ARMS", "STEPS", "SECONDS")
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "toy.json").read_text())
    arms = results["works"]["toy-ragged"]["arms"]
    for name in ("hf-best", "ours-bnb"):
        verdict, measured = arms[name]["verdict"], arms[name]["run"]["measured"]
        assert verdict["counts"], verdict["why_not"]
        # float32 throughout: the same rows, the same adapters, the same steps
        assert verdict["off"] < 1e-4
        assert measured["seconds"] > 0
        assert measured["real_tokens"] == arms["hf-best"]["run"]["measured"]["real_tokens"]
    failed = arms["unsloth-best"]["run"]
    assert failed["status"] == "failed" and "unsloth" in failed["error"]  # told, not hidden
    table = markdown(SpeedResults.read(tmp_path / "toy.json"))
    assert table == (tmp_path / "toy.md").read_text()
    assert table.index("| unsloth-best |") > max(
        table.index("| hf-best |"), table.index("| ours-bnb |")
    )


@pytest.mark.long
def test_a_reference_that_the_results_have_is_not_trained_again(tmp_path: Path) -> None:
    work, path = WORKLOADS["toy-fixed"], tmp_path / "results.json"
    report = tmp_path / "work" / "toy-fixed-5" / "reference" / "report.json"

    def refer() -> dict[str, object]:
        # the second time read back from the file
        results = SpeedResults.on_this_machine(path, True, "speed")
        options = Options(seconds=300, on_cpu=True, steps=5, keep=True)
        Benchmark(results, tmp_path / "work", options).run(work, [])
        return json.loads(path.read_text())["works"][work.name]

    found = refer()
    assert len(found["reference"]["losses"]) == 10 and report.exists()
    report.unlink()
    assert refer() == found and not report.exists()


@pytest.mark.long
def test_a_benchmark_that_is_told_to_stop_leaves_no_arm_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed",
        "--toy",
        "--works",
        "toy-fixed",
        "--arms",
        "hf-best",
        "--folder",
        str(tmp_path / "work"),
    ]
    bench = subprocess.Popen(
        [*command, "--results", str(tmp_path / "toy.json")], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    job = tmp_path / "work" / "toy-fixed-5" / "reference" / "job.json"
    while bench.poll() is None and not (job.exists() and arms_of(job)):
        time.sleep(0.1)
    (arm,) = arms_of(job)
    bench.terminate()
    assert bench.wait(30) == 128 + signal.SIGTERM
    assert not arms_of(job), arm


def arms_of(job: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(job) in (process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("text", ["12", "-5", "many", "2.5"])
def test_steps_that_end_between_two_losses_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"STEPS={text}.*multiple of 5"):
        number_of_steps(text)


@pytest.mark.parametrize("text", ["0", "5", "20"])
def test_steps_that_end_with_a_loss_are_taken(text):
    assert number_of_steps(text) == int(text)


# GPUs with less free memory


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_command_for_smaller_gpus_is_what_stands_behind_the_gib(separator: list[str]) -> None:
    command = ["make", "train-distributed", "CONFIG=tiny", "--silent"]
    found = smaller_gpus.arguments(["--leave", "23", *separator, *command])
    assert (found.leave, found.command) == (23.0, command)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--leave", "23"], "name the command"), (["--leave", "0", "make"], "--leave 0: write")],
)
def test_smaller_gpus_ask_for_a_command_and_some_memory_before_they_hold_any(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        smaller_gpus.arguments(words)
    assert sentence in capsys.readouterr().err


def test_cores_are_kept_busy_by_processes_that_end_with_the_benchmark() -> None:
    before = set(psutil.Process().children())
    with busy_cores():
        loops = set(psutil.Process().children()) - before
        assert len(loops) == len(os.sched_getaffinity(0))
    assert not any(loop.is_running() for loop in loops)


def test_no_busy_core_outlives_a_benchmark_that_is_killed() -> None:
    code = (
        "import time; from benchmarks.processes import busy_cores\n"
        "with busy_cores(): print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as one:
        one.stdout.readline()
        loops = psutil.Process(one.pid).children()
        one.kill()
    assert len(loops) == len(os.sched_getaffinity(0))
    assert not psutil.wait_procs(loops, timeout=10)[1]


@pytest.mark.parametrize("in_mxfp4", [False, True])
def test_a_random_model_repeats_its_layers_and_loads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_mxfp4: bool
) -> None:
    def tiny(shape: str, layers: int | None = None, as_published: bool = False) -> dict:
        sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "vocab_size": 2048}
        counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        return {"model_type": "gpt_oss", "num_hidden_layers": layers or 5, **sizes, **counts}

    monkeypatch.setattr(inputs, "model_settings", tiny)
    inputs.random_model("gpt-oss", tmp_path, in_mxfp4=in_mxfp4)
    assert len(list(tmp_path.glob("layer-*.safetensors"))) == 5
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    kinds = ["sliding_attention", "full_attention"]
    assert model.config.layer_types == [*kinds, *kinds, kinds[0]]
    weights = [layer.mlp.experts.down_proj for layer in model.model.layers]
    assert torch.equal(weights[4], weights[0]) and torch.equal(weights[3], weights[1])
    assert not torch.equal(weights[0], weights[1]) and weights[0].float().std() > 0.01
