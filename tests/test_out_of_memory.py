"""Memory runs out on one rank: all ranks end, and run.json has the cause of the first.

The next command keeps the effective batch.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from faults.processes import fail_in_step_3, run_out
from marks import long
from plan_examples import plan_for
from rank_processes import run_two_workers, start_rank, wait_for, work
from run_files import run_json
from test_plan_launch import ranks_of

from sft_play.commands import call as calls
from sft_play.config import invocation
from sft_play.errors import ConfigError, ExitClass, OutOfMemory, is_out_of_memory
from sft_play.plan import launch
from sft_play.plan.launch import free_port
from sft_play.plan.next_command import after_out_of_memory, smaller_settings
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun
from sft_play.runs import stamp
from sft_play.training.loop import TrainingLoop
from sft_play.training.out_of_memory import ASKED, FREE, parse_bytes

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
GIB = 2**30
CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 2.25 GiB. "
    "GPU 1 has a total capacity of 79.10 GiB of which 416.00 MiB is free. "
    "Process 7 has 78.69 GiB memory in use. "
    "Of the allocated memory 77.00 GiB is allocated by PyTorch"
)
CPU_WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4096 bytes. Error code 12"
)
TOO_MUCH = 2**50  # bytes, which no host has


# What to type next


@pytest.fixture(scope="module")
def planned(plan_run):
    """A run as it is planned, and its folder."""
    folder = plan_run({"train.batch_size": 4, "train.grad_accum": 3, "train.packing": False})
    return PlannedRun.read(folder), folder


def changed(
    run: PlannedRun, mode: str = "lora", eval_rows: int = 4, **layout: int | None
) -> PlannedRun:
    """Return a run with another mode, evaluation batch and layout."""
    train = run.config.train.model_copy(update={"eval_batch_size": eval_rows})
    tuning = run.config.tuning.model_copy(update={"mode": mode})
    config = run.config.model_copy(update={"train": train, "tuning": tuning})
    plan = replace(run.plan, layout=replace(run.plan.layout, **layout))
    return PlannedRun(config, plan)


@pytest.mark.parametrize(
    "phase, changes, expected",
    [
        (
            "backward",
            {"batch_size": 4, "grad_accum": 3},
            {"train.batch_size": 2, "train.grad_accum": 6},
        ),
        (
            "forward",
            {"batch_size": 15, "grad_accum": 1},
            {"train.batch_size": 5, "train.grad_accum": 3},
        ),
        (
            "forward",
            {"batch_size": 32, "grad_accum": 1, "fullest_step": 9},
            {"train.batch_size": 4, "train.grad_accum": 8},
        ),  # 9 sequences, then 3
        (
            "forward",
            {"batch_size": 2, "grad_accum": 1},
            {"train.batch_size": 1, "train.grad_accum": 2},
        ),
        ("forward", {"batch_size": 1}, {"train.gradient_checkpointing": True}),
        (
            "backward",
            {"batch_size": 1, "checkpointed_layers": 1},
            {"train.gradient_checkpointing": True},
        ),
        ("backward", {"batch_size": 1, "checkpointed_layers": 2}, {"model.max_seq_len": 128}),
        ("evaluation", {"eval_rows": 4}, {"train.eval_batch_size": 2}),
        ("evaluation", {"eval_rows": 1}, {"model.max_seq_len": 128}),
        ("load", {}, {"tuning.mode": "qlora"}),
        ("optimizer", {"mode": "full"}, {}),
    ],
)
def test_the_setting_that_gives_way_is_that_of_the_phase(planned, phase, changes, expected):
    run = changed(planned[0], **changes)
    assert smaller_settings(run.config, run.plan, phase) == expected


def test_adapters_that_need_16_bits_are_not_answered_with_4(planned):
    run, _ = planned
    config = run.config.changed({"tuning.lora.init_lora_weights": "orthogonal"})
    assert smaller_settings(config, run.plan, "load") == {}


def test_the_next_command_keeps_every_setting_and_the_effective_batch(planned):
    run, folder = planned
    config, plan, path = run.config, run.plan, folder.path
    command = after_out_of_memory(config, plan, path, "backward", has_checkpoint=False)
    assert (
        command
        == f"make train CONFIG={path}/config.yaml DEVICE=cpu TRAIN_BATCH_SIZE=2 TRAIN_GRAD_ACCUM=6"
    )
    environ = {**os.environ, **dict(word.split("=", 1) for word in command.split()[2:])}
    call = calls.Call(invocation.read_invocation(environ), environ, ())
    again = calls.load_config(call)
    following = calls.plan_run(call, again, distributed=False, use_deepspeed=False)
    layout = following.plan.layout
    assert (layout.batch_size, layout.grad_accum) == (2, 6)
    assert layout.rows_per_step == plan.layout.rows_per_step
    differing = {
        name
        for name in config.train.model_fields
        if getattr(config.train, name) != getattr(following.config.train, name)
    }
    assert (
        differing == {"batch_size", "grad_accum"}
        and following.config.model == config.model
        and following.config.data == config.data
    )
    assert again.source == path / "config.yaml"


def test_the_next_command_starts_as_many_ranks_in_the_same_way(planned):
    run, folder = planned
    path = folder.path
    ranks = replace(run.plan.ranks, strategy="ddp", device="cuda", per_node=4, nodes=2)
    several = replace(run.plan, ranks=ranks)
    words = after_out_of_memory(run.config, several, path, "backward", has_checkpoint=True)
    assert words.startswith(
        f"make train-distributed CONFIG={path}/config.yaml NUM_GPUS=4 NNODES=2 TRAIN_BATCH_SIZE=2"
    )
    assert words.endswith(f"TRAIN_RESUME_FROM={path}")
    zero = replace(
        several,
        ranks=replace(ranks, strategy="deepspeed", nodes=1),
        deepspeed=DeepSpeedPlan({}, str(ROOT / "configs" / "deepspeed_zero2.json")),
    )
    words = after_out_of_memory(run.config, zero, path, "load", has_checkpoint=True)
    assert "make train-deepspeed" in words
    assert words.endswith(
        "NUM_GPUS=4 DEEPSPEED_CONFIG=configs/deepspeed_zero2.json TUNING_MODE=qlora"
    ), "a checkpoint of another mode is no start"


def test_where_nothing_can_be_smaller_the_next_command_shares_the_model(planned):
    run = changed(planned[0], mode="full")
    path = planned[1].path
    words = after_out_of_memory(run.config, run.plan, path, "optimizer", has_checkpoint=True)
    assert words.startswith("make train-distributed ")
    assert "NUM_GPUS=2 " in words
    assert words.endswith("TRAIN_STRATEGY=fsdp")
    whole = run.config.train.model_copy(update={"optim": "adamw_8bit"})
    config = run.config.model_copy(update={"train": whole})
    words = after_out_of_memory(config, run.plan, path, "optimizer", has_checkpoint=True)
    assert words.endswith("TRAIN_STRATEGY=zero3")
    assert "TRAIN_RESUME_FROM" not in words


@pytest.mark.parametrize(
    "setting, value, without",
    [
        ("tuning.lora.use_dora", True, "TUNING_LORA_USE_DORA=false"),
        ("tuning.lora.modules_to_save", ["lm_head"], "TUNING_LORA_MODULES_TO_SAVE=null"),
        ("tuning.lora.trainable_tokens", ["<|user|>"], "TUNING_LORA_TRAINABLE_TOKENS=null"),
        ("model.add_tokens", ["<|x|>"], "MODEL_ADD_TOKENS=null"),
    ],
)
def test_a_model_is_shared_without_what_prevents_it(planned, setting, value, without):
    """Neither FSDP nor ZeRO-3 shards it; all that a rank could do by itself is done."""
    run, folder = planned
    config = run.config.changed({"tuning.mode": "qlora", setting: value})
    words = after_out_of_memory(config, run.plan, folder.path, "optimizer", has_checkpoint=True)
    assert words.endswith(f"TRAIN_GRAD_ACCUM=auto {without} TRAIN_STRATEGY=fsdp")
    asked = ("tuning.mode=qlora", f"{setting}={json.dumps(value)}")
    for strategy in ("fsdp", "zero3"):
        with pytest.raises(ConfigError):
            plan_for("2x4090", *asked, f"train.strategy={strategy}")
    typed = dict(word.split("=", 1) for word in words.split()[-3:])
    assert plan_for("2x4090", "tuning.mode=qlora", environ=typed).plan.fits


# The cause


@pytest.mark.parametrize(
    "words, asked, free",
    [
        (CUDA_WORDS, int(2.25 * GIB), 416 * 2**20),
        (CPU_WORDS, 4096, None),
        ("CUDA error: out of memory", None, None),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None, None),
    ],
)
def test_the_amounts_are_read_from_the_librarys_words(words, asked, free):
    error = RuntimeError(words)
    assert is_out_of_memory(error)
    assert (parse_bytes(ASKED, error), parse_bytes(FREE, error)) == (asked, free)


def test_a_run_that_runs_out_of_memory_says_where_and_goes_on_from_its_checkpoint_with_what_it_says(
    train_run, plan_run, run_worker, monkeypatch, losses_of
):
    saves = {"train.save_strategy": "steps", "train.save_steps": 2}
    folder = plan_run(
        {
            "train.batch_size": 4,
            "train.grad_accum": 1,
            "train.packing": False,
            "train.max_steps": 4,
            **saves,
        }
    )
    real = TrainingLoop.compute_loss

    def fail_in_step_4(self, *arguments, **options):
        if self.state.global_step == 3:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return real(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "compute_loss", fail_in_step_4)
        assert run_worker(folder) == ExitClass.OUT_OF_MEMORY
    report = run_json(folder)
    found = report["out_of_memory"]
    expected = {"rank": 0, "device": "the host", "step": 4, "phase": "forward"}
    assert (expected | {"asked_bytes": TOO_MUCH}).items() <= found.items()
    assert (
        report["cause"] == "rank 0 ran out of memory on the host in forward at step 4; "
        f"{TOO_MUCH / GIB:.2f} GiB more were asked for; try {found['next']}"
    )
    weights, adapters = (found["components"][name] for name in ("weights", "adapters"))
    assert weights["measured"] == pytest.approx(weights["predicted"], rel=0.02)
    assert adapters["measured"] == pytest.approx(adapters["predicted"], rel=0.02)
    assert found["components"]["optimizer"]["measured"] == pytest.approx(
        2 * adapters["measured"], rel=0.01
    ), "Adam's two moments"
    assert "predicted    measured" in (folder.logs / "rank-0.log").read_text()
    assert found["next"].endswith(
        f"TRAIN_BATCH_SIZE=2 TRAIN_GRAD_ACCUM=2 TRAIN_RESUME_FROM={folder.path}"
    )
    words = dict(
        word.split("=", 1) for word in found["next"].split()[3:] if word.startswith("TRAIN_")
    )
    again = train_run(
        {
            "train.max_steps": 4,
            **{name.lower().replace("_", ".", 1): value for name, value in words.items()},
        }
    )
    assert len(losses_of(again)) == 4
    assert stamp.read_stamp(again.weights("lora")).effective_batch == 4


def test_a_rank_that_runs_out_of_memory_while_it_loads_says_so(plan_run, run_worker, monkeypatch):
    from sft_play.training import worker

    folder = plan_run({})
    monkeypatch.setattr(worker, "load_model", lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8))
    assert run_worker(folder) == ExitClass.OUT_OF_MEMORY
    found = run_json(folder)["out_of_memory"]
    assert (found["phase"], found["step"]) == ("load", 0) and found["next"].endswith(
        "TUNING_MODE=qlora"
    )
    assert found["components"]["weights"]["measured"] is None
    assert " in load before the first step; " in run_json(folder)["cause"]


def test_an_error_that_says_what_to_type_keeps_its_words(plan_run, run_worker, monkeypatch):
    from sft_play.training import worker

    def refuse(*_):
        raise OutOfMemory("nothing fits; try TUNING_MODE=qlora")

    folder = plan_run({})
    monkeypatch.setattr(worker, "load_model", refuse)
    assert run_worker(folder) == ExitClass.OUT_OF_MEMORY
    report = run_json(folder)
    assert (
        report["cause"] == "nothing fits; try TUNING_MODE=qlora" and "out_of_memory" not in report
    )


# Several ranks

FAULTY = """
import sys
from pathlib import Path
sys.path.append({tests!r})
from faults.processes import fail_in_step_3
from {module} import {fault}
from sft_play.training import entry

