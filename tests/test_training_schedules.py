"""The learning rate of each step is that of transformers' get_scheduler, also after a resume."""

import pytest
import torch
from marks import long
from run_files import run_json
from transformers import get_scheduler

from sft_play.errors import ExitClass

STEPS, RATE = 12, 0.01
# schedule, options as they are written, and as transformers takes them
CASES = [
    ("cosine_with_min_lr", "{}", {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", "{min_lr: 0.004}", {"min_lr": 0.004}),
    ("warmup_stable_decay", "{}", {"num_decay_steps": 2}),
    (
        "warmup_stable_decay",
        "{num_decay_steps: 0.5, min_lr_ratio: 0.2, decay_type: 1-sqrt, warmup_type: cosine}",
        {
            "num_decay_steps": 6,
            "min_lr_ratio": 0.2,
            "decay_type": "1-sqrt",
            "warmup_type": "cosine",
        },
    ),
    ("polynomial", "{power: 2, lr_end: 0.001}", {"power": 2, "lr_end": 0.001}),
    ("inverse_sqrt", "{timescale: 2}", {"timescale": 2}),
    ("cosine", "{num_cycles: 1.5}", {"num_cycles": 1.5}),
]
QUIET = {"train.predict_with_generate": False, "train.max_steps": STEPS}


def expected_rates(kind: str, options: dict, warmup: int, count: int = STEPS) -> list[float]:
    """Return the rates of transformers' schedule, whose warm-up is one step ahead here.

    transformers' first step has a rate of 0, or its least.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = get_scheduler(kind, optimizer, warmup, count, options)
    rates = []
    for _ in range(count):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return [*rates[1:warmup], RATE, *rates[warmup:]] if warmup else rates


def logged_rates(folder) -> list[float]:
    return [step.learning_rate for step in folder.read_report().history if step.learning_rate]


# every other schedule has a warm-up in `make test`
QUICK = [(*case, 3 * (number % 2)) for number, case in enumerate(CASES)]
LONG = [long(*case, 3 * (number % 2 == 0)) for number, case in enumerate(CASES)]


@pytest.mark.parametrize("kind, written, options, warmup", [*QUICK, *LONG])
def test_each_step_has_the_rate_of_transformers(
    kind, written, options, warmup, plan_run, build_loop
):
    settings = {
        "train.lr_scheduler_type": kind,
        "train.lr_scheduler_kwargs": written,
        "train.warmup_steps": warmup,
    }
    trainer, _ = build_loop(plan_run({**QUIET, **settings}))
    trainer.start()
    trainer.train()
    found = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == expected_rates(kind, options, warmup)
    assert len(set(found)) > 1


def test_a_resumed_run_continues_the_schedule_exactly(train_run, plan_run, run_worker, weights_of):
    """In one go, and from a checkpoint in the middle of the decay."""
    settings = {
        **QUIET,
        "train.lr_scheduler_type": "warmup_stable_decay",
        "train.lr_scheduler_kwargs": "{num_decay_steps: 3}",
        "train.warmup_steps": 1,
        "train.save_strategy": "steps",
        "train.save_steps": 10,
    }
    whole = train_run(settings)
    resumed = train_run({**settings, "train.resume_from": whole.checkpoints / "checkpoint-10"})
    assert logged_rates(resumed) == logged_rates(whole)
    assert weights_of(resumed) == weights_of(whole)
    other = {"train.lr_scheduler_kwargs": "{num_decay_steps: 2}"}
    refused = plan_run({**settings, **other, "train.resume_from": whole.path})
    assert run_worker(refused) == ExitClass.CHECKPOINT
    assert "train.lr_scheduler_kwargs  {num_decay_steps: 3}" in run_json(refused)["cause"]


@pytest.fixture
def weights_of():
    """A function that returns the bytes of a run's adapter."""
    return lambda run: (run.weights("lora") / "adapter_model.safetensors").read_bytes()
