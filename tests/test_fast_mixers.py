"""Mixers that keep a state across tokens: packed documents are those alone, whatever the mixer."""

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from architecture_steps import (
    CPU,
    Document,
    Step,
    adapted,
    gap,
    gradients_of,
    loss_of,
    reference_step,
    settings,
)
from tiny_models import TINY, tiny_model
from torch import Tensor, nn
from torch.nn import functional

from sft_kernels import packed as by_document
from sft_kernels.boundaries import Documents
from sft_kernels.capture import LENGTHS
from sft_kernels.mixers import forward as mixer_forward
from sft_kernels.mixers import indices
from sft_kernels.mixers import install as mixer_install
from sft_kernels.mixers.install import find_mixers, hiding_documents, install_mixers, likely_mixers
from sft_kernels.norms import install as norms_install
from sft_kernels.norms.residual import epsilon
from sft_kernels.packed import UNMASKED
from sft_kernels.process import Process
from sft_kernels.training_setup import TrainingSetup, Unsupported, is_fused
from sft_play.config.schema import Config
from sft_play.data.collate import PackCollator, TrainRows
from sft_play.data.render import IGNORE_INDEX
from sft_play.models import fast

# A gated delta rule, a short convolution, Mamba 2 and Mamba
MIXERS = ("qwen3_next", "lfm2", "bamba", "jamba")
# Documents of one token, shorter than a convolution is wide, and longer than a chunk of 64
ROWS = ((5, 1, 2, 70, 3), (17, 1, 1, 31, 24, 2))


def documents() -> list[Document]:
    found = []
    for seed, lengths in enumerate(ROWS):
        draw = np.random.default_rng(seed)
        for length in lengths:
            ids = draw.integers(TINY.vocabulary, size=length)
            found.append(Document(ids, np.array([IGNORE_INDEX, *ids[1:]])))
    return found


def step_alone(model: nn.Module) -> Step:
    """Return the step of the classes' own code: one document after another."""
    return reference_step(model, documents())


def packed_step(model: nn.Module) -> Step:
    """Return the step of one packed batch of two rows, the second padded."""
    model.zero_grad()
    rows, first = TrainRows(documents()), len(ROWS[0])
    indices = range(first + len(ROWS[1]))
    batch = PackCollator(0, 128, varlen=True)([rows[indices[:first]], rows[indices[first:]]])
    loss = loss_of(model, batch)
    loss.backward()
    logits: list[Tensor] = []
    with torch.no_grad():
        for row, lengths in zip(model(**batch.arguments).logits, ROWS, strict=True):
            logits += row[: sum(lengths)].split(lengths)
    return Step(loss.item(), logits, gradients_of(model))


def lora_model(model_type: str) -> Any:
    return adapted(tiny_model(model_type), settings("lora"))


def setup_of(model: Any, zero_stage: int = 0, use_kernels: bool = True) -> TrainingSetup:
    config = Config.model_validate({"train": {"fast_path": "auto" if use_kernels else False}})
    return fast.setup_of(model, config, Process.alone(CPU), zero_stage)


def install(model: Any, zero_stage: int = 0, use_kernels: bool = True) -> list[bool]:
    """Install the mixers of a model; return of each whether one call computes all documents."""
    count = install_mixers(setup_of(model, zero_stage, use_kernels))
    states = [vars(module).get("mixer_state") for module in model.modules()]
    in_one_call = [state.fast is not None for state in states if state is not None]
    assert len(in_one_call) == count
    return in_one_call


def first_mixer(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if "mixer_state" in vars(module))


@pytest.mark.parametrize("model_type", MIXERS)
def test_packed_documents_are_those_alone(model_type):
    model = lora_model(model_type)
    alone = step_alone(model)
    with hiding_documents(model):
        leaking = gap(alone, packed_step(model))
    assert leaking.logits > 0.1 and leaking.gradients > 1e-2, "the own code keeps its state"

    assert install(model) == [True]
    found = gap(alone, packed_step(model))
    assert found.is_rounding, found


