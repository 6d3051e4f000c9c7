"""A training step must not visit every module of the model: 48 layers with adapters have 3,600."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed_training import trainer_of
from transformers import TrainerCallback


class AfterStep(TrainerCallback):
    """Calls `action` after each step."""

    def __init__(self, action: Any):
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.action()


def test_modules_are_visited_once_an_epoch(tmp_path: Path, monkeypatch: Any) -> None:
    visited, after_steps = 0, []
    visit = torch.nn.Module.named_modules

    def counted(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal visited
        visited += 1
        return visit(self, *args, **kwargs)

    trainer = trainer_of(tmp_path, 2, packed=False)
    trainer.events.add(AfterStep(lambda: after_steps.append(visited)))
    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    trainer.start()
    trainer.train()
    assert len(after_steps) == 6 and after_steps[0] > 0
    in_steps = [late - early for early, late in itertools.pairwise(after_steps)]
    assert in_steps.count(0) == 4, "the steps of two epochs but their first ones"


@pytest.mark.parametrize("packed", [False, True])
def test_a_loaded_model_and_one_after_an_evaluation_train(tmp_path: Path, packed: bool) -> None:
    trainer = trainer_of(tmp_path, 2, packed)
    trainer.engine.model.eval()
    trainer.engine.model.training = (
        True  # as PEFT's wrapper is, around a model that transformers loaded
    )
    modes: list[bool] = []

    def note_modes(*_: Any) -> None:
        modes.extend(module.training for module in trainer.engine.model.modules())

    trainer.engine.model.get_base_model().register_forward_pre_hook(note_modes)
    trainer.events.add(AfterStep(trainer.engine.model.eval))
    trainer.start()
    trainer.train()
    assert modes and all(modes)


def test_gradients_are_dropped_after_each_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2, packed=False)
    trainer.start()
    trainer.train()
    assert all(parameter.grad is None for parameter in trainer.engine.model.parameters())
