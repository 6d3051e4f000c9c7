"""Several processes, started as a user starts them: equal to one process, honest about their number, and none left behind.

Slow: each launch imports torch twice.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from calls import outcome_of
from make_runs import QUIET, Launched
from marks import long
from rank_processes import SECONDS, start_rank, train_on_two, wait_for, work
from run_files import run_json, variables_of
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sft_play.plan.launch import free_port
from sft_play.runs import metrics
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
# 10 rows, 8 a step: two steps an epoch, and the second holds 2 rows and 6 fillers
STEPS = {
    "train.max_steps": None,
    "train.epochs": 2,
    "train.batch_size": 2,
    "train.learning_rate": 1e-3,
    "train.save_strategy": "no",
    "train.predict_with_generate": True,
}
STAGE = {2: "configs/deepspeed_zero2.json", 3: "configs/deepspeed_zero3.json"}


@pytest.fixture(scope="module")
def launch(settings_of, taught_base, tmp_path_factory):
    """A function that starts a make target with quick settings; what it left running is killed in the end."""
    started: list[Launched] = []

    def start(target, changes, **variables):
        started.append(
            Launched(
                tmp_path_factory.mktemp("out"),
                target,
                settings_of({"model.name": taught_base, **changes}),
                **variables,
            )
        )
        return started[-1]

    yield start
    for launched in started:
        if launched.make.poll() is None:
            os.killpg(launched.make.pid, signal.SIGKILL)
        for rank in launched.ranks():
            rank.kill()


@pytest.fixture(scope="module")
def pair(launch):
    """A function that returns a finished LoRA run of two processes that make launched, the same one to every test; `engine` is ddp or a ZeRO stage."""
    runs: dict[object, Launched] = {}

    def run(engine):
        if engine not in runs:
            changes = {**STEPS, "train.grad_accum": 2}
            ddp = engine == "ddp"
            runs[engine] = (
                launch("train-distributed", changes)
                if ddp
                else launch("train-deepspeed", changes, DEEPSPEED_CONFIG=STAGE[engine])
            )
            runs[engine].finish()
        return runs[engine]

    return run


@pytest.fixture(scope="module")
def alone(plan_run, run_worker, taught_base):
    """A function that returns the run of one process with the rows of a step of two, the same one to every test."""
    runs: dict[str, RunFolder] = {}

    def run(mode):
        if mode not in runs:
            runs[mode] = plan_run(
                {**STEPS, "model.name": taught_base, "tuning.mode": mode, "train.grad_accum": 4}
            )
            assert run_worker(runs[mode]) == 0
        return runs[mode]

    return run


def differences(one: RunFolder, two: RunFolder, mode: str) -> dict[str, float]:
    """Return the largest absolute difference in logged losses, scores, and saved weights."""
    a, b = run_json(one), run_json(two)
    steps = [entry["step"] for entry in a["loss"]]
    assert steps == [entry["step"] for entry in b["loss"]] == [1, 2, 3, 4]
    before, after = (
        load_file(next(folder.weights(mode).glob("*.safetensors"))) for folder in (one, two)
    )
    assert before.keys() == after.keys()
    return {
        "loss": max(abs(x["loss"] - y["loss"]) for x, y in zip(a["loss"], b["loss"], strict=True)),
        **{
            f"{name} {when}": abs(a["metrics"][when][name] - b["metrics"][when][name])
            for name in ("eval_loss", "rougeL")
            for when in ("before", "after")
        },
        "weights": max((before[name] - after[name]).abs().max().item() for name in before),
    }


def check_parity(one: RunFolder, two: RunFolder, engine: object, mode: str) -> None:
    """Assert that losses, scores, answers and weights of a run of two processes are those of one."""
    found = differences(one, two, mode)
    print(
        f"\nparity {engine} {mode} "
        + " ".join(f"{name}={value:.1e}" for name, value in found.items())
    )
    assert (two.evaluation / "after.jsonl").read_text() == (
        one.evaluation / "after.jsonl"
    ).read_text()
    assert run_json(one)["metrics"]["after"]["rougeL"] > 0.5, "empty answers are equal too"
    # Adam divides by the root of tiny second moments, four times, and ZeRO-3 has the plain loss
    # where one process has the fused one
    assert found.pop("weights") <= (5e-5 if engine == 3 else 5e-6)
    assert max(found.values()) <= 1e-6


CASES = [
    long("ddp", "qlora"),
    long(2, "full"),
    long(3, "full"),
    long("ddp", "full"),
    long(3, "lora"),
]


@pytest.mark.parametrize("engine, mode", CASES)
def test_two_processes_train_as_one(plan_run, taught_base, alone, engine, mode):
    """Float32, rows of unequal length, accumulation, a last step that is partly filled."""
    settings = {**STEPS, "model.name": taught_base, "tuning.mode": mode, "train.grad_accum": 2}
    folder = plan_run(settings, num_gpus=2, deepspeed_config=STAGE.get(engine))
    train_on_two(folder)
    check_parity(alone(mode), folder, engine, mode)


@pytest.mark.parametrize("engine", ["ddp", long(2)])
def test_two_processes_that_make_launches_train_as_one(pair, alone, engine):
    check_parity(alone("lora"), pair(engine).folder, engine, "lora")


@pytest.mark.parametrize("engine", ["ddp", long(2)])
def test_two_processes_are_two_and_say_so_once(pair, engine):
    launched = pair(engine)
    report = run_json(launched.folder)
    assert (report["status"], report["world_size"], report["exit_class"]) == ("done", 2, 0)
    assert (report["engine"], report["strategy"]) == (
        ("DistributedDataParallel", "ddp") if engine == "ddp" else ("DeepSpeedEngine", "deepspeed")
    )
    logs = sorted(path.name for path in launched.folder.logs.glob("*.log"))
    assert logs == ["rank-0.log", "rank-1.log"]
    samples = ("prompt ", "expected ", "before  ", "after  ")  # two answers may be alike
    lines = [
        line
        for line in launched.log.read_text().splitlines()
        if line.strip() and not line.startswith(samples)
    ]
    assert any(line.startswith("ranks world=2 ") for line in lines) and any(
        line.startswith("step 4/4 loss=") for line in lines
    )
    assert len(lines) == len(set(lines)), "a line was printed twice"


def test_the_memory_of_both_ranks_is_printed_and_recorded(pair):
    launched = pair("ddp")
    ranks = run_json(launched.folder)["memory_by_rank"]
    assert [(rank["rank"], rank["device"]) for rank in ranks] == [(0, "cpu"), (1, "cpu")]
    for rank in ranks:
        assert 0 < rank["before_bytes"] <= rank["peak_bytes"] < rank["total_bytes"]
        peak = round(rank["peak_bytes"] / 2**30, 3)
        line = f"Process {rank['rank']}: Peak resident = {peak} GB ("
        assert launched.log.read_text().count(line) == 1
    assert "Training on 2 processes in parallel (ddp): " in launched.log.read_text()


@pytest.mark.parametrize("engine", ["ddp", long(2)])
def test_the_losses_of_the_ranks_weighted_by_their_tokens_are_the_logged_loss(pair, engine):
    folder = pair(engine).folder
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()

    def values(name):
        return {event.step: event.value for event in events.Scalars(name)}

    logged = {entry["step"]: entry["loss"] for entry in run_json(folder)["loss"]}
    assert len(logged) == 4
    ranks = range(2)
    losses = [values(f"loss/rank_{rank}") for rank in ranks]
    shares = [values(f"token_share/rank_{rank}") for rank in ranks]
    for step, loss in logged.items():
        assert sum(shares[rank][step] for rank in ranks) == pytest.approx(1)
        # a rank that has nothing but fillers has no loss
        parts = [shares[rank][step] * losses[rank].get(step, 0.0) for rank in ranks]
        assert sum(parts) == pytest.approx(loss, rel=1e-5)
        assert values("train/loss")[step] == pytest.approx(loss, rel=1e-6)
    assert losses[0][1] != losses[1][1]
    seconds = values("train/step_seconds")
    assert min(seconds.values()) > 0
    parts = ("data", "forward", "backward", "optimizer")
    for step in list(seconds)[1:]:  # with the first step's time goes that of compiling
        assert sum(values(f"step/{part}_seconds")[step] for part in parts) < 1.1 * seconds[step]
    assert {f"process/{rank}/rss_gib" for rank in ranks} <= set(events.Tags()["scalars"])
    has_communication = "step/communication_seconds" in events.Tags()["scalars"]
    lines = metrics.read_metrics(folder.metrics).lines
    has_waits = any("step/communication_seconds" in line.values for line in lines)
    assert has_communication == has_waits == (engine == "ddp")


@pytest.mark.long
def test_two_processes_of_a_bare_torchrun_train_as_one(settings_of, taught_base, alone, tmp_path):
    """`torchrun scripts/train.py`, without make; the settings are variables of the shell."""
    settings = settings_of({**STEPS, "model.name": taught_base, "train.grad_accum": 2})
    environ = variables_of({**settings, "train.output_dir": tmp_path})
    script = (str(ROOT / "scripts" / "train.py"), "--config", "tests/fixtures/empty.yaml")
    torchrun(*script, "--set", "train.run_name=bare", CUDA_VISIBLE_DEVICES="", **environ)
    folder = RunFolder(tmp_path / "bare")
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["bare"], "one writer"
    assert run_json(folder)["world_size"] == 2
    check_parity(alone("lora"), folder, "ddp", "lora")


def note_ddp_settings(folder: Path) -> None:
    """Make a rank's check of its engine write down how DDP was set up."""

    from sft_play.training import worker

    def note(model, strategy):
        group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        found = [
            model.find_unused_parameters,
            model.bucket_bytes_cap,
            model.broadcast_buffers,
            group.options._timeout.total_seconds(),
        ]
        (folder / f"found-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))

    worker.check_engine = note


def test_settings_of_ddp_reach_its_wrapper_and_the_process_group(plan_run):
    settings = {
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 3,
        "ddp_broadcast_buffers": True,
        "ddp_timeout": 77,
    }
    folder = plan_run(
        {f"train.{name}": value for name, value in settings.items()} | {"train.max_steps": 1},
        num_gpus=2,
    )
    train_on_two(folder, note_ddp_settings, folder.path)
    assert [json.loads((folder.path / f"found-{rank}.json").read_text()) for rank in (0, 1)] == [
        [True, 3 * 2**20, True, 77.0]
    ] * 2


def torchrun(*script: str, **environ: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        *script,
    ]
    done = outcome_of(command, {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **environ}, SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


# Signals to what make has launched

LONG = {"train.max_steps": 3000, "train.save_strategy": "no", "train.predict_with_generate": False}


def check_gone(launched: Launched) -> None:
    """Assert that make has failed and every process below it has ended."""
    assert launched.make.wait(60) != 0
    _, alive = psutil.wait_procs(launched.everyone, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


def check_stopped(launched: Launched) -> int:
    """Assert that a run stopped on request with a checkpoint and left no process; return its step."""
    check_gone(launched)
    report = run_json(launched.folder)
    assert (report["status"], report["exit_class"]) == ("stopped", 75), launched.log.read_text()[
        -3000:
    ]
    assert (
        launched.folder.checkpoints / f"checkpoint-{report['global_step']}" / "stamp.json"
    ).is_file()
    return report["global_step"]


@pytest.mark.faults
def test_a_signal_to_a_launched_rank_stops_all_of_them_with_a_checkpoint(launch):
    launched = launch("train-distributed", LONG)
    launched.wait_for("step 2/")
    launched.ranks()[1].terminate()
    assert 2 <= check_stopped(launched) < 3000


@pytest.mark.faults
def test_interrupting_deepspeed_on_the_terminal_stops_it_with_a_checkpoint_that_resumes(
    launch, losses_of
):
    """Its launcher passes the interrupt on, which all processes get, too."""
    launched = launch("train-deepspeed", LONG)
    launched.wait_for("step 2/")
    os.killpg(launched.make.pid, signal.SIGINT)
    step = check_stopped(launched)
    again = launch(
        "train-deepspeed",
        {**LONG, "train.max_steps": step + 2, "train.resume_from": launched.folder.path},
    )
    again.finish()
    curve = losses_of(again.folder)
    assert len(curve) == step + 2 and curve[:step] == [
        entry["loss"] for entry in run_json(launched.folder)["loss"]
    ]


@pytest.mark.faults
def test_a_killed_launched_rank_takes_the_others_with_it(launch):
    launched = launch("train-distributed", LONG)
    launched.wait_for("step 2/")
    launched.ranks()[1].kill()
    check_gone(launched)
    report = run_json(launched.folder)
    assert (report["status"], report["exit_class"]) == ("failed", 17)
    assert report["cause"].startswith("rank 1 ended without a word: ")


@pytest.mark.faults
def test_a_killed_launcher_leaves_no_rank_behind(launch):
    launched = launch("train-distributed", LONG)
    launched.wait_for("step 2/")
    launched.ranks()[0].parent().kill()
    check_stopped(launched)


# Signals to ranks without a launcher, whose own signals end ranks too


def start_two(folder: RunFolder, prepare: Callable[[], None] | None = None) -> list[BaseProcess]:
    """Start two ranks and return them once the second step is done; `prepare()` comes first."""
    port = free_port()
    arguments = (folder.path, prepare)
    ranks = [start_rank(work, arguments, rank, port, folder.path / "output.txt") for rank in (0, 1)]
    log = folder.logs / "rank-0.log"
    deadline = time.monotonic() + SECONDS
    while not (log.exists() and "step 2/" in log.read_text()):
        assert all(rank.is_alive() for rank in ranks) and time.monotonic() < deadline
        time.sleep(0.05)
    return ranks


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(plan_run):
    folder = plan_run(LONG, num_gpus=2)
    ranks = start_two(folder)
    ranks[1].terminate()
    assert [wait_for(rank) for rank in ranks] == [75, 75]
    step = run_json(folder)["global_step"]
    assert run_json(folder)["status"] == "stopped" and 2 <= step < 3000
    assert (folder.checkpoints / f"checkpoint-{step}" / "stamp.json").is_file()


def give_up_soon() -> None:
    from sft_play.training import ranks

    ranks.TICK_SECONDS, ranks.GONE_SECONDS = 0.2, 0.6


def test_the_rank_that_is_left_of_two_says_that_the_other_is_gone(plan_run):
    folder = plan_run(LONG, num_gpus=2)
    ranks = start_two(folder, give_up_soon)
    ranks[1].kill()
    assert [wait_for(rank) for rank in ranks] == [17, -signal.SIGKILL]
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 17)
    assert report["cause"].startswith("rank 1 ended without a word: ")
