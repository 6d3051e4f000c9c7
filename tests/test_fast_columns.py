"""Adapters beside the weights that they belong to: the same steps as with products of their own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from test_fast_install import SAME, gap, make, plain_model, settings, step
from torch import nn

from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast.linears import adapter_gradients, mlp, products
from sft_play.models.fast.linears import beside as installed
from sft_play.models.fast.linears.beside import put_beside_weights
from sft_play.models.fast.linears.columns import COLUMNS
from sft_play.models.fast.linears.copies import AdapterCopies, float32_adapters
from sft_play.models.fast.linears.glu import glu_forward
from sft_play.models.fast.linears.room import (
    beside,
    empty_with_room,
    leave_room,
    take_room,
    with_columns,
    with_room,
)
from sft_play.models.fast.setup import base_model_of
from sft_play.plan.columns import room_for

# Sums of two layers: for q, k and v, for gate and up, for down; gradients of gate and up, and of o;
# that of down has room where a layer follows
SUMS = {"llama": 2 * (3 + 2 + 1) + 1, "phi3": 2 * (3 + 1 + 1) + 1}


class Float32Copies(AdapterCopies):
    """Copies as a run in 16 bits makes them, in float32: sums can be compared closely."""

    def __call__(self, *_: Any) -> None:
        with torch.no_grad():
            if not self.copies:
                self._allocate(torch.float32)
            torch._foreach_copy_(self.copies, self.adapters)
            self.writer.write()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let weights of float32 be widened, too; return the shapes of what was written beside rows."""
    shapes = []

    def counted(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(columns.shape))
        return beside(x, columns)

    monkeypatch.setattr(products, "beside", counted)
    monkeypatch.setattr(adapter_gradients, "beside", counted)
    monkeypatch.setattr(installed, "_is_plain", lambda weight: weight.is_contiguous())
    monkeypatch.setattr(installed, "LARGEST_SHARE", 1)
    return shapes


def widen(model: nn.Module) -> AdapterCopies:
    decoder = base_model_of(model).get_decoder()
    copies = Float32Copies(float32_adapters(decoder), put_beside_weights(decoder))
    decoder.register_forward_pre_hook(copies)
    return copies


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "gemma", "phi3"])
def test_a_step_is_the_one_without(name: str, calls: list[tuple[int, ...]]) -> None:
    model = plain_model(name)
    plain = step(model, is_packed=True)
    make(model)
    widen(model)
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) <= SAME
    assert calls


@pytest.mark.parametrize("name", SUMS)
def test_all_sums_that_have_room_are_columns(name: str, calls: list[tuple[int, ...]]) -> None:
    model = plain_model(name)
    make(model)
    widen(model)
    rows = {"input_ids": torch.arange(12).view(1, 12), "labels": torch.arange(12).view(1, 12)}
    model(**rows).loss.backward()
    assert len(calls) == SUMS[name]


@pytest.mark.parametrize("name", SUMS)
def test_a_product_that_the_mlp_knows_is_not_computed_again(
    name: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_product(gate, up, activation, a, room):
        h = glu_forward(gate, up, activation, room)
        ha = h @ a.t()
        if room >= len(a):
            with_columns(h, len(a))[:, h.shape[1] :] = ha
        return h, ha

    model = plain_model(name)
    plain = step(model, is_packed=True)
    make(model)
    widen(model)
    monkeypatch.setattr(mlp, "forward_with_adapter", with_product)
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) <= SAME
    assert len(calls) == 2 * (SUMS[name] - 2)  # two steps, without those of down in two layers


def test_a_recomputed_step_is_the_one_without(calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    plain = step(model, is_packed=True)
    make(model)
    checkpoint_layers(model, 1)
    widen(model)
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) <= SAME


def test_training_goes_the_same_way(calls: list[tuple[int, ...]]) -> None:
    one = plain_model("llama")
    make(one)
    other = copy.deepcopy(one)
    make(other)
    widen(other)
    steps = []
    for model in (one, other):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            found = step(model, is_packed=True, names_boundaries=True)
            optimizer.step()
        steps.append(found)
    assert gap(*steps) <= 10 * SAME
    assert calls


def test_linears_without_adapters_stay_as_they_are(calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    decoder = base_model_of(model).get_decoder()
    for layer in decoder.layers:  # as target_modules of three names makes it
        layer.self_attn.k_proj = layer.self_attn.k_proj.base_layer
        layer.mlp.up_proj = layer.mlp.up_proj.base_layer
    plain = step(model, is_packed=True)
    make(model)
    widen(model)
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) <= SAME
    attention = decoder.layers[0].self_attn
    assert not hasattr(attention.k_proj, COLUMNS)
    assert attention.v_proj.base_layer.adapter_columns.start == 4
    assert calls


