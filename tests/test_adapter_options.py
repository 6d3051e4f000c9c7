"""Adapters of PEFT from elsewhere: each option is loaded as PEFT does, or refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.models import expert_adapters
from sft_play.runs.adapter_options import (
    IGNORED,
    OF_OTHER_MODELS,
    OF_PEFT,
    OF_SETTINGS,
    why_not_usable,
)
from sft_play.runs.earlier_adapter import settings_of_adapter
from sft_play.runs.model_folder import read_adapter_config

IDS = torch.arange(5, 25)[None]


def test_every_option_of_peft_is_in_the_table() -> None:
    names = {field.name for field in dataclasses.fields(LoraConfig)}
    assert names <= IGNORED.union(OF_SETTINGS, OF_PEFT, OF_OTHER_MODELS)
    usual = LoraConfig(target_modules=["q_proj"]).to_dict()
    assert all(why_not_usable(usual, is_training) is None for is_training in (False, True))


@pytest.mark.parametrize(
    ("option", "is_loaded", "is_trained"),
    [
        ({"init_lora_weights": "pissa"}, True, False),
        ({"init_lora_weights": "olora"}, True, False),
        ({"init_lora_weights": "pissa_niter_4"}, False, False),
        ({"init_lora_weights": "corda"}, False, False),
        ({"init_lora_weights": "lora_ga"}, False, False),
        ({"init_lora_weights": "loftq"}, False, False),
        ({"init_lora_weights": "orthogonal"}, True, True),
        ({"init_lora_weights": "gaussian"}, True, True),
        ({"exclude_modules": ["up_proj"]}, True, False),
        ({"lora_bias": True}, True, False),
        ({"rank_pattern": {"q_proj": 4}}, True, False),
        ({"alpha_pattern": {"q_proj": 4}}, True, False),
        ({"trainable_token_indices": [1]}, True, False),
        ({"target_modules": ".*q_proj"}, True, False),
        ({"layer_replication": [[0, 2], [1, 2]]}, False, False),
        ({"alora_invocation_tokens": [1]}, False, False),
        ({"use_qalora": True}, False, False),
        ({"megatron_config": {"a": 1}}, False, False),
        ({"modules_to_save": ["\x1b[2J["]}, False, False),
        ({"layers_pattern": "("}, False, False),
        ({"option_of_the_future": 3}, False, False),
        ({"use_rslora": True, "use_dora": True, "modules_to_save": ["norm"]}, True, True),
        ({"peft_type": "IA3"}, False, False),
        ({"peft_type": "PROMPT_TUNING"}, False, False),
    ],
)
def test_an_option_is_accepted_or_named(option, is_loaded: bool, is_trained: bool) -> None:
    config = {**LoraConfig(target_modules=["q_proj"]).to_dict(), "init_lora_weights": True}
    name = next(iter(option))
    for is_training, accepted in ((False, is_loaded), (True, is_trained)):
        reason = why_not_usable(config | option, is_training)
        assert (reason is None) is accepted
        assert accepted or name in reason


@pytest.fixture
def pissa(tiny_base: Path, tmp_path: Path) -> Path:
    """The folder of an adapter whose base was changed when it was made."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.1)
    model.peft_config["default"].base_model_name_or_path = str(tiny_base)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_that_changed_its_base_is_loaded_as_by_peft_and_not_trained(
    pissa: Path, tiny_base: Path, tmp_path: Path
) -> None:
    def base() -> AutoModelForCausalLM:
        return AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)

    expected = PeftModel.from_pretrained(base(), pissa)(IDS).logits
    found = expert_adapters.load_frozen_adapter(base(), pissa)(IDS).logits
    torch.testing.assert_close(found, expected)
    with pytest.raises(ConfigError, match="init_lora_weights=pissa"):
        settings_of_adapter(str(pissa), tmp_path)


@pytest.mark.parametrize(
    ("options", "saves_embeddings", "narrower"),
    [
        ({"use_dora": True}, False, {"use_dora": False}),
        ({"lora_bias": True}, False, {"lora_bias": False}),
        ({"trainable_token_indices": [1]}, False, {"trainable_token_indices": None}),
        ({"modules_to_save": ["lm_head"]}, False, {"layers_to_transform": [1]}),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True, {"target_modules": ["q_proj"]}),
        ({"target_modules": ["q_proj", "v_proj"]}, True, {"exclude_modules": ["v_proj"]}),
        ({"bias": "all"}, False, {"rank_pattern": {"q_proj": 4}}),
    ],
)
def test_every_tensor_of_an_adapter_is_used_or_it_is_refused(
    tiny_base: Path, tmp_path: Path, options, saves_embeddings: bool, narrower
) -> None:
    def base() -> AutoModelForCausalLM:
        return AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)

    config = LoraConfig(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})
    model = get_peft_model(base(), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    model.save_pretrained(tmp_path, save_embedding_layers=saves_embeddings)
    found = expert_adapters.load_frozen_adapter(base(), tmp_path)(IDS).logits
    torch.testing.assert_close(found, model(IDS).logits)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | narrower))
    with pytest.raises((CheckpointError, RuntimeError), match=r"\d tensors are in|size mismatch"):
        expert_adapters.load_frozen_adapter(base(), tmp_path)


def test_another_type_of_adapter_is_refused_before_any_weight_is_read(pissa: Path) -> None:
    path = pissa / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "peft_type": "IA3"}))
    with pytest.raises(EnvironmentFault, match="peft_type=IA3"):
        read_adapter_config(pissa)
