"""What Trainer does in each step must not visit every module of the model."""

import pytest
import torch

from sft_play.training.visits import visited_once


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))


def modes(model: torch.nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_modules_arevisited_once(model, monkeypatch):
    visited = 0
    visit = torch.nn.Module.named_modules

    def counted(self, *args, **kwargs):
        nonlocal visited
        visited += 1
        return visit(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    with visited_once(model):
        before = visited
        for _ in range(3):
            model.train()
            model.zero_grad()
            assert len(list(model.parameters())) == 4
        assert visited == before
    list(model.parameters())
    assert visited > before


def test_a_loaded_model_and_one_after_an_evaluation_train(model):
    model.eval()
    model.training = True  # as PEFT's wrapper is, around a model that transformers loaded
    with visited_once(model):
        assert all(modes(model))
        model.eval()
        assert not any(modes(model))
        model.train()
        assert all(modes(model))


def test_gradients_are_zeroed_and_own_parameters_are_its_own(model):
    with visited_once(model):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not list(model.parameters(recurse=False))


def test_the_model_is_as_before_afterwards(model):
    with pytest.raises(RuntimeError, match="in a step"), visited_once(model):
        raise RuntimeError("in a step")
    assert not {"train", "parameters"} & set(vars(model))