@pytest.mark.parametrize("model_type, layers", [("qwen3_next", 1), ("gpt_oss", 2)])
def test_mixers_without_known_kernels_run_document_by_document(model_type, layers):
    """So does attention that makes its masks without the position ids, as that of gpt_oss."""
    model = lora_model(model_type) if layers == 1 else tiny_model(model_type)
    alone = step_alone(model)
    assert install(model, use_kernels=layers == 2) == [False] * layers
    found = gap(alone, packed_step(model))
    assert found.is_rounding, found


def _normed(norm: nn.Module, x: Tensor, groups: int = 1) -> Tensor:
    grouped = x.unflatten(-1, (groups, -1))
    inverse = (grouped.square().mean(-1, keepdim=True) + epsilon(norm)).rsqrt()
    return norm.weight * (grouped * inverse).flatten(-2)


def _silu_then_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    group = getattr(norm, "group_size", None) or x.shape[-1]
    return _normed(norm, x * functional.silu(gate), x.shape[-1] // group)


GATED_NORMS = {
    "norm_then_silu": lambda norm, x, gate: _normed(norm, x) * functional.silu(gate),
    "norm_then_sigmoid": lambda norm, x, gate: _normed(norm, x) * gate.sigmoid(),
    "silu_then_norm": _silu_then_norm,
}


@pytest.fixture
def norm_formulas(monkeypatch):
    """Let the formulas of gated norms stand for their kernels, which need a GPU."""
    monkeypatch.setattr(norms_install, "uses_fla", lambda tensor: True)
    for name, formula in GATED_NORMS.items():
        monkeypatch.setattr(norms_install, name, formula)


@pytest.mark.parametrize(
    "model_type, kernel",
    [("qwen3_5", "norm_then_silu"), ("bamba", "silu_then_norm"), ("nemotron_h", "silu_then_norm")],
)
def test_a_gated_norm_gets_the_kernel_that_computes_it(model_type, kernel, norm_formulas):
    model = lora_model(model_type)
    alone = step_alone(model)
    install(model)
    fused = [module for module in model.modules() if "gated_norm" in vars(module)]
    assert {module.gated_norm for module in fused} == {GATED_NORMS[kernel]}
    assert all(is_fused(module, norms_install.gated_norm_forward) for module in fused)
    assert gap(alone, packed_step(model)).is_rounding


def test_a_gated_norm_that_no_kernel_computes_keeps_its_code(norm_formulas, monkeypatch):
    monkeypatch.setattr(norms_install, "norm_then_silu", GATED_NORMS["silu_then_norm"])
    model = lora_model("qwen3_5")
    install(model)
    norms = norms_install.gated_norms(model.get_base_model().get_decoder())
    assert norms and not any("forward" in vars(module) for module in norms)


@pytest.mark.parametrize("forgotten", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_a_state_that_one_call_keeps_is_found_before_training(forgotten, monkeypatch, caplog):
    monkeypatch.setitem(mixer_forward.KERNELS, forgotten, lambda own: own)
    mixer_forward.rebound.cache_clear()
    model = tiny_model("qwen3_5")
    with caplog.at_level(logging.WARNING):
        found = install(model)
    mixer_forward.rebound.cache_clear()
    assert found == [False]
    assert "Qwen3_5GatedDeltaNet: packed documents in one call differ by" in caplog.text


@pytest.mark.parametrize("model_type", MIXERS)
def test_kernels_are_tuned_on_as_many_tokens_as_a_step_has(model_type, monkeypatch):
    """The functions of a CPU stand for kernels that a GPU tunes when they are first called."""
    monkeypatch.setattr(mixer_install, "uses_fla", lambda tensor: True)
    monkeypatch.setattr(mixer_install, "TUNED_TOKENS", 96)
    monkeypatch.setattr(mixer_install, "TUNED_DOCUMENT", 32)
    lengths: list[list[int]] = []
    forward_packed = mixer_install.forward_packed

    def noted(packed, *args, **kwargs):
        lengths.append(packed.batch.lengths)
        return forward_packed(packed, *args, **kwargs)

    monkeypatch.setattr(mixer_install, "forward_packed", noted)
    model = lora_model(model_type)
    alone = step_alone(model)
    assert install(model) == [True]
    assert lengths[0] == [32, 32, 32]
    assert gap(alone, packed_step(model)).is_rounding


def test_checkpointed_layers_recompute_the_same_documents():
    model = lora_model("lfm2")
    install(model)
    plain = packed_step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert gap(plain, packed_step(model)).gradients <= 1e-6


@pytest.mark.parametrize("model_type", ["qwen3_5", "falcon_h1", "nemotron_h", "lfm2_moe"])
def test_where_nothing_can_be_measured_the_same_mixers_look_likely(model_type):
    model = tiny_model(model_type)
    install(model)
    measured = {type(module) for module in model.modules() if "mixer_state" in vars(module)}
    likely = {type(module) for module in likely_mixers(tiny_model(model_type).get_decoder())}
    assert likely == measured
    assert install(tiny_model(model_type), zero_stage=3)


def test_a_model_of_attention_alone_has_no_mixer():
    model = tiny_model("llama")
    install(model)
    assert find_mixers(setup_of(model)) == []
    assert model.training, "the search leaves the model as it was"


def test_a_module_that_cannot_be_reset_is_named():
    with pytest.raises(Unsupported, match="BloomAttention reads other documents"):
        install(tiny_model("bloom"))


@pytest.mark.parametrize("model_type", ["lfm2", "bamba"])
def test_evaluation_and_generation_run_the_own_code_with_its_masks(model_type):
    model = tiny_model(model_type).eval()
    ids = torch.arange(2, 16).view(2, 7)
    ids[0, :3] = 0
    mask = (ids > 0).long()  # padding on the left, as in generation
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "use_cache": True}
    expected = model.generate(ids, **options)
    logits = model(ids, attention_mask=mask).logits
    install(model)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)


