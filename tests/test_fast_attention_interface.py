"""Our attention under the modules of transformers equals their eager attention with a mask."""

import importlib
from typing import Any

import pytest
import torch
from marks import long
from tiny_models import TINY, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_kernels.attention import forward as attention_interface
from sft_kernels.attention.forward import keep_soft_caps, remove_mask, use_interface
from sft_kernels.boundaries import DOCUMENTS, Documents
from sft_kernels.packed import UNMASKED, watch_documents

ROWS, TOKENS = 2, 24
LENGTHS = (9, 15, 3, 17, 4)  # documents of two rows
REAL_TOKENS = 15  # of the second row, when it is padded
SAME = 1e-5
# Gemma 4 does not scale its scores: differences of rounding grow
TOLERANCES = {"gemma4": 1e-4}
FAST = ("gpt_oss", "gemma2", "gemma4", "stablelm", "deepseek_v3")
LONG = ("gemma3", "cohere2", "olmo3", "smollm3", "exaone4", "glm4", "phi", "phi3", "dots1")
MODELS = [*FAST, *(long(name) for name in LONG)]


def fused(model: PreTrainedModel) -> PreTrainedModel:
    decoder = model.get_decoder()
    use_interface(decoder)
    packed_documents = watch_documents(model, decoder)
    for module in decoder.modules():
        module.packed_documents = packed_documents
    decoder.register_forward_pre_hook(remove_mask, with_kwargs=True)
    return model


def packed() -> dict[str, Any]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(ROWS, TOKENS)
    return {"position_ids": positions, DOCUMENTS: Documents.of_lengths(LENGTHS)}


def padded() -> dict[str, Any]:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, REAL_TOKENS:] = 0
    return {"attention_mask": mask}


def masks_of_documents() -> tuple[Tensor, Tensor]:
    """Return additive masks (B, 1, T, T) of full and of sliding attention within documents."""
    document = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    document = document.view(ROWS, TOKENS)
    position = torch.arange(TOKENS)
    distance = position[:, None] - position
    full = (distance >= 0) & (document[:, :, None] == document[:, None, :])
    near = full & (distance < TINY.window)
    lowest = torch.finfo(torch.float32).min
    return tuple(
        torch.zeros(ROWS, 1, TOKENS, TOKENS).masked_fill(~m[:, None], lowest) for m in (full, near)
    )


def step(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the decoder's output for real tokens, and the gradients of all weights."""
    ids = torch.randint(5, 2000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    found = model(input_ids=ids, use_cache=False, output_hidden_states=True, **inputs)
    hidden = found.hidden_states[-1]
    if "attention_mask" in inputs:
        hidden = hidden[inputs["attention_mask"].bool()]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": hidden.detach(), **found}


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    assert found.keys() == expected.keys()
    gaps = []
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max()
        gaps.append((difference / tensor.abs().max().clamp(min=1e-6)).item())
    return max(gaps)


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_are_those_of_eager_attention(name):
    plain = step(tiny_model(name, attention="eager"), padded())
    assert gap(step(fused(tiny_model(name)), padded()), plain) < TOLERANCES.get(name, SAME)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_are_those_of_eager_attention_with_masks(name, monkeypatch):
    found = step(fused(tiny_model(name)), packed())
    model = tiny_model(name, attention="eager")
    code = importlib.import_module(type(model).__module__)
    full, near = masks_of_documents()
    monkeypatch.setattr(code, "create_causal_mask", lambda *_, **__: full)
    monkeypatch.setattr(
        code, "create_sliding_window_causal_mask", lambda *_, **__: near, raising=False
    )
    inputs = {"position_ids": packed()["position_ids"]}
    assert gap(found, step(model, inputs)) < TOLERANCES.get(name, SAME)


def without_cap(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    return model


@torch.no_grad()
def test_evaluation_keeps_the_soft_cap_that_sdpa_leaves_out():
    mask = torch.ones(1, 12, dtype=torch.long)
    ids = torch.arange(12)[None] + 5
    eager = tiny_model("gemma2", attention="eager").eval()(ids, attention_mask=mask).logits
    ours = fused(tiny_model("gemma2")).eval()(ids, attention_mask=mask).logits
    assert torch.allclose(ours, eager, atol=1e-5)
    model = without_cap(tiny_model("gemma2", attention="eager")).eval()
    assert not torch.allclose(model(ids, attention_mask=mask).logits, eager, atol=1e-2)


def test_soft_caps_are_kept_without_fused_kernels_too(caplog):
    plain = step(tiny_model("gemma2", attention="eager"), padded())
    model = tiny_model("gemma2", attention="eager")
    model.config._attn_implementation = "sdpa"  # which newer versions refuse to build it with
    with caplog.at_level("INFO"):
        keep_soft_caps(model)
        keep_soft_caps(tiny_model("gemma3", attention="sdpa"))
    assert [record.args for record in caplog.records] == [(2.0,)]
    assert gap(step(model, padded()), plain) < SAME


def test_a_saved_config_does_not_name_our_attention():
    model = fused(tiny_model("gemma3"))
    assert model.config._attn_implementation == "sft_play_over_sdpa"
    assert "sft_play" not in model.config.to_json_string()


def test_what_is_not_causal_attention_is_refused():
    query = torch.randn(1, 2, 5, 8)
    module = nn.Module()
    given = (module, query, query, query, UNMASKED, "sdpa")
    for wrong, words in (
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": query}, "position_bias"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_interface.attention_interface_forward(*given, **wrong)


def test_an_attention_that_ours_does_not_replace_is_refused():
    decoder = tiny_model("llama").get_decoder()
    decoder.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attention is flex_attention"):
        use_interface(decoder)