fail_in_step_3({rank}, {fault})
sys.exit(entry.run_worker(Path(sys.argv[1])))
"""


def write_faulty(folder: Path, rank: int, fault: Callable[[], None]) -> Path:
    """Write a worker in which `fault` is called on one rank in the forward pass of step 3."""
    script = folder / "faulty.py"
    script.write_text(
        FAULTY.format(
            tests=str(ROOT / "tests"), module=fault.__module__, fault=fault.__name__, rank=rank
        )
    )
    return script


QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": PYTHONPATH}
LONG = {"train.max_steps": 3000, "train.predict_with_generate": False, "train.packing": False}
SECONDS = 240  # the first launch under DeepSpeed on a machine compiles one op


def launched(folder, launcher: str, script: Path) -> str:
    """Run two ranks of a worker under a launcher until all have ended; return their output."""
    strategy = "ddp" if launcher == "accelerate" else "deepspeed"
    ranks = ranks_of(strategy, "cpu", 2, master_port=free_port(), cpu_count=2)
    if launcher == "accelerate":
        launch.write_accelerate_config(
            folder.path / "accelerate.yaml", launch.accelerate_config(ranks, "no"), "Of a test."
        )
    command = launch.launch_command(ranks, folder.path, os.environ)
    argv = [str(script) if word == str(launch.WORKER) else word for word in command.argv]
    if launcher == "torchrun":
        words = "-m torch.distributed.run --standalone --nproc_per_node 2"
        argv = [sys.executable, *words.split(), str(script), str(folder.path)]
    output = folder.path / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **command.env, **QUIET},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            assert process.wait(SECONDS) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return output.read_text()


def check_both_ended(folder, rank: int, output: str, place: str = "the host") -> None:
    """Assert that both ranks gave one cause, of `rank`, and ended with it."""
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 15), output[-3000:]
    assert report["out_of_memory"]["rank"] == rank and report["out_of_memory"]["step"] == 3
    assert (
        report["cause"].startswith(
            f"rank {rank} ran out of memory on {place} in forward at step 3; "
        )
        and "TRAIN_BATCH_SIZE=1" in report["cause"]
    )
    logs = [(folder.logs / f"rank-{number}.log").read_text() for number in (0, 1)]
    assert "exit class 15 (out_of_memory), rank" in logs[rank]
    assert f"exit class 15 (out_of_memory), rank {1 - rank} follows it" in logs[1 - rank]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(folder.path) in (p.info["cmdline"] or [])
    ], "a rank was left behind"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, rank",
    [
        pytest.param("accelerate", 1, marks=pytest.mark.faults),
        pytest.param("torchrun", 0, marks=pytest.mark.faults),
        pytest.param("deepspeed", 1, marks=pytest.mark.faults),
    ],
)
def test_one_rank_without_memory_ends_both_under_every_launcher(plan_run, tmp_path, launcher, rank):
    folder = plan_run(
        LONG,
        num_gpus=2,
        deepspeed_config=None if launcher == "accelerate" else "configs/deepspeed_zero2.json",
    )
    output = launched(folder, launcher, write_faulty(tmp_path, rank, run_out))
    check_both_ended(folder, rank, output)
    assert f"rank {rank} ran out of memory" in output, "the terminal says it, whichever rank it was"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [long(0), 1])
def test_both_ranks_end_with_the_class_of_the_first(plan_run, rank):
    """Run without a launcher, whose signals end ranks too. Rank 0 hosts the store and ends last."""
    folder = plan_run(LONG, num_gpus=2)
    assert run_two_workers(folder, fail_in_step_3, rank, run_out) == [15, 15]
    check_both_ended(folder, rank, "")


@pytest.mark.long
@pytest.mark.slow
def test_a_machine_with_a_folder_of_its_own_writes_the_cause_of_the_other_down(plan_run):
    folders = [plan_run(LONG, num_gpus=2) for _ in range(2)]
    port = free_port()
    ranks = [
        start_rank(work, (folder.path, fail_in_step_3, 1, run_out), number, port)
        for number, folder in enumerate(folders)
    ]
    assert [wait_for(rank) for rank in ranks] == [15, 15]
    first, second = (run_json(folder) for folder in folders)
    assert first["cause"] == second["cause"] and first["cause"].startswith(
        "rank 1 ran out of memory"
    )
    assert (first["status"], first["exit_class"]) == ("failed", 15) and "out_of_memory" not in first
