"""What DeepSpeed is given and compiles: said, and no lock of a dead run is waited for."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from calls import ROOT
from namespaces import CONTAINER, needs_namespaces
from rank_processes import train_on_two
from run_files import plan_json

from sft_kernels.process import Process
from sft_play.errors import EnvironmentFault
from sft_play.runs.folder import RunFolder
from sft_play.training import deepspeed_start
from sft_play.training.deepspeed_start import compile_cpu_adam, free_lock, free_locks

HOLD = "import sys, time; held = open(sys.argv[1]); print('held', flush=True); time.sleep(60)"
STEPS = {"train.max_steps": 4, "train.batch_size": 2, "train.predict_with_generate": False}


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    return path


def test_locks_that_nobody_holds_are_removed_with_a_word(tmp_path, caplog):
    locks = [tmp_path / name / "lock" for name in ("cpu_adam", "fused_adam")]
    for lock in locks:
        lock.parent.mkdir()
        lock.touch()
    free_locks(tmp_path)
    assert not any(lock.exists() for lock in locks) and caplog.text.count("was left by") == 2
    free_locks(tmp_path)
    assert caplog.text.count("was left by") == 2, "there is none"


def test_a_lock_that_is_held_stays(lock, caplog):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        free_lock(lock)
        assert lock.exists() and f"rm {lock}" in caplog.text
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_on_a_disk_of_several_machines_is_left_to_the_user(lock, caplog, monkeypatch):
    monkeypatch.setattr(deepspeed_start, "is_local", lambda _: False)
    free_lock(lock)
    assert lock.exists() and f"rm {lock}" in caplog.text


@needs_namespaces
def test_a_lock_that_is_held_in_another_container_stays(lock, caplog):
    code = (
        "import logging, sys; from pathlib import Path; logging.basicConfig(); lock = sys.argv[1]; "
        "from sft_play.training.deepspeed_start import free_lock; free_lock(Path(lock)); "
        "print('looked', flush=True); input(); free_lock(Path(lock))"
    )
    command = [*CONTAINER, sys.executable, "-c", code, str(lock)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as container:
        with lock.open():
            assert container.stdout.readline() == "looked\n"
            assert lock.exists()
        said = container.communicate("\n", timeout=60)[1]
    while_held, left = said.splitlines()
    assert "another process, container or machine compiles" in while_held
    assert "was left by a run" in left and not lock.exists()


ALONE = Process.alone(torch.device("cpu"))


def test_a_long_compilation_says_what_it_does(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("sft_play.progress.EVERY_SECONDS", 0.05)
    monkeypatch.setattr(deepspeed_start, "_compile", lambda: time.sleep(0.3))
    caplog.set_level("INFO")
    compile_cpu_adam(ALONE)
    assert (
        f"DeepSpeed compiles cpu_adam in {tmp_path / 'cpu_adam'}, once on a machine: 0 s so far"
        in (caplog.text)
    )


def test_a_compilation_that_fails_ends_the_run_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed_start, "_compile", lambda: "no g++")
    with pytest.raises(
        EnvironmentFault, match=r"rank 0: DeepSpeed cannot compile cpu_adam, .* no g"
    ):
        compile_cpu_adam(ALONE)


def offloading(folder: Path) -> Path:
    """Write a JSON of ZeRO-2 with the optimizer on the host."""
    path = folder / "offload.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    return path


def compile_in(folder: Path) -> None:
    """Make a rank keep what it compiles in a folder, and say which optimizer it has in the end."""
    from sft_play.training import worker

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    finish = worker.finish

    def say(context, recorder, trainer, stopped):
        optimizer = trainer.engine.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        print(f"optimizer {type(optimizer).__name__}")
        finish(context, recorder, trainer, stopped)

    worker.finish = say


def trained(plan_run, deepspeed_config: str | None, cache: Path, **settings) -> RunFolder:
    folder = plan_run({**STEPS, **settings}, num_gpus=2, deepspeed_config=deepspeed_config)
    train_on_two(folder, compile_in, cache)
    return folder


@pytest.mark.slow
def test_the_json_in_force_is_said_once_and_its_digest_is_kept(plan_run, tmp_path):
    settings = {"train.save_strategy": "steps", "train.save_steps": 4}
    folder = trained(plan_run, "configs/deepspeed_zero2.json", tmp_path, **settings)
    digest = plan_json(folder)["deepspeed"]["source_digest"]
    log = (folder.logs / "rank-0.log").read_text()
    assert log.count(f"configs/deepspeed_zero2.json digest={digest} {{") == 1 and len(digest) == 16
    for stamped in (folder.checkpoints / "checkpoint-4", folder.weights("qlora")):
        assert json.loads((stamped / "stamp.json").read_text())["deepspeed_digest"] == digest


@pytest.mark.long
def test_an_offloaded_optimizer_trains_as_one_that_is_not(
    plan_run, tmp_path, monkeypatch, losses_of
):
    """The first time on a machine it is compiled, for minutes; a lock that was left is no matter."""
    monkeypatch.setattr("rank_processes.SECONDS", 1800)
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tmp_path))
    lock = cache / "cpu_adam" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    offloaded = trained(plan_run, str(offloading(tmp_path)), cache)
    assert "optimizer DeepSpeedCPUAdam" in (offloaded.path / "output.txt").read_text()
    log = (offloaded.logs / "rank-0.log").read_text()
    assert f"{lock} was left by a run that was killed" in log
    assert "was left" not in (offloaded.logs / "rank-1.log").read_text()
    plain = trained(plan_run, None, cache)
    losses = [losses_of(run) for run in (offloaded, plain)]
    assert len(losses[0]) == 4 and losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
