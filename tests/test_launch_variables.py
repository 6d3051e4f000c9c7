"""Whole runs in a shell that has launchers' variables, and by the variables of a guide."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import run_json

from sft_play.plan.launch import free_port
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240
pytestmark = pytest.mark.faults


def variables_of(settings_of, folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a run of the tiny model with two steps."""
    settings = settings_of(
        {
            "train.output_dir": folder,
            "train.predict_with_generate": False,
            "train.packing": False,
            "train.max_steps": 2,
        }
    )
    given = {name.upper().replace(".", "_"): str(value) for name, value in settings.items()}
    given |= {"CONFIG": "tests/fixtures/empty.yaml", "DEVICE": "cpu", "RUN": "run"}
    return {**os.environ, **given, "OMP_NUM_THREADS": "1", **variables}


def start(settings_of, folder: Path, words: tuple[str, ...], **variables: str) -> subprocess.Popen:
    """Start `python -m sft_play train` with two steps of the tiny model."""
    return subprocess.Popen(
        [sys.executable, "-m", "sft_play", "train", *words],
        cwd=ROOT,
        env=variables_of(settings_of, folder, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_launchers_variables_in_the_shell_change_nothing(settings_of, tmp_path) -> None:
    ambient = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_RDZV_BACKEND": "c10d",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    losses = []
    for name, variables in (("plain", {}), ("ambient", ambient)):
        (tmp_path / name).mkdir()
        run = start(settings_of, tmp_path / name, ("--distributed",), NUM_GPUS="2", **variables)
        said = run.communicate(timeout=SECONDS)[0]
        assert run.returncode == 0, said[-3000:]
        assert ("the ranks are started without" in said) == bool(variables)
        report = run_json(RunFolder(tmp_path / name / "run"))
        losses.append(report["loss"])
    assert losses[0] == losses[1]


def test_accelerates_number_type_changes_nothing_of_one_process(settings_of, tmp_path) -> None:
    run = start(settings_of, tmp_path, (), ACCELERATE_MIXED_PRECISION="bf16")
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said[-3000:]
    assert "accelerate's mixed precision bf16 does not count here" in said


def test_two_processes_by_hand_train_one_run(settings_of, tmp_path) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    processes = [
        start(settings_of, tmp_path, (), RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)[-3000:]
    report = run_json(RunFolder(tmp_path / "run"))
    assert (report["status"], report["world_size"]) == ("done", 2)
    assert "LOCAL_WORLD_SIZE=2 follows from WORLD_SIZE" in said[0]