def test_a_training_batch_without_a_mask_reaches_mixers_without_one():
    model = tiny_model("mamba2")  # gives its mixers the mask as it comes
    install(model)
    ids = torch.arange(2, 16).view(2, 7)
    expected = model(ids).logits
    assert torch.equal(model(ids, attention_mask=UNMASKED).logits, expected)


def test_a_copy_of_a_model_keeps_its_own_documents():
    model = lora_model("lfm2")
    alone = step_alone(model)
    install(model)
    copied = copy.deepcopy(model)
    assert gap(alone, packed_step(copied)).is_rounding
    mine = first_mixer(model).mixer_state.packed
    assert first_mixer(copied).mixer_state.packed is not mine
    assert mine.batch.lengths == list(LENGTHS)


def test_groups_hold_every_token_once():
    lengths = [3, 64, 65, 1, 130]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    batch = Documents(ends.int(), max(lengths))
    tokens = torch.cat([index.flatten() for index in indices.groups(batch).tokens])
    assert torch.equal(tokens[indices.groups(batch).places], torch.arange(sum(lengths)))
    assert [tuple(index.shape) for index in indices.groups(batch).tokens] == [
        (3, 64),
        (1, 65),
        (1, 130),
    ]
    found, places = indices.places_with_ancestors(batch, 3)
    assert found[:10].tolist() == [-1, -1, -1, 0, 1, 2, -1, -1, -1, 3]
    assert places[:4].tolist() == [3, 4, 5, 9]


def test_outputs_that_are_no_tokens_are_dropped():
    tokens = torch.ones(1, 2, 4)
    joined = by_document._join([(tokens, torch.ones(1, 8)), (tokens, torch.ones(1, 8))], [2, 2])
    assert joined[0].shape == (1, 4, 4) and joined[1] is None
