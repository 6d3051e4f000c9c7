"""Checkpoints of real runs under real faults: flipped bits, a kill inside a save, a run that fails."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from faults.files import flip
from faults.kills import kill_inside_a_save
from run_files import run_json

from sft_play.errors import CheckpointError, DivergedError, ExitClass
from sft_play.inference.load import checked_weights
from sft_play.monitor.watch import run_table
from sft_play.runs import checkpoints, seal
from sft_play.runs.folder import RunFolder
from sft_play.training.checks import check_finite_optimizer

FLIPS = 3  # of each file; make test-faults makes more
EVERY_STEP = {"train.save_strategy": "steps", "train.save_steps": 1}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flip_in_every_file_of_a_real_checkpoint_is_found(finished, tmp_path):
    checkpoint = finished("lora").checkpoints / "checkpoint-2"
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    bits, found = random.Random(0), 0
    paths = files_of(copy)
    names = {path.name for path in paths}
    assert names >= {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert names >= {"trainer_state.json", "stamp.json", "MANIFEST.json"}
    assert seal.find_damage(copy) is None
    for path in paths:
        for _ in range(FLIPS):
            position, mask = bits.randrange(path.stat().st_size), 1 << bits.randrange(8)
            flip(path, position, mask)
            damage = seal.find_damage(copy)
            found += damage is not None and damage.startswith(path.name)
            flip(path, position, mask)
    assert found == FLIPS * len(paths)
    assert seal.find_damage(copy) is None


def test_the_weights_of_a_run_are_sealed(finished):
    for mode in ("lora", "full"):
        weights = finished(mode).weights(mode)
        assert seal.is_sealed(weights) and seal.find_damage(weights) is None
        assert not (finished(mode).path / checkpoints.STAGING).exists()


def test_trained_weights_with_a_flipped_bit_are_not_used(finished, tmp_path):
    folder = RunFolder(shutil.copytree(finished("lora").path, tmp_path / "run"))
    config = folder.read_config()
    (folder.weights("lora") / "notes.txt").write_text("mine")
    assert checked_weights(folder, config) == folder.weights("lora")
    flip(folder.weights("lora") / "adapter_model.safetensors", 5000, 1)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors has SHA-256 "):
        checked_weights(folder, config)


def test_a_worker_sets_a_damaged_checkpoint_aside_and_goes_on_from_the_one_before(
    train_run, losses_of
):
    whole = train_run(EVERY_STEP | {"train.max_steps": 4, "train.save_total_limit": None})
    flip(whole.checkpoints / "checkpoint-4" / "optimizer.pt", 1000, 1)
    flip(whole.checkpoints / "checkpoint-3" / "rng_state.pth", 1000, 1)
    folder = train_run({"train.max_steps": 4, "train.resume_from": whole.path})
    report = folder.read_report()
    assert report.resumed_from == str(whole.checkpoints / "checkpoint-2")
    assert losses_of(folder) == losses_of(whole)
    log = (folder.logs / "rank-0.log").read_text()
    assert "checkpoint-4: optimizer.pt has SHA-256 " in log
    assert "checkpoint-3: rng_state.pth has SHA-256 " in log
    names = sorted(path.name for path in whole.checkpoints.iterdir())
    assert names == ["checkpoint-1", "checkpoint-2", "checkpoint-3.corrupt", "checkpoint-4.corrupt"]


@pytest.mark.long
def test_a_run_that_is_killed_inside_a_save_goes_on_from_the_checkpoint_before(
    train_run, plan_run, losses_of
):
    steps = {"train.max_steps": 4, "tuning.lora.dropout": 0.1}
    folder = plan_run(EVERY_STEP | steps | {"train.save_total_limit": None})
    staged = kill_inside_a_save(folder, after_step=2)
    assert staged.is_dir() and staged.name not in os.listdir(folder.checkpoints)
    report = folder.read_report()
    assert (report.state, report.global_step) == ("died", 2)
    assert report.checkpoint == str(folder.checkpoints / "checkpoint-2")
    assert report.next == f"make train TRAIN_RESUME_FROM={folder.path}"
    assert f"continue with {report.next}" in run_table(folder.path.parent)[0]
    again = train_run(steps | {"train.resume_from": folder.path})
    assert again.read_report().resumed_from == str(folder.checkpoints / "checkpoint-2")
    whole = train_run(steps)
    assert losses_of(again) == losses_of(whole)


def test_no_checkpoint_is_published_with_an_optimizer_that_is_not_finite():
    """Adam's moments, under the wrappers that accelerate and DeepSpeed put around it."""
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    adam.step()
    wrapped = AcceleratedOptimizer(adam)
    check_finite_optimizer(wrapped, 1)
    adam.state[weight]["exp_avg_sq"][1] = torch.inf
    with pytest.raises(DivergedError, match="the optimizer's exp_avg_sq has NaN or infinity"):
        check_finite_optimizer(wrapped, 1)


def test_a_run_that_fails_says_its_step_and_where_to_go_on(plan_run, run_worker):
    folder = plan_run(EVERY_STEP | {"train.max_steps": 5, "train.learning_rate": 1e18})
    assert run_worker(folder) == ExitClass.DIVERGED
    report = run_json(folder)
    assert (report["status"], report["exit_class"], report["global_step"]) == ("failed", 14, 2)
    assert report["checkpoint"] == str(folder.checkpoints / "checkpoint-1")
    assert report["next"] == f"make train TRAIN_RESUME_FROM={folder.path}"
    assert seal.find_damage(folder.checkpoints / "checkpoint-1") is None
    assert not (folder.checkpoints / checkpoints.STAGING).exists()
