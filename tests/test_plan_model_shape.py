"""sft_play.plan.model_shape: sizes from a config.json, next to real models and published counts."""

import json
import re
import socket
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from huggingface_hub import constants
from plan_examples import EIGHT_B, load_shape

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.base_model import require_base
from sft_play.plan.config_json import KNOWN, go_offline_without_network, known_model, known_models
from sft_play.plan.model_shape import ModelShape, shape_of
from sft_play.plan.step import Adapters

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SHAPES = [
    {},
    {"num_key_value_heads": 2},
    {"head_dim": 16},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1, "head_dim": 12},
]
# The least that a config.json has to say
LEAST = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
# Billions of weights of the language model, by model card, report or the hub's count of stored
# weights (tied embeddings once, without layers that predict further tokens)
PUBLISHED = {name: facts["published"] for name, facts in json.loads(KNOWN.read_text()).items()}


@cache
def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY, **changes))


def test_llama_3_8b_has_8_03_billion_parameters():
    assert load_shape("meta-llama/Llama-3.1-8B-Instruct", None, {}) == EIGHT_B
    assert EIGHT_B.parameters == 8_030_261_248
    assert Adapters().weights(EIGHT_B) == 41_943_040
    assert Adapters(8, ("q_proj", "v_proj")).weights(EIGHT_B) == 3_407_872


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_shape_counts_the_parameters_of_the_real_model(changes):
    model = tiny_llama(**changes)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(model.config.to_dict(), "tiny").parameters == counted


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["q_proj", "v_proj"],
        ["self_attn.k_proj", "down_proj"],
        ["o_proj", "gate_proj", "up_proj"],
    ],
)
@pytest.mark.parametrize("changes", SHAPES[:2], ids=str)
def test_lora_parameters_are_those_that_peft_trains(changes, targets):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    config = tiny_llama(**changes).config
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(LlamaForCausalLM(config), lora)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert Adapters(4, targets).weights(shape_of(config.to_dict(), "tiny")) == trained


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert shape_of(LEAST, "m") == ModelShape(10, 8, 32, 1, 2, 2, 4, is_tied=False)
    gemma = {**LEAST, "model_type": "gemma2"}
    assert shape_of(gemma, "m").is_tied
    assert not shape_of({**gemma, "tie_word_embeddings": False}, "m").is_tied
    nested = shape_of({"text_config": LEAST, "tie_word_embeddings": True}, "m")
    assert nested == ModelShape(10, 8, 32, 1, 2, 2, 4, is_tied=True)


def test_layers_of_several_widths_have_the_largest():
    assert shape_of({**TINY, "intermediate_size": [80, 96, 80]}, "x").intermediate == 96  # Gemma 3n


def test_a_config_that_relies_on_its_class_is_completed_by_it():
    # as the hub has it: the vocabulary is the class's
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
    }
    on_the_hub = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    known = load_shape("google/gemma-3-27b-it", None, {})
    assert shape_of(on_the_hub, "m") == replace(known, structure=None)
    gpt2 = shape_of({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, "m")
    assert (gpt2.hidden, gpt2.layers, gpt2.heads) == (64, 2, 4)
    assert (gpt2.vocab, gpt2.intermediate, gpt2.is_tied) == (50257, 256, True)


def test_an_infinite_number_is_read_as_transformers_writes_it(tmp_path):
    from transformers import AutoConfig

    layers = ["linear_attention", "moe", "full_attention", "mlp"]
    written = AutoConfig.for_model("nemotron_h", layers_block_type=layers)
    written.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert load_shape(str(tmp_path), None, {}).layers == len(layers)


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "no-such-type"}, {"hidden_size": 8, "vocab_size": None}]
)
def test_a_config_that_describes_no_decoder_is_refused(config):
    with pytest.raises(EnvironmentFault, match=r"model.name=m: .* vocab_size.* MODEL_NAME"):
        shape_of(config, "m")


def test_a_model_is_found_in_a_folder_and_in_the_hubs_cache(tmp_path):
    cached = tmp_path / "hub" / "models--org--m"
    for commit, layers in (("abc", 1), ("def", 2)):
        snapshot = cached / "snapshots" / commit
        snapshot.mkdir(parents=True)
        config = {**LEAST, "num_hidden_layers": layers}
        (snapshot / "config.json").write_text(json.dumps(config))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc\n")
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        found = [load_shape("org/m", name, environ).layers for name in (None, "main", "def")]
        assert found == [1, 1, 2]
    assert load_shape(str(cached / "snapshots" / "def"), None, {}).layers == 2


# The models that are there are models/tiny_llama and models/other, without a config.json
MISSPELT = {
    "models/tiny_lama": "did you mean models/tiny_llama",
    "./modls/tiny_llama": "did you mean models/tiny_llama",
    "tiny/tiny_llama": "the hub gave none",
    "models/other": "models/other: no folder with a config",
    # no names that the hub could have, so that nothing is asked
    "a/b/c": "MODEL_NAME",
    "a/b/llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_model_that_is_not_there_is_refused_with_the_nearest(name, tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny_llama").mkdir(parents=True)
    (tmp_path / "models" / "tiny_llama" / "config.json").write_text("{}")
    (tmp_path / "models" / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match=re.escape(MISSPELT[name])):
        load_shape(name, None, {})


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_that_is_no_model_is_refused(text, tmp_path):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EnvironmentFault, match=str(tmp_path)):
        load_shape(str(tmp_path), None, {})


# Well-known models


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_shape_has_the_parameters_that_its_maker_publishes(name):
    assert load_shape(name, None, {}).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.011)


def test_names_that_share_a_shape_are_that_shape_in_any_case():
    names = known_models()
    assert len(names) > 1.8 * len(PUBLISHED)
    assert len({name.lower() for name in names}) == len(names)  # no name stands for two shapes
    for name in (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "META-LLAMA/llama-3.1-8b",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ):
        assert load_shape(name, None, {}) == EIGHT_B
    assert known_model("meta-llama/Llama-3.1-9B") is None
    config = known_model("meta-llama/Llama-3.1-8B").config
    assert not config.keys() & {"also", "source", "published"}  # keys of the file, not of a config


def test_unsloths_copies_are_the_models_of_their_publishers():
    assert known_model("unsloth/Qwen3-8B") == known_model("Qwen/Qwen3-8B")
    assert known_model("unsloth/Qwen3-9B") is known_model("me/Qwen3-8B-bnb-4bit") is None
    for name in ("unsloth/qwen3-8b-bnb-4bit", "unsloth/Qwen3-8B-unsloth-bnb-4bit"):
        config = Config.model_validate({"model": {"name": name}})
        with pytest.raises(ConfigError, match="set TUNING_MODE=qlora"):
            require_base(config, {})


@pytest.mark.parametrize("is_known", [True, False])
def test_a_hub_whose_name_is_not_known_here_is_not_asked(monkeypatch, is_known):
    def look_up(host, port):
        assert host == "huggingface.co"
        if not is_known:
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    go_offline_without_network()
    assert constants.HF_HUB_OFFLINE is not is_known
