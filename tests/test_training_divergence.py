"""Runs that train on and learn nothing: a loss like a guess, adapters without a gradient."""

import math
import re
import shutil

import pytest
import torch
from faults.numbers import poison
from marks import long
from run_files import run_json
from safetensors.torch import load_file, save_file

from sft_play.errors import DivergedError, ExitClass
from sft_play.monitor.watch import run_table
from sft_play.training.best import LossWatch
from sft_play.training.loop import TrainingLoop


def seen(losses: list[float], before: float = math.inf, steps: int = 5) -> LossWatch:
    """Return a watch that has seen a loss each so many steps."""
    watch = LossWatch(32_000, learning_rate=1e-3)
    watch.start(before)
    for number, loss in enumerate(losses, start=1):
        watch.record(number * steps, loss)
    return watch


def test_a_loss_before_training_that_is_a_guess_is_said():
    watch = LossWatch(32_000, learning_rate=1e-3)
    assert watch.start(10.3) is None
    watch = LossWatch(32_000, learning_rate=1e-3)
    assert "loss=10.4 before training is no better than a uniform guess" in watch.start(10.4)


@pytest.mark.parametrize(
    "losses",
    [
        [10.3, 10.4, 10.3, 10.4, 10.3],  # a random model that has not learned yet
        [2.0, 11.0, 2.1, 12.0, 2.0],  # single bad batches
        [2.0, 7.0, 7.5, 8.0, 8.2],  # rising, but better than a guess
        [2.0, 2.1, 2.0, 2.2, 11.0],
    ],
)
def test_losses_that_are_no_divergence(losses):
    watch = seen(losses, before=10.4)
    watch.finalize(25)  # raises nothing
    assert watch.lowest == min(10.4, *losses)


@pytest.mark.parametrize(
    "losses, words",
    [
        ([2.0, 1.8, 10.3, 10.4, 10.2], "loss=10.2 since step 15, and it was 1.8"),
        ([10.4, 15.0, 14.0, 13.0], "since step 10"),  # a random model that gets much worse
    ],
)
def test_a_loss_that_stays_at_a_guess_has_diverged_and_says_since_when(losses, words):
    with pytest.raises(DivergedError, match=words):
        seen(losses)


@pytest.mark.parametrize(
    "losses, before, after, words",
    [
        ([11.0, 12.0], 1.5, None, "loss=11.5 at the end, step 10, and it was 1.5"),
        # held-out rows are guessed, whatever the last steps say
        ([1.2, 17.0, 6.7, 5.9, 6.2], 0.1, 10.37, "loss=10.37 at the end, step 10, and it was 0.1"),
    ],
)
def test_a_run_that_ends_with_a_guess_has_diverged(losses, before, after, words):
    watch = seen(losses, before)
    if after is not None:
        watch.finalize(10, after=3.0)
    with pytest.raises(DivergedError, match=words):
        watch.finalize(10, after) if after else watch.finalize(10)


@pytest.mark.parametrize(
    "losses, after", [([12.4, 7.4], 6.8), ([11.3, 11.2, 9.2], 11.1)], ids=["steep", "by-heart"]
)
def test_random_weights_that_end_near_a_guess_have_learned_where_held_out_rows_say_so(
    losses, after
):
    watch = seen(losses, before=12.6)
    watch.finalize(10, after)  # raises nothing
    with pytest.raises(DivergedError, match="at the end, step 10"):
        watch.finalize(10, after=12.7)


GUESS = r", and it was \S+: as bad as a uniform guess"
STAYS = "no weight has changed in 2 steps: .*; raise TRAIN_LEARNING_RATE"


@pytest.mark.parametrize(
    "rate, steps, mode, words",
    [
        long(30, 30, "lora", rf"since step \d+{GUESS}"),
        (30, 6, "lora", f"at the end, step 6{GUESS}"),
        (1e-60, 2, "lora", STAYS),
        long(1e-60, 2, "full", STAYS),
    ],
)
def test_a_run_that_forgets_all_it_knew_or_changes_no_weight_is_diverged_and_not_done(
    plan_run, run_worker, taught_base, rate, steps, mode, words
):
    changes = {"train.learning_rate": rate, "train.max_steps": steps, "tuning.mode": mode}
    folder = plan_run({"model.name": taught_base, **changes})
    assert run_worker(folder) == ExitClass.DIVERGED
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 14)
    assert re.search(words, report["cause"])
    assert not folder.weights(mode).exists()


