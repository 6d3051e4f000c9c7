"""Counts of matrices, experts and kinds of layers: next to real modules, and as the plan uses them."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from plan_examples import STEP, load_shape
from tiny_models import EXPERTS, HYBRID, MODEL_TYPES, tiny_config
from torch import nn
from traced_steps import build_on_meta
from transformers import AutoModelForCausalLM

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.models import lora
from sft_play.models import structure as counter
from sft_play.plan import counting
from sft_play.plan.config_json import KNOWN
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.model_shape import LLAMA_LIKE, shape_of
from sft_play.plan.recipe import model_summary
from sft_play.plan.speed import step_flops
from sft_play.plan.step import Adapters
from sft_play.plan.structure import (
    LayerKind,
    MatrixKind,
    Structure,
    adapted_matrices,
    structure_as_json,
    structure_from_json,
)

ONE_LAYER = Structure(
    parameters=1000,
    active_parameters=600,
    matrices=(
        MatrixKind("layers.*.q", 4, 4, count=2),
        MatrixKind("layers.*.experts.up", 4, 8, count=2, experts=4, active=1),
        MatrixKind("layers.*.gate", 4, 4, count=2, is_adapted=False, is_quantized=False),
    ),
    layers=(LayerKind(1, query_features=4, window=2), LayerKind(1, is_recurrent=True)),
)
SHAPE = replace(
    shape_of(
        {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1}, "m"
    ),
    structure=ONE_LAYER,
)


def on_meta(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(model_type))


# Next to real modules


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_matrix_of_a_model_is_counted_once(model_type):
    model = on_meta(model_type)
    counted = counter.structure_of(model)
    weights = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Conv1d) or module is model.get_output_embeddings():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and "bias" not in name and name != "A_log":
                weights += parameter.numel()
    assert counted.product_weights == weights
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(kind.count for kind in counted.layers) == model.config.num_hidden_layers
    assert structure_from_json(json.loads(json.dumps(structure_as_json(counted)))) == counted


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_adapters_are_as_many_weights_as_peft_trains(model_type):
    model = on_meta(model_type)
    counted = counter.structure_of(model)
    config = Config.model_validate({"tuning": {"lora": {"r": 4}}})
    with torch.device("meta"):
        adapted = lora.add_adapters(model, config)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert Adapters(rank=4).weights(replace(SHAPE, structure=counted)) == trained


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_weights_in_4_bits_are_those_that_loading_packs(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type).to_dict()))
    settings = {"model": {"name": str(tmp_path)}, "tuning": {"mode": "qlora"}}
    packed = 0
    for parameter in build_on_meta(Config.model_validate(settings), torch.bfloat16).parameters():
        state = getattr(parameter, "quant_state", None)
        packed += math.prod(state.shape) if state is not None else 0
    assert counter.structure_of(on_meta(model_type)).quantized_weights == packed > 0


def test_experts_that_a_token_does_not_meet_are_not_active():
    for model_type in EXPERTS:
        counted = counter.structure_of(on_meta(model_type))
        stacked = [kind for kind in counted.matrices if kind.experts > 1]
        unmet = sum(kind.weights - kind.active_weights for kind in stacked)
        assert counted.active_parameters <= counted.parameters - unmet < counted.parameters
        assert 1 < counted.active_experts < counted.experts, model_type


def test_layers_are_told_apart_by_how_they_mix_tokens():
    gpt_oss = counter.structure_of(on_meta("gpt_oss"))
    assert gpt_oss.layers == (
        LayerKind(1, query_features=32, kv_features=16, window=7, has_experts=True),
        LayerKind(1, query_features=32, kv_features=16, has_experts=True),
    )
    for model_type in HYBRID:
        counted = counter.structure_of(on_meta(model_type))
        assert counted.recurrent_layers > 0, model_type
        assert any(kind.query_features for kind in counted.layers), model_type


# Well-known models


@pytest.mark.parametrize(
    "name",
    [
        "HuggingFaceTB/SmolLM3-3B",
        *(
            long(name)
            for name, facts in json.loads(KNOWN.read_text()).items()
            if facts["model_type"] not in LLAMA_LIKE
        ),
    ],
)
def test_the_counts_of_a_known_model_are_those_of_its_modules(name):
    config = Config.model_validate({"model": {"name": name}})
    counted = counter.count_structure(counter.load_architecture(config))
    assert load_shape(name, None, {}).structure == counted


# Bytes and operations


def test_operations_are_those_of_active_experts_and_of_pairs_within_windows():
    # q, one expert and the router in two layers; 7 pairs of 4 tokens in the layer with attention
    products = 4 * 2 * (16 + 32 + 16) * 4
    assert step_flops(SHAPE, 0, [4], labelled=0) == products + 12 * 4 * 7
    step = replace(STEP, model=SHAPE, adapters=Adapters(rank=2))
    assert step.adapter_weights == 2 * 2 * (8 + 4 * 12)
    assert step.active_adapter_weights == 2 * 2 * (8 + 12)


def test_targets_and_layers_choose_matrices():
    names = [kind.name for kind in adapted_matrices(ONE_LAYER.matrices, ["gate", "experts.up"])]
    assert names == ["layers.*.experts.up", "layers.*.gate"]
    in_one = MatrixKind("layers.*.x", 1, 1, count=3, layers=(1, 3, 5)).in_layers([0, 3], 6)
    assert (in_one.count, in_one.layers) == (1, (3,))
    everywhere = MatrixKind("layers.*.x", 1, 1, count=6).in_layers([0, 3], 6)
    assert everywhere.count == 2


# Other models are counted once


@pytest.fixture
def counted_here(monkeypatch):
    """The modules that were asked; they answer in this process."""
    asked: list[str] = []

    def ask(module, request, environ):
        asked.append(module)
        return counter.answer(request)

    monkeypatch.setattr(counting, "_ask", ask)
    return asked


def config_of(folder: Path, facts: dict[str, Any] | None, tmp_path: Path) -> Config:
    folder.mkdir()
    if facts is not None:
        (folder / "config.json").write_text(json.dumps(facts))
    settings = {"model": {"name": str(folder)}, "data": {"cache_dir": str(tmp_path / "cache")}}
    return Config.model_validate(settings)


def test_a_model_that_nobody_knows_is_counted_once(tmp_path, counted_here, caplog):
    facts = tiny_config("qwen3_next").to_dict()
    config = config_of(tmp_path / "one", facts, tmp_path)
    shapes = [load_counted_shape(config, {}) for _ in range(2)]
    assert counted_here == ["sft_play.models.structure"]
    assert shapes[0] == shapes[1]
    assert shapes[0].structure == counter.structure_of(on_meta("qwen3_next"))
    told = [record.message for record in caplog.records]
    assert told == [f"counting the weights of {config.model.name} without loading them, once"]
    changed = config_of(tmp_path / "two", {**facts, "num_experts": 3}, tmp_path)
    assert load_counted_shape(changed, {}).parameters < shapes[0].parameters
    assert len(counted_here) == 2


def test_a_model_like_llama_is_not_counted(tmp_path, counted_here):
    config = config_of(tmp_path / "one", tiny_config("llama").to_dict(), tmp_path)
    assert load_counted_shape(config, {}).structure is None
    assert not counted_here


def test_a_package_that_a_model_s_code_needs_is_named_each_time(tmp_path, counted_here):
    facts = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    config = config_of(tmp_path / "one", facts, tmp_path)  # its encoder is one of timm
    for _ in range(2):  # it may be installed in between
        with pytest.raises(EnvironmentFault, match=r"needs timm; type \S+ -m pip install timm$"):
            load_counted_shape(config, {})
    assert len(counted_here) == 2


def test_a_model_that_cannot_be_counted_is_a_guess(tmp_path, counted_here):
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    broken = {**sizes, "model_type": "olmo2", "hidden_act": "no-such-act"}
    unknown = config_of(tmp_path / "one", broken, tmp_path)
    shape = load_counted_shape(unknown, {})
    assert "no-such-act" in shape.guess
    assert "a guess" in model_summary(shape)
    load_counted_shape(unknown, {})
    assert len(counted_here) == 1, "what transformers refuses it refuses again"
    nameless = load_counted_shape(config_of(tmp_path / "two", sizes, tmp_path), {})
    assert nameless.guess == "its config.json names no model_type"


def test_a_damaged_count_is_made_anew(tmp_path, counted_here, caplog):
    config = config_of(tmp_path / "one", tiny_config("olmo2").to_dict(), tmp_path)
    shape = load_counted_shape(config, {})
    (kept,) = (tmp_path / "cache" / "structures").iterdir()
    kept.write_text("{")
    assert load_counted_shape(config, {}) == shape
    assert "counting again" in caplog.text
    assert len(counted_here) == 2


@pytest.mark.long
def test_a_process_of_its_own_counts(tmp_path):
    config = config_of(tmp_path / "one", tiny_config("qwen3_moe").to_dict(), tmp_path)
    shape = load_counted_shape(config, {})
    assert shape.structure == counter.structure_of(on_meta("qwen3_moe"))


@pytest.mark.long
def test_the_process_that_counts_finds_packages_of_the_users_python_path(tmp_path):
    """The module is found by PYTHONPATH alone."""
    (tmp_path / "counts_here.py").write_text("""def answer(_): return {"answer": 1}""")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert counting._ask("counts_here", {}, environ) == {"answer": 1}
