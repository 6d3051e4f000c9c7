"""The fused loss equals the plain loss: its value, its gradients, and in whole models."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import outcome_of
from marks import long
from tiny_models import with_adapters
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from sft_kernels.loss import linear_cross_entropy
from sft_kernels.loss.head import (
    fuse_loss,
    fused_nll,
    read_loss_last,
    summed_nll,
    why_loss_not_fusable,
)
from sft_kernels.loss.linear_cross_entropy import (
    HeadFormula,
    chunk_tokens,
    fused_linear_cross_entropy,
)
from sft_kernels.loss.tokens import labelled
from sft_play.data.render import IGNORE_INDEX

TOKENS, HIDDEN, VOCABULARY = 300, 24, 97
# float32 sums in another order: an error of 2^-24 for each of some dozens of additions
CLOSE = 1e-6


def inputs(
    tokens: int = TOKENS, spread: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (N, H), weight (V, H), targets (N,)."""
    torch.manual_seed(0)
    hidden = (spread * torch.randn(tokens, HIDDEN)).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,))


def plain_nll(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return the loss from all logits by `losses.summed_nll`, for one row of labeled tokens."""
    logits = hidden @ weight.t()
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    padded = torch.cat([logits, logits[:1]])[None]
    return summed_nll(padded, torch.cat([targets[:1], targets])[None])


def value_and_gradients(
    nll: Callable, *arguments: torch.Tensor, factor: float = 1.0, **options: float | None
) -> list[torch.Tensor]:
    leaves = [
        argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments
    ]
    value = nll(*leaves, **options)
    (value * factor).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def gap(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest difference of each pair, relative to the largest number of the pair."""
    assert len(ones) == len(others)
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(ones, others, strict=True)
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 tokens: three of them, one shorter."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("factor", [1.0, 1 / 8192])
def test_loss_and_gradients_are_those_of_whole_logits(small_chunks, softcap, factor):
    arguments = inputs()
    ours, theirs = (
        value_and_gradients(nll, *arguments, factor=factor, softcap=softcap)
        for nll in (fused_linear_cross_entropy, plain_nll)
    )
    assert len(ours) == 3 and gap(ours, theirs) <= CLOSE


def test_a_frozen_head_gets_no_gradient_and_changes_none(small_chunks):
    hidden, weight, targets = inputs()
    trained = value_and_gradients(fused_linear_cross_entropy, hidden, weight, targets)
    frozen = value_and_gradients(fused_linear_cross_entropy, hidden, weight.detach(), targets)
    assert (
        len(frozen) == 2
        and torch.equal(frozen[0], trained[0])
        and torch.equal(frozen[1], trained[1])
    )


def test_without_labels_the_loss_is_0_and_so_is_every_gradient():
    value, *gradients = value_and_gradients(fused_linear_cross_entropy, *inputs(tokens=0))
    assert value == 0 and gradients[0].shape == (0, HIDDEN) and not gradients[1].any()


@pytest.mark.parametrize(
    "dtype, factor",
    [(torch.bfloat16, 1 / 8192), (torch.float16, 65536 / 8192)],
    ids=["bfloat16", "float16"],
)
def test_half_precision_loses_no_more_than_the_plain_loss_does(small_chunks, dtype, factor):
    """Compare with float64. The factor is that of a mean over 8,192 tokens.

    In float16 it is multiplied by the 65,536 of a loss scaler.
    """
    hidden, weight, targets = inputs(
        spread=0.05, dtype=dtype
    )  # probabilities alike: most gradients are small
    exact = value_and_gradients(
        _nll64_uncapped, hidden.double(), weight.double(), targets, factor=factor
    )
    ours, plain = (
        value_and_gradients(nll, hidden, weight, targets, factor=factor)
        for nll in (fused_linear_cross_entropy, plain_nll)
    )
    assert gap(ours, exact) <= 1.5 * gap(plain, exact) < 0.02


def _nll64_uncapped(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")


# Models

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SPECIAL = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
}
FUSABLE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2")


def tiny(model_type: str, **changes: object) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    return with_adapters(model)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels (2, 24): the second row ends in padding, some tokens have no loss."""
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, 24))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, IGNORE_INDEX)
    labels[1, 15:] = IGNORE_INDEX
    return ids, labels


def plain_step(
    model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    return _stepped(model, summed_nll(model(input_ids=ids).logits, labels))


def fused_step(
    model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    return _stepped(model, fused_nll(model, model, {"input_ids": ids}, labelled(labels)))


def _stepped(model: PreTrainedModel, nll: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (nll / 8).backward()
    return [
        nll.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", FUSABLE)
def test_a_models_step_is_the_plain_one(model_type, is_lora):
    model = adapted(tiny(model_type)) if is_lora else tiny(model_type)
    plain = plain_step(model, *batch())
    assert why_loss_not_fusable(model) is None and model.training
    fuse_loss(model)
    fused = fused_step(model, *batch())
    assert len(fused) == len(plain) > 10
    assert all(
        gap([ours], [theirs]) <= 1e-5
        for ours, theirs in zip(fused, plain, strict=True)
        if theirs.any()
    )  # through two layers back


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 1.0}),
    ],
)
def test_a_head_that_is_scaled_or_capped_has_the_plain_step(model_type, changes):
    model = tiny(model_type, **changes)
    plain = plain_step(model, *batch())
    assert why_loss_not_fusable(model) is None
    fuse_loss(model)
    fused = fused_step(model, *batch())
    assert len(fused) == len(plain) and gap(fused, plain) <= 1e-5
    head = model.lm_head.forward
    head.formula = HeadFormula()
    assert gap(fused_step(model, *batch())[:1], plain[:1]) > 1e-3, "the scale is seen"


class RoundsItsLogits(LlamaForCausalLM):
    """A model that returns logits in the type of its config, as Unsloth's do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.to(self.config.dtype)
        return output


def test_logits_that_are_rounded_are_those_of_the_head():
    model = tiny("llama").to(torch.bfloat16)
    model.__class__ = RoundsItsLogits
    model.config.dtype = torch.bfloat16
    assert why_loss_not_fusable(model) is None
    assert model.config.dtype == torch.bfloat16
    fuse_loss(model)
    assert model.lm_head.forward.formula == HeadFormula()


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_decides_the_type_of_the_matmuls_as_in_the_plain_step(autocast):
    model = tiny("llama")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = plain_step(model, *batch())
        fuse_loss(model)
        fused = fused_step(model, *batch())
    assert gap(fused[:1], plain[:1]) <= (
        1e-3 if autocast else CLOSE
    )  # float32 sums of the same bfloat16 logits
    assert all(
        one.dtype == other.dtype == torch.float32
        and gap([one], [other]) <= (0.03 if autocast else 1e-5)
        for one, other in zip(fused, plain, strict=True)
    )


def test_a_failed_pass_leaves_nothing_announced():
    model = tiny("llama")
    fuse_loss(model)
    ids, labels = batch()
    with pytest.raises(TypeError):
        fused_nll(model, model, {"input_ids": "no tensor"}, labelled(labels))
    assert model(input_ids=ids).logits.shape == (2, 24, VOCABULARY)


def test_the_loss_is_read_by_one_hook_and_after_those_of_a_wrapper():
    model = tiny("llama")
    fuse_loss(model)
    ids, labels = batch()
    model.lm_head.register_forward_hook(lambda head, args, nll: 2 * nll)  # as ZeRO-3's changes it
    hooks = len(model.lm_head._forward_hooks)
    before = fused_nll(model, model, {"input_ids": ids}, labelled(labels))
    read_loss_last(model)
    after = fused_nll(model, model, {"input_ids": ids}, labelled(labels))
    assert after.item() == 2 * before.item() and len(model.lm_head._forward_hooks) == hooks


# Where it does not apply


class ShiftedLogits(LlamaForCausalLM):
    """A model whose logits are no multiple of its head's scores."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


def test_a_head_whose_product_is_not_the_logits_is_left_alone():
    assert "with a bias" in why_loss_not_fusable(tiny("phi"))
    model = tiny("llama")
    model.__class__ = ShiftedLogits
    assert "scaled or changed" in why_loss_not_fusable(model)


def test_a_head_with_adapters_and_a_patched_one_are_left_alone():
    model = tiny("llama", tie_word_embeddings=False)
    assert why_loss_not_fusable(model) is None
    fuse_loss(model)
    assert "patched" in why_loss_not_fusable(model)
    trained_head = with_adapters(tiny("llama"), target_modules=["lm_head", "q_proj"])
    assert "has adapters" in why_loss_not_fusable(trained_head)


def test_weights_that_are_no_numbers_are_not_for_this_check():
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert why_loss_not_fusable(model) is None


# Memory


@pytest.mark.parametrize(
    "tokens, vocabulary, itemsize",
    [
        (8192, 128256, 2),
        (1640, 128256, 2),
        (1, 128256, 4),
        (0, 32000, 2),
        (100, 97, 4),
        (1025, 262144, 2),
    ],
)
def test_chunks_are_alike_and_within_their_bytes(tokens, vocabulary, itemsize):
    rows = chunk_tokens(tokens, vocabulary, itemsize)
    assert rows * vocabulary * itemsize <= max(
        linear_cross_entropy.CHUNK_BYTES, 128 * vocabulary * itemsize
    )
    chunks = -(-tokens // rows)
    assert chunks <= 1 or rows % 128 == 0
    assert tokens - (chunks - 1) * rows > rows // 2 - 128 or chunks <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", long("float32")])
@pytest.mark.long
def test_the_gpus_kernel_computes_what_the_cpu_does(dtype):
    """Run the kernel in Triton's interpreter, which must be set when a process starts."""
    run = outcome_of(
        [sys.executable, "-c", INTERPRETED.format(dtype=dtype)],
        {**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]


INTERPRETED = """
import torch
from sft_kernels.loss import linear_cross_entropy
linear_cross_entropy.BLOCK = 64  # several blocks a row, the last one not full
torch.manual_seed(0)
for softcap, scale in ((None, 256.0), (3.0, 1.0)):
    logits = (4 * torch.randn(5, 301)).to(torch.{dtype})
    targets = torch.tensor([0, 63, 64, 300, 7])
    ours, reference = logits.clone(), logits.clone()
    nll = linear_cross_entropy.launch_cross_entropy(ours, targets, softcap, scale)
    expected = linear_cross_entropy.nll_and_gradient_(reference, targets, softcap, scale)
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=0)
    # float32: exponentials of two libraries; bfloat16: the last of 8 bits
    rtol = 2**-7 if logits.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours.float(), reference.float(), rtol=rtol, atol=1e-6 * scale)
"""
