"""The last layer computes labelled tokens alone, and losses and gradients are those of all tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architecture_steps import (
    CPU,
    IGNORE_INDEX,
    Document,
    adapted,
    batch_of,
    documents,
    fused,
    gap,
    reference_step,
    settings,
    trained_step,
)
from tiny_models import tiny_model
from torch import Tensor, nn

from sft_play.models.architecture import decoder_layers
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast import labelled
from sft_play.models.fast.install import fused_kernels_of, install_fused_kernels
from sft_play.models.fast.labelled import (
    NAME,
    LabelledTokens,
    computed_count,
    computed_tokens,
    labelled_tokens_of,
    on_labelled,
)
from sft_play.models.fast.linears.room import leave_room, take_room
from sft_play.models.fast.loss.head import fused_nll
from sft_play.models.fast.setup import base_model_of
from sft_play.process import Process

# one for each place of norms and of the residual stream, and each layer without our attention
MODEL_TYPES = ("llama", "gemma3", "gemma4", "olmo2", "cohere2", "phi3", "stablelm", "apertus")
# full steps and padded rows of two of them; the others are like them
CASES = [
    *((name, "lora", True) for name in MODEL_TYPES),
    *((name, "lora", False) for name in ("llama", "gemma4")),
    *((name, "full", True) for name in ("llama", "gemma3")),
    *(pytest.param(name, "full", False, marks=pytest.mark.long) for name in MODEL_TYPES),
]


def few_labels() -> list[Document]:
    """Return documents of which only the last tokens have a label."""
    found = documents()
    for sample in found:
        sample.labels[:-4] = IGNORE_INDEX
    return found


@contextmanager
def watching(model: nn.Module) -> Iterator[list[int]]:
    """Yield how many tokens the linears of the last layer behind its attention compute."""
    tokens: list[int] = []
    real = labelled._rows

    def watched(x: Tensor, chosen: Tensor, room: int) -> Tensor:
        tokens.append(len(chosen))
        return real(x, chosen, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labelled, "_rows", watched)
        yield tokens


@pytest.mark.parametrize(("model_type", "mode", "is_packed"), CASES)
def test_a_step_is_that_of_all_tokens(
    model_type: str, mode: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("architecture_steps.documents", few_labels)
    config = settings(mode)
    model = adapted(tiny_model(model_type), config)
    expected = reference_step(model)
    made = fused(model, config)
    assert fused_kernels_of(made).labelled_tokens_alone
    with watching(made) as tokens:
        step = trained_step(made, is_packed)
    assert tokens and max(tokens) <= batch_of(made, is_packed)["input_ids"].numel() // 2
    assert gap(expected, step).is_rounding


INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = ("max_length_q", "max_length_k")


@pytest.mark.parametrize("count", [0, 1, 24, 55])
def test_any_number_of_labels_trains_the_same(count: int) -> None:
    config = settings("lora")
    made = fused(adapted(tiny_model("llama"), config), config)
    batch = batch_of(made, True)
    inputs = {name: batch[name] for name in (*INPUTS, *LENGTHS) if name in batch}
    positions = torch.randperm(inputs["input_ids"].numel())[:count]
    targets = torch.randint(2304, (count,))

    def gradients() -> list[Tensor]:
        made.zero_grad()
        fused_nll(made, made, inputs, positions, targets).backward()
        return [each.grad.clone() for each in made.parameters() if each.grad is not None]

    found = gradients()
    for module in made.modules():
        vars(module).pop(NAME, None)
    expected = gradients()
    assert any(gradient.any() for gradient in expected) == bool(count)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_checkpointed_last_layer_computes_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recomputed when the labels of its micro-batch are gone."""
    monkeypatch.setattr("architecture_steps.documents", few_labels)
    config = settings("lora")
    model = adapted(tiny_model("llama"), config)
    expected = reference_step(model)
    made = fused(model, config)
    layers = len(decoder_layers(base_model_of(made)))
    for count, is_narrow in ((layers, False), (layers - 1, True)):
        checkpoint_layers(base_model_of(made), count)
        with watching(made) as tokens:
            step = trained_step(made, True)
        assert bool(tokens) == is_narrow
        assert gap(expected, step).is_rounding


