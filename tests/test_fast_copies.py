"""Adapters are cast once before a forward pass, and what is computed is the same to the bit."""

import copy

import pytest
import torch
from tiny_models import tiny_model, with_adapters
from torch import nn

from sft_play.models.fast.linears.lora import (
    AdapterCopies,
    LinearGroup,
    copy_adapters_at_once,
    fuse_lora_linear,
    groups_of,
)
from sft_play.models.fast.setup import base_model_of


def a_model(**settings) -> nn.Module:
    model = with_adapters(tiny_model("llama", dtype=torch.bfloat16), r=3, **settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            fuse_lora_linear(module)
    return model


def gradients(model: nn.Module, steps: int, autocasts: int = 9) -> list[torch.Tensor]:
    """Train some steps, the first ones under autocast; return the gradients of the last one."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.arange(24).view(2, 12)
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=number < autocasts):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
    return found


@pytest.mark.parametrize("autocasts", [9, 1], ids=["under autocast", "once"])
def test_steps_are_those_without_copies_to_the_bit(autocasts):
    plain = a_model()
    with_copies = copy.deepcopy(plain)
    copy_adapters_at_once(with_copies, with_copies)
    pairs = zip(gradients(plain, 3, autocasts), gradients(with_copies, 3, autocasts), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    groups = groups_of(base_model_of(with_copies).get_decoder())
    assert len(groups) == 2 * 7
    assert all(group.bound.copies[0].dtype == torch.bfloat16 for group in groups)


def test_linears_that_share_an_input_read_the_copies(monkeypatch):
    model = a_model()
    decoder = base_model_of(model).get_decoder()
    layer = decoder.layers[0].self_attn
    linears = (layer.q_proj, layer.k_proj, layer.v_proj)
    for module in linears:
        del module.fused_group
    layer.input_linears = group = LinearGroup(*linears)
    copy_adapters_at_once(model, model)
    (copies,) = decoder._forward_pre_hooks.values()
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        copies(decoder)
        monkeypatch.setattr(torch, "_foreach_copy_", None)  # nothing is cast again
        group.fused(x)
    a = [module.lora_A["default"].weight for module in linears]
    stacked, *all_b = group.bound.copies
    assert torch.equal(stacked, torch.cat(a).bfloat16())
    for copied, module in zip(all_b, linears, strict=True):
        assert torch.equal(copied, module.lora_B["default"].weight.bfloat16())


def test_without_autocast_or_training_nothing_is_copied():
    model = a_model()
    copy_adapters_at_once(model, model)
    tokens = torch.arange(24).view(2, 12)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens)
    groups = groups_of(base_model_of(model).get_decoder())
    assert groups and not any(group.bind().copies for group in groups)


def test_a_model_that_is_shared_is_left_alone():
    model = a_model()
    copy_adapters_at_once(model, nn.Sequential(model))  # neither the model itself nor DDP
    assert not base_model_of(model).get_decoder()._forward_pre_hooks


def test_these_tests_see_copies_that_are_not_refreshed(monkeypatch):
    refresh = AdapterCopies.__call__

    def once(self, decoder, *rest):
        if not self.copies:
            refresh(self, decoder, *rest)

    monkeypatch.setattr(AdapterCopies, "__call__", once)
    with_copies = a_model()
    copy_adapters_at_once(with_copies, with_copies)
    found = zip(gradients(with_copies, 2), gradients(a_model(), 2), strict=True)
    assert any(not torch.equal(one, other) for one, other in found)
