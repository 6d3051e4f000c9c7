"""Options of learning rate schedules: what a config may write, before anything is read."""

import inspect
from pathlib import Path
from typing import get_args

import pytest

from sft_play.config.loader import load_merged
from sft_play.config.schedules import OPTIONS, SCHEDULES, options_of
from sft_play.config.schema import TrainSection
from sft_play.errors import ConfigError

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")


def loaded(kind: str, options: str = "{}", *others: str):
    words = [f"train.lr_scheduler_type={kind}", f"train.lr_scheduler_kwargs={options}", *others]
    return load_merged(EMPTY, None, words).config.train


def test_the_options_of_each_schedule_are_parameters_of_transformers_function():
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    functions = {kind.value: made for kind, made in TYPE_TO_SCHEDULER_FUNCTION.items()}
    assert get_args(TrainSection.model_fields["lr_scheduler_type"].annotation) == tuple(SCHEDULES)
    assert {name for names in SCHEDULES.values() for name in names} == set(OPTIONS)
    for kind, names in SCHEDULES.items():
        assert set(names) <= inspect.signature(functions[kind]).parameters.keys(), kind


@pytest.mark.parametrize(
    ("kind", "options", "steps", "found"),
    [
        ("cosine_with_min_lr", "{}", 100, {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", "{min_lr_rate: 0.3}", 100, {"min_lr_rate": 0.3}),
        ("cosine_with_min_lr", "{min_lr: 0.00001}", 100, {"min_lr": 0.00001}),
        ("warmup_stable_decay", "{}", 95, {"num_decay_steps": 10}),
        ("warmup_stable_decay", "{num_decay_steps: 0.5}", 95, {"num_decay_steps": 48}),
        ("warmup_stable_decay", "{num_decay_steps: 7}", 95, {"num_decay_steps": 7}),
        ("polynomial", "{power: 2}", 95, {"power": 2}),
        ("cosine", "{}", 95, {}),
    ],
)
def test_a_schedule_without_options_has_defaults(kind, options, steps, found):
    assert options_of(loaded(kind, options), steps) == found


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("cosine", "{power: 2}", "the schedule cosine has no option power; write num_cycles, or"),
        ("linear", "{power: 2}", "the schedule linear has no option power; delete it"),
        ("cosine_with_min_lr", "{min_lr_rate: 2}", "min_lr_rate=2 is not valid; .* from 0 to 1"),
        ("cosine_with_min_lr", "{min_lr_rate: true}", "min_lr_rate=True is not valid"),
        ("cosine_with_min_lr", "{min_lr: a}", "min_lr=a is not valid; write a number of at least"),
        ("cosine_with_min_lr", "{min_lr: 0.01}", "min_lr=0.01 is not below train.learning_rate"),
        ("cosine_with_min_lr", "{min_lr: 0, min_lr_rate: 0}", "say the same; delete one of them"),
        ("polynomial", "{lr_end: 0.01}", "lr_end=0.01 is not below train.learning_rate=0.01"),
        (
            "inverse_sqrt",
            "{timescale: 0}",
            "timescale=0 is not valid; write a number of at least 1",
        ),
        ("warmup_stable_decay", "{num_decay_steps: 1.5}", "write whole steps, or a fraction"),
        ("warmup_stable_decay", "{decay_type: sqrt}", "write linear, cosine, 1-sqrt"),
        ("warmup_stable_decay", "{num_stable_steps: 5}", "no option num_stable_steps; write num_d"),
        ("reduce_lr_on_plateau", "{}", "write cosine_with_min_lr. TRAIN_EARLY_STOPPING_PATIENCE=3"),
    ],
)
def test_an_option_that_a_schedule_cannot_use_is_refused_with_what_to_write(kind, options, said):
    with pytest.raises(ConfigError, match=f"train.lr_scheduler_(type|kwargs)=.*{said}"):
        loaded(kind, options, "train.learning_rate=0.01")


def test_what_the_refusal_of_a_plateau_advises_is_a_valid_config():
    advised = ["train.early_stopping_patience=3", "train.eval_strategy=epoch"]
    assert loaded("cosine_with_min_lr", "{}", *advised).early_stopping_patience == 3