class MixesAtTheEnd(nn.Module):
    """A decoder layer whose results also go to a later token."""

    def __init__(self, layer: nn.Module, distance: int):
        super().__init__()
        self.layer = layer
        self.own = layer.forward
        self.distance = distance

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.own(*args, **kwargs)
        return output + 0.1 * output.roll(self.distance, dims=1)


@pytest.mark.parametrize("distance", [1, 2, -2, 4])
def test_a_layer_that_mixes_tokens_behind_its_mlp_computes_all_of_them(distance: int) -> None:
    model = tiny_model("llama").train()
    last = decoder_layers(model)[-1]
    last.forward = MixesAtTheEnd(last, distance).__call__
    assert_all_are_computed(model)


class TokensBeforeRows(nn.Module):
    """An MLP that is given (T, B, H). Labelled tokens are counted row by row."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(0, 1)).transpose(0, 1)


def test_an_mlp_that_is_given_tokens_in_another_order_computes_all_of_them() -> None:
    model = tiny_model("llama").train()
    last = decoder_layers(model)[-1]
    last.mlp = TokensBeforeRows(last.mlp)
    assert_all_are_computed(model)


def test_a_norm_without_epsilon_behind_the_mlp_computes_all_tokens() -> None:
    """The gradient of a norm of zeros would be NaN."""
    assert_all_are_computed(tiny_model("olmo2", rms_norm_eps=0.0))


def assert_all_are_computed(model: nn.Module) -> None:
    found = install_fused_kernels(model, settings("full"), Process.alone(CPU))
    assert "mlp" in found.on and "loss" in found.on
    assert not found.labelled_tokens_alone and labelled_tokens_of(model) is None


def test_a_loss_that_balances_experts_reads_all_tokens() -> None:
    model = tiny_model("qwen2_moe").train()
    found = install_fused_kernels(model, settings("full"), Process.alone(CPU))
    assert "attention" in found.on and not found.labelled_tokens_alone


@pytest.mark.parametrize("labels", [0, 1, 5, 63, 64])
def test_computed_are_the_labelled_tokens_and_others_up_to_an_eighth(labels: int) -> None:
    positions = torch.randperm(64)[:labels].sort().values
    tokens = computed_tokens(positions, 64)
    if computed_count(labels, 64) == 64:
        assert tokens is None
        return
    assert len(tokens) == len(set(tokens.tolist())) == computed_count(labels, 64)
    assert set(positions.tolist()) <= set(tokens.tolist()) and len(tokens) % 8 == 0


def linear_on(tokens: Tensor, room: int = 0) -> Callable[[Tensor], Tensor]:
    """Return a module of a last layer that computes `tokens`, as a function."""
    module = nn.Linear(6, 4)
    state = LabelledTokens(module)
    setattr(module, NAME, state)

    def run(x: Tensor) -> Tensor:
        def multiply(rows: Tensor) -> Tensor:
            assert take_room(rows) == room
            return module(rows)

        with state.computing(tokens):
            return on_labelled(module, x, multiply)

    return run


def test_room_beside_rows_stays_beside_those_that_are_computed() -> None:
    tokens = torch.tensor([4, 1])
    buffer = torch.randn(2, 3, 8)
    x = buffer[..., :6]
    leave_room(x, 2)
    y = linear_on(tokens, room=2)(x)
    assert y.shape == (2, 3, 4)
    assert not y.flatten(0, 1)[[0, 2, 3, 5]].any() and y.flatten(0, 1)[tokens].all()


def test_a_pass_without_labels_of_its_own_computes_all_tokens() -> None:
    config = settings("lora")
    made = fused(adapted(tiny_model("llama"), config), config)
    inputs = {"input_ids": torch.arange(32)[None]}
    expected = made.eval()(**inputs).logits
    with watching(made) as tokens:
        found = made.train()(**inputs).logits
    assert not tokens
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
