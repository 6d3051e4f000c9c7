"""Adapters are cast once before a forward pass, and what is computed is the same to the bit."""

import copy

import pytest
import torch
from tiny_models import tiny_model, with_adapters
from torch import nn

from sft_kernels.linears.lora import (
    AdapterCopies,
    bind_when_changed,
    copy_adapters_at_once,
    fuse_lora_linear,
    groups_of,
)
from sft_kernels.training_setup import base_model_of

TOKENS = torch.arange(24).view(2, 12)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    model = with_adapters(tiny_model("llama", dtype=torch.bfloat16), r=3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            fuse_lora_linear(module)
    bind_when_changed(decoder_of(model))
    return model


def decoder_of(model: nn.Module) -> nn.Module:
    return base_model_of(model).get_decoder()


def hooks_of(model: nn.Module) -> list[AdapterCopies]:
    hooks = decoder_of(model)._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, AdapterCopies)]


def gradients(model: nn.Module, steps: int, autocasts: int = 9) -> list[torch.Tensor]:
    """Train some steps, the first ones under autocast; return the gradients of the last one."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=number < autocasts):
            model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
    return found


@pytest.mark.parametrize("autocasts", [9, 1], ids=["under autocast", "once"])
def test_steps_are_those_without_copies_to_the_bit(autocasts):
    plain = a_model()
    with_copies = copy.deepcopy(plain)
    copy_adapters_at_once(with_copies, torch.bfloat16)
    found, wanted = gradients(with_copies, 3, autocasts), gradients(plain, 3, autocasts)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    groups = groups_of(decoder_of(with_copies))
    assert len(groups) == 2 * 7
    assert all(group.bound.copies[0].dtype == torch.bfloat16 for group in groups)


def test_linears_that_change_cast_their_own_adapters_again():
    model, plain = a_model(), a_model()
    copy_adapters_at_once(model, torch.bfloat16)
    for each in (model, plain):
        gradients(each, 1)
        torch.manual_seed(1)
        down = decoder_of(each).layers[1].mlp.down_proj
        down.lora_B["default"].weight = nn.Parameter(torch.randn(32, 3))
    for one, other in zip(gradients(model, 2), gradients(plain, 2), strict=True):
        assert torch.equal(one, other)
    bound = [group.bound for group in groups_of(decoder_of(model))]
    assert [len(each.copies) for each in bound].count(0) == 1


def test_nothing_is_copied_outside_of_training(monkeypatch):
    model = a_model()
    copy_adapters_at_once(model, torch.bfloat16)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=TOKENS)
    (hook,) = hooks_of(model)
    assert hook.copies


def test_adapters_in_the_dtype_of_products_are_not_copied():
    model = a_model()
    copy_adapters_at_once(model, torch.float32)
    assert not hooks_of(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    copy_adapters_at_once(model, torch.bfloat16)
    assert not hooks_of(model)