@pytest.fixture(scope="module")
def deaf_base(tiny_base, tmp_path_factory):
    """A base whose second layer ignores what its attention says: no gradient goes through it."""
    folder = shutil.copytree(tiny_base, tmp_path_factory.mktemp("deaf") / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DEAF = {"tuning.lora.target_modules": "[q_proj,down_proj]", "train.max_steps": 12}


def test_an_adapter_that_does_not_learn_stops_the_run_and_is_named(plan_run, run_worker, deaf_base):
    folder = plan_run(DEAF | {"model.name": deaf_base, "train.save_strategy": "epoch"})
    assert run_worker(folder) == ExitClass.DIVERGED
    report = run_json(folder)
    for words in ("model.layers.1.self_attn.q_proj", "10 ", "TRAIN_ON_UNTRAINED=warn"):
        assert words in report["cause"]
    assert report["global_step"] == 9


def test_an_adapter_that_does_not_learn_is_only_named_where_that_is_asked(train_run, deaf_base):
    folder = train_run(DEAF | {"model.name": deaf_base, "train.on_untrained": "warn"})
    log = (folder.logs / "rank-0.log").read_text()
    assert "warning: model.layers.1.self_attn.q_proj: to be trained, and no gradient" in log


# Divergence after a checkpoint that is published instead

BEST = {
    "tuning.mode": "full",
    "train.load_best_model_at_end": True,
    "train.eval_strategy": "steps",
    "train.eval_steps": 2,
    "train.save_strategy": "steps",
    "train.save_steps": 2,
    "train.save_total_limit": 2,
    "train.predict_with_generate": False,
    "train.max_steps": 40,
}


@pytest.fixture
def rate_jumps(monkeypatch):
    """From a step on the learning rate is 1, with which a model forgets all it knew."""

    def at(step):
        compute = TrainingLoop.compute_loss

        def jumping(self, *arguments, **options):
            if self.state.global_step >= step:
                for group in self.engine.optimizer.param_groups:
                    group["lr"] = 1
            return compute(self, *arguments, **options)

        monkeypatch.setattr(TrainingLoop, "compute_loss", jumping)

    return at


@pytest.mark.parametrize("steps, found", [(40, "since step"), long(9, "at the end, step 9")])
def test_a_tail_that_diverges_ends_training_and_the_best_weights_are_published(
    train_run, rate_jumps, steps, found
):
    rate_jumps(5)
    folder = train_run({**BEST, "train.max_steps": steps})
    report = run_json(folder)
    best, warning, after = report["best"], report["warning"], report["metrics"]["after"]
    assert best["step"] == 4 and report["global_step"] < 30 and report["status"] == "done"
    assert found in warning and "as bad as a uniform guess" in warning
    assert (
        f"published are the weights of step 4, the best by eval_loss={best['value']:.4g}" in warning
    )
    assert after["eval_loss"] == pytest.approx(best["value"])
    assert after["eval_loss"] < report["metrics"]["before"]["eval_loss"]
    name = "model.safetensors"
    saved = load_file(folder.weights("full") / name)
    kept = load_file(folder.checkpoints / "checkpoint-4" / name)
    assert all(torch.equal(saved[key], kept[key]) for key in kept)
    log = (folder.logs / "rank-0.log").read_text()
    assert f"warning: {warning}" in log
    assert "as bad as a uniform guess" in run_table(folder.path.parent)[0]
    assert "Warning: loss=" in (folder.path / "report.html").read_text()


@pytest.mark.long
def test_where_no_weights_were_scored_before_it_a_run_that_diverges_has_failed(
    plan_run, run_worker, rate_jumps
):
    rate_jumps(5)
    folder = plan_run({**BEST, "train.eval_steps": 20, "train.save_steps": 20})
    assert run_worker(folder) == ExitClass.DIVERGED
    assert run_json(folder)["cause"].endswith("or more TRAIN_WARMUP_STEPS")
    assert not folder.weights("full").exists()


def test_the_best_weights_of_a_diverged_run_are_published_only_where_they_are_better_than_before():
    watch = LossWatch(32_000, 1e-3, best_step=lambda: 5)
    watch.start(2.0)
    for step, loss in enumerate([1.9, 10.3, 10.4, 10.2], start=1):
        watch.record(step * 5, loss)  # raises nothing
    watch.finalize(20, after=1.9, is_best=True)
    with pytest.raises(
        DivergedError, match=r"loss=2.1 on the held-out rows, where it was 2 before"
    ):
        watch.finalize(20, after=2.1, is_best=True)
    with pytest.raises(DivergedError, match=r"loss=10.3 at the end, step 20"):
        watch.finalize(20, after=10.3, is_best=True)
    with pytest.raises(DivergedError, match="since step 10"):
        watch.finalize(20, after=1.9, is_best=False)  # its checkpoint is gone


def test_a_loss_that_is_nan_after_the_best_weights_ends_training_and_they_are_published(
    train_run, monkeypatch
):
    monkeypatch.setattr(TrainingLoop, "compute_loss", TrainingLoop.compute_loss)
    poison({6})
    folder = train_run(BEST)
    report = run_json(folder)
    assert (report["global_step"], report["best"]["step"]) == (6, 4)
    assert report["warning"].startswith("loss=nan at step 6: the run has diverged; try ")
    assert "published are the weights of step 4" in report["warning"]
    assert report["metrics"]["after"]["eval_loss"] < report["metrics"]["before"]["eval_loss"]
    assert [entry["step"] for entry in report["loss"]] == [1, 2, 3, 4, 5]
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["checkpoint-2", "checkpoint-4"]


def test_a_run_of_one_step_trains_and_says_that_its_warm_up_is_longer(train_run):
    schedule = {"train.lr_scheduler_type": "linear", "train.warmup_steps": 1000}
    folder = train_run({**schedule, "train.epochs": 0.05, "train.max_steps": None})
    report = run_json(folder)
    assert report["global_step"] == 1
    scores = report["metrics"]
    assert scores["after"]["eval_loss"] < scores["before"]["eval_loss"]
    assert "train.warmup_steps=1000" in (folder.logs / "rank-0.log").read_text()
