"""The batch script for Slurm: what it asks for, and a job that is stopped, queued again and continues."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from calls import outcome_of
from run_files import run_json, variables_of

from sft_play.commands.call import read_call
from sft_play.commands.slurm import SlurmJob, script, slurm
from sft_play.errors import ConfigError
from sft_play.runs.folder import RunFolder

SECONDS = 240
# It runs the agent of each machine in a session of its own, and passes USR1 on to all their
# processes, as Slurm does.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, psutil
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
agents = []
for node in range(int(os.environ["SLURM_NNODES"])):
    environ = {{**os.environ, "SLURM_NODEID": str(node)}}
    agents.append(subprocess.Popen(command, env=environ, start_new_session=True))
def forward(number, frame):
    for agent in agents:
        own = psutil.Process(agent.pid)
        for process in [own, *own.children(recursive=True)]:
            process.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
sys.exit(max(agent.wait() for agent in agents))
"""
SCONTROL = """#!/bin/bash
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


def job(**changes) -> SlurmJob:
    plain = {
        "name": "mine",
        "nodes": 2,
        "per_node": 8,
        "gpus_per_node": 8,
        "device": "cuda",
        "seconds": 3600.0,
        "command": "python -m sft_play train",
        "variables": ("CONFIG=mine.yaml", "MODEL_NAME='my model'"),
        "project": Path("/srv/my project"),
        "output_dir": Path("/out/100%"),
    }
    return SlurmJob(**{**plain, **changes})


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))


def check_syntax(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_script_asks_for_the_plan_s_machines_and_hours() -> None:
    text = script(job())
    check_syntax(text)
    assert directives(text) == {
        "job-name": "mine",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "cpus-per-task": "64",
        "time": "1:50:00",  # 1.5 x 1 h, 15 min to start, 5 min to save
        "signal": "USR1@300",
        "requeue": "",
        "open-mode": "append",
        "output": "/out/100%%/slurm-%j.log",
    }
    assert "export MODEL_NAME='my model'\n" in text and "cd '/srv/my project'" in text


def test_hours_that_are_not_known_are_said_to_be_unknown() -> None:
    text = script(job(seconds=None, device="cpu", per_node=2))
    check_syntax(text)
    assert directives(text)["time"] == "24:00:00" and "\n# unknown: the plan knows no" in text
    assert "gpus-per-node" not in text and directives(text)["cpus-per-task"] == "2"


@pytest.fixture
def cluster(tmp_path, settings_of, tiny_base) -> tuple[Path, dict[str, str]]:
    """A script for two machines of one CPU rank, and the environment of a job on this host."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    settings = settings_of(
        {
            "train.max_steps": 400,
            "train.predict_with_generate": False,
            "train.output_dir": tmp_path / "out",
        }
    )
    environ = variables_of(settings)
    environ |= {"CONFIG": "tests/fixtures/empty.yaml", "DEVICE": "cpu", "NNODES": "2"}
    path = tmp_path / "job.sh"
    command = [sys.executable, "-m", "sft_play", "slurm"]
    environ |= {"OUT": str(path), "RUN": "mine", "NUM_GPUS": "1"}
    made = outcome_of(command, {**os.environ, **environ})
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"submit it with: sbatch {path}" in made.stdout
    of_job = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_NNODES": "2",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return path, {**os.environ, **of_job}


def start(path: Path, environ: dict[str, str], restart: int) -> subprocess.Popen:
    log = path.with_name(f"job-{restart}.log")
    with log.open("w") as output:
        return subprocess.Popen(
            ["bash", str(path)],
            env={**environ, "SLURM_RESTART_COUNT": str(restart)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until(is_so: Callable[[], bool], running: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert running.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.faults
def test_a_job_that_is_stopped_before_its_limit_is_queued_again_and_goes_on(cluster, losses_of):
    path, environ = cluster
    first = start(path, environ, restart=0)
    log = path.with_name("job-0.log")
    wait_until(lambda: "step 2/" in log.read_text(), first, log)
    (srun,) = psutil.Process(first.pid).children()
    everyone = srun.children(recursive=True)
    srun.send_signal(signal.SIGUSR1)
    assert first.wait(SECONDS) == 75, log.read_text()[-3000:]
    assert not psutil.wait_procs(everyone, timeout=30)[1]
    assert Path(environ["REQUEUED"]).read_text() == f"{environ['SLURM_JOB_ID']}\n"
    runs = [RunFolder(path.parent / "out" / f"mine-{os.getpid()}-{k}") for k in (0, 1)]
    stopped = run_json(runs[0])
    assert (stopped["status"], stopped["world_size"]) == ("stopped", 2)
    assert (runs[0].logs / "slurm.log").is_symlink()

    text = path.read_text()
    few = f"export TRAIN_MAX_STEPS={stopped['global_step'] + 2}"
    path.write_text(text.replace("export TRAIN_MAX_STEPS=400", few))
    second = start(path, environ, restart=1)
    log = path.with_name("job-1.log")
    assert second.wait(SECONDS) == 0, log.read_text()[-3000:]
    assert run_json(runs[1])["global_step"] == stopped["global_step"] + 2
    losses = [losses_of(run) for run in runs]
    assert losses[1][: stopped["global_step"]] == losses[0]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_job_on_cpus_is_asked_for_in_words(nodes: str) -> None:
    environ = {"CONFIG": "tests/fixtures/empty.yaml", "NNODES": nodes, "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ConfigError, match=r"GPUS is not set .*such as GPUS=8xH100, or DEVICE=cpu"):
        slurm(read_call(None, (), None, environ))
    assert "--gpus-per-node=8\n" in slurm(read_call(None, (), "8xH100", environ))
    assert "gpus-per-node" not in slurm(read_call(None, (), None, {**environ, "DEVICE": "cpu"}))
