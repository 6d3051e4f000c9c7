"""What cannot be loaded or trained is refused: the message names the file, the part, or the setting."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_forms
import torch
from published_models import published_model
from safetensors.torch import load_file, save_file
from stored_forms import change_config, change_tensors

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models import bnb, lora, unsloth
from sft_play.models.load import load_base, load_model

CPU = Process.alone(torch.device("cpu"))
UP = "model.layers.0.mlp.up_proj.weight"


def config_of(base: Path, mode: str = "lora", trusts: bool = False, **options: Any) -> Config:
    tuning = {"mode": mode, "lora": options}
    model = {"name": str(base), "trust_remote_code": trusts}
    return Config.model_validate({"model": model, "tuning": tuning})


def set_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that sets keys of a JSON file in a folder, or deletes those of None."""

    def change(folder):
        facts = {**json.loads((folder / name).read_text()), **changes}
        kept = {key: value for key, value in facts.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return change


def without_eos(folder: Path) -> None:
    set_json("tokenizer_config.json", eos_token=None)(folder)
    for name in ("config.json", "generation_config.json"):
        set_json(name, eos_token_id=None)(folder)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def written_for_other_transformers(folder: Path) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own_model.Own"}
    change_config(folder, model_type="own", auto_map=own)
    code = "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    (folder / "own.py").write_text(f"from transformers import LlamaConfig\n{code}")
    (folder / "own_model.py").write_text("from transformers.utils import is_gone\n")


def cut_short(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[UP]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda t: {**t, name: torch.ones(1)})


# What spoils the folder of a model, and the words that the message must have
SPOILT: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no eos": (without_eos, ("eos_token",)),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ("tokenizer",)),
    "no tokenizer": (without_tokenizer, ("tokenizer.json",)),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("model.safetensors",)),
    "another shape": (set_json("config.json", intermediate_size=16), ()),
    "own code": (written_for_other_transformers, ("is_gone",)),
    "generation": (set_json("generation_config.json", watermarking_config=5), ()),
    "cut short": (cut_short, ()),
    "a tensor too few": (without_a_tensor, ("1 tensors", UP)),
    "a tensor too many": (with_a_tensor("lm_head.bias"), ("lm_head.bias", "LlamaForCausalLM")),
    "a scale of no weight": (with_a_tensor("model.other.scale_inv"), ("model.other",)),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_folder_is_class_13_with_what_is_wrong(tiny_base, tmp_path, what):
    folder = shutil.copytree(tiny_base, tmp_path / "model")
    spoil, words = SPOILT[what]
    spoil(folder)
    config = config_of(folder, trusts=what == "own code")
    with pytest.raises(EnvironmentFault) as error:
        load_base(config, CPU)
        load_tokenizer(config)
    message = str(error.value)
    assert [word for word in (f"model.name={folder}", *words) if word not in message] == []


def test_a_folder_that_is_not_there_has_no_tokenizer(tmp_path):
    with pytest.raises(EnvironmentFault, match=f"model.name={tmp_path}/none"):
        load_tokenizer(config_of(tmp_path / "none"))


@pytest.mark.parametrize("form", ["fp8_block", "fp8_tensor", "compressed_fp8"])
def test_a_weight_without_its_scale_is_class_13(tmp_path, form):
    base = getattr(stored_forms, form)(tmp_path / form)

    def without(tensors):
        scale = next(name for name in tensors if "q_proj.weight_scale" in name)
        return {name: tensor for name, tensor in tensors.items() if name != scale}

    change_tensors(base, without)
    with pytest.raises(EnvironmentFault, match=r"q_proj\.weight"):
        load_base(config_of(base), CPU)


# A model type, the mode, the adapters, and the words that the message must have
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", "lora", {"target_modules": ["q_proj", "w_proj"]}, "w_proj down_proj"),
    ("llama", "lora", {"layers_to_transform": [0, 2]}, "2 layers 0 1"),
    ("llama", "lora", {"modules_to_save": ["embed"]}, "embed embed_tokens lm_head"),
    ("llama", "lora", {"trainable_tokens": ["<|nobody|>"]}, "<|nobody|>"),
    ("llama", "lora", {"experts": "per_expert"}, "tuning.lora.experts=per_expert"),
    (
        "llama",
        "qlora",
        {"modules_to_save": ["up_proj"], "target_modules": ["q_proj"]},
        "up_proj 4 bits",
    ),
    ("mixtral", "lora", {"dropout": 0.1}, "tuning.lora.dropout=0.1 TUNING_LORA_EXPERTS=none"),
    ("mixtral", "lora", {"use_dora": True}, "use_dora=true TUNING_LORA_EXPERTS=none"),
    (
        "mixtral",
        "lora",
        {"init_lora_weights": "orthogonal"},
        "TUNING_LORA_INIT_LORA_WEIGHTS=default",
    ),
    ("mixtral", "lora", {"target_modules": ["w1"]}, "w1 gate_up_proj"),
    ("mixtral", "lora", {"target_modules": ["down_proj"], "experts": "none"}, "down_proj"),
]


@pytest.mark.parametrize("model_type, mode, options, words", REFUSED)
def test_adapters_that_a_model_cannot_have_are_refused_by_name(
    base_of, model_type, mode, options, words
):
    with pytest.raises(ConfigError) as error:
        load_model(config_of(base_of(model_type, mode), mode, **options), CPU)
    assert [word for word in words.split() if word not in str(error.value)] == []


def test_layers_whose_adapters_peft_would_not_load_again_are_refused(tmp_path):
    for options, words in (({}, "TUNING_MODE=full"), ({"target_modules": ["q_proj"]}, "q_proj")):
        with pytest.raises(ConfigError, match=words):
            lora.add_adapters(published_model("deepseek_ocr2"), config_of(tmp_path, **options))


def test_an_attention_that_the_architecture_lacks_is_an_error_of_the_setting(base_of):
    config = config_of(base_of("bloom"))
    asked = config.model.model_copy(update={"attn_implementation": "sdpa"})
    words = r"model\.attn_implementation=sdpa.* MODEL_ATTN_IMPLEMENTATION=auto"
    with pytest.raises(ConfigError, match=words):
        load_model(config.model_copy(update={"model": asked}), CPU)


def test_experts_in_4_bits_are_refused_under_zero3(base_of, monkeypatch):
    monkeypatch.setattr(bnb, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ConfigError, match="ZeRO-3"):
        load_base(config_of(base_of("mixtral", "qlora"), "qlora"), CPU)


def test_unsloth_that_is_not_installed_is_class_13_with_what_to_type():
    with pytest.raises(EnvironmentFault, match=r"make install-unsloth.* TUNING_BACKEND=bnb"):
        unsloth.import_first()


def test_the_folder_that_is_spoilt_above_is_whole(tiny_base):
    assert load_tokenizer(config_of(tiny_base)) and load_base(config_of(tiny_base), CPU)