def test_weights_keep_their_numbers_and_their_names(calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make(model)
    widen(model)
    step(model, is_packed=True, names_boundaries=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def old_columns(copies: AdapterCopies, model: nn.Module) -> None:
    copies()
    for place in copies.places:
        place.target.zero_()
    copies.writer.places, copies.writer.sources = [], []
    copies.writer.write = lambda: None


def other_scales(copies: AdapterCopies, model: nn.Module) -> None:
    copies.places = [place._replace(scale=1.1) for place in copies.places]


def other_columns(copies: AdapterCopies, model: nn.Module) -> None:
    for index, place in enumerate(copies.places):
        other = copies.places[index - 2].target
        if other.shape == place.target.shape:
            copies.places[index] = place._replace(target=other)


@pytest.mark.parametrize("break_it", [old_columns, other_scales, other_columns])
def test_the_comparison_sees_what_is_wrong(break_it: Any, calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    plain = step(model, is_packed=True)
    make(model)
    break_it(widen(model), model)
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) > 1e-3


def test_columns_that_nothing_was_written_to_are_not_read(calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    plain = step(model, is_packed=True)
    make(model)
    put_beside_weights(base_model_of(model).get_decoder())
    assert gap(plain, step(model, is_packed=True, names_boundaries=True)) <= SAME
    assert not calls


def linears_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def scale_adapters(model: nn.Module) -> None:
    for linear in linears_of(model):
        linear.scale_layer(0.5)


def replace_b(model: nn.Module) -> None:
    for linear in linears_of(model):
        linear.lora_B["default"].weight = nn.Parameter(0.5 * linear.lora_B["default"].weight.data)


def replace_base(model: nn.Module) -> None:
    for linear in linears_of(model):
        linear.base_layer.weight.data = 0.5 * linear.base_layer.weight


def switch_adapters(model: nn.Module) -> None:
    model.base_model.set_adapter("other")


@pytest.mark.parametrize("change", [scale_adapters, replace_b, replace_base, switch_adapters])
def test_what_has_changed_since_is_not_read_beside_weights(
    change: Callable[[nn.Module], None], calls: list[tuple[int, ...]]
) -> None:
    steps = []
    for is_wide in (False, True):
        model = plain_model("llama")
        torch.manual_seed(1)
        model.add_adapter("other", model.peft_config["default"])
        for linear in linears_of(model):
            nn.init.normal_(linear.lora_B["other"].weight, std=0.1)
            linear.lora_A["other"].weight.requires_grad_(True)
            linear.lora_B["other"].weight.requires_grad_(True)
        if is_wide:
            make(model)
            widen(model)
            step(model, is_packed=True, names_boundaries=True)
            assert calls
            calls.clear()
        change(model)
        steps.append(step(model, is_packed=True, names_boundaries=is_wide))
    assert gap(*steps) <= SAME
    assert not calls


def test_without_fused_norms_nothing_is_widened(calls: list[tuple[int, ...]]) -> None:
    model = plain_model("llama")
    assert not put_beside_weights(base_model_of(model).get_decoder())
    assert settings().train.fast_path == "auto"


def test_adapters_as_large_as_a_share_of_the_input_stay_apart(monkeypatch) -> None:
    monkeypatch.setattr(installed, "_is_plain", lambda weight: weight.is_contiguous())
    model = plain_model("llama")
    make(model)
    # q, k and v have 12 columns of 32; of down's 48 inputs its 4 are more than a 16th
    assert not put_beside_weights(base_model_of(model).get_decoder())


@pytest.mark.parametrize(
    ("features", "columns", "room"), [(4096, 48, 64), (4096, 0, 0), (100, 4, 28), (64, 65, 128)]
)
def test_rows_with_room_begin_at_multiples_of_128_bytes(features, columns, room) -> None:
    assert room_for(features, columns) == room
    x = empty_with_room((2, 3, features), room, torch.zeros(1))
    assert x.shape == (2, 3, features) and x.stride(1) == features + room


def test_room_is_taken_once() -> None:
    x = with_room(torch.ones(3, 4), 60)
    assert take_room(x) == 0
    leave_room(x, 60)
    assert (take_room(x), take_room(x)) == (60, 0)


def test_room_goes_with_the_memory_of_rows() -> None:
    x = with_room(torch.ones(3, 4), 60)
    leave_room(x, 60)
    x.data = torch.ones(3, 4)
    assert take_room(x) == 0


def test_what_is_beside_rows_changes_none_of_them() -> None:
    x = with_room(torch.randn(3, 4), 60)
    version = x._version
    both = beside(x, torch.ones(3, 2))
    assert torch.equal(both, torch.cat((x, torch.ones(3, 2)), dim=1))
    assert x._version == version
