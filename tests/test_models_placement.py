"""sft_play.models.placement on a CPU: which device each block is on.

The meta device stands for another GPU: an operation on tensors of both devices is an error there too.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from run_files import run_json
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models import placement
from sft_play.models.checkpointing import checkpoint_layers

CPU = torch.device("cpu")
META = torch.device("meta")
ALL_CPU = "{model.embed_tokens: cpu, model.layers: cpu, model.norm: cpu, lm_head: cpu}"
TYPES = ["llama", "qwen3", "gpt2", "gemma2", "qwen3_moe", "falcon_h1"]


def devices_of(base: Path, device_map: Any, gpus: int = 2, **settings: Any) -> dict[str, Any]:
    """Return the number of the GPU of each block of a model, or its device's type."""
    device = torch.device("cuda", 0) if gpus else CPU
    process = Process(0, 0, 1, device, gpus=max(1, gpus))
    config = Config.model_validate(
        {"model": {"name": str(base), "device_map": device_map}, **settings}
    )
    found = placement.resolve_device_map(config, process, AutoConfig.from_pretrained(base))
    return {
        name: place.type if place.index is None else place.index for name, place in found.items()
    }


def weights_on(base: Path, devices: dict[str, int]) -> list[int]:
    """Return the weights on each GPU, those that blocks share once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    model.tie_weights()
    held = [0] * (max(devices.values()) + 1)
    for name, parameter in model.named_parameters():
        block = max((key for key in devices if f"{name}.".startswith(f"{key}.")), key=len)
        held[devices[block]] += parameter.numel()
    return held


@pytest.mark.parametrize("model_type", TYPES)
def test_a_balanced_model_is_cut_between_layers(base_of, model_type: str) -> None:
    base = base_of(model_type)
    devices = devices_of(base, "balanced")
    layers = [number for name, number in devices.items() if name.rpartition(".")[2].isdecimal()]
    assert layers == sorted(layers)
    held = weights_on(base, devices)
    assert len(held) == 2
    assert min(held) > 0


def test_32_layers_are_balanced_to_a_fifth(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3", num_hidden_layers=32, hidden_size=64, intermediate_size=256, vocab_size=2048,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for gpus in (2, 4):
        held = weights_on(tmp_path, devices_of(tmp_path, "auto", gpus))
        assert len(held) == gpus
        assert max(held) < 1.2 * sum(held) / gpus


def test_tied_weights_are_on_one_gpu_and_what_has_none_is_where_the_model_begins(tiny_base) -> None:
    devices = devices_of(tiny_base, "balanced")
    assert devices["lm_head"] == devices["model.embed_tokens"] == 0
    assert devices["model.rotary_emb"] == 0
    devices = devices_of(tiny_base, {"": 0, "lm_head": 1, "model.layers.1": 1})
    assert (devices["lm_head"], devices["model.layers.1"], devices["model.layers.0"]) == (0, 1, 0)


def test_low_0_keeps_layers_off_the_first_gpu(base_of) -> None:
    devices = devices_of(base_of("llama"), "balanced_low_0", 3)
    layers = {place for name, place in devices.items() if ".layers." in name}
    assert 0 not in layers
    assert devices["model.embed_tokens"] == 0


def test_a_run_is_used_on_other_devices_than_it_was_trained_on(tiny_base) -> None:
    mapping = {"": 0, "model.layers.1": 1}
    assert set(devices_of(tiny_base, mapping, gpus=0).values()) == {"cpu"}
    assert set(devices_of(tiny_base, {"": 0, "model.layers.1": 5}).values()) == {0, 1}
    assert set(devices_of(tiny_base, "balanced", gpus=0).values()) == {"cpu"}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"": 0, "model.layer": 1}, "no module model.layer; write model.layers"),
        ({"": 0, "transformer": 1}, "its parts are model.embed_tokens, model.layers"),
        ({"": 0, "model.layers.0.mlp": 1}, "is inside model.layers.0, which one GPU computes"),
        ({"": 0, "model.layers.2": 1}, "no module model.layers.2; write model.layers"),
        ({"model.layers": 1}, "names no GPU for model.embed_tokens; add model.embed_tokens: 0"),
    ],
)
def test_a_mapping_names_modules_of_the_model(
    tiny_base, mapping: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        devices_of(tiny_base, mapping)


def test_a_checkpointed_layer_gets_its_arguments_on_its_own_device(base_of) -> None:
    """Otherwise the random state that its dropout draws from would not be restored."""
    model = AutoModelForCausalLM.from_pretrained(base_of("llama"), dtype=torch.float32).train()
    second = model.get_decoder().layers[1].to(META)
    model.hf_device_map = {"": "cpu", "model.layers.1": "meta"}
    checkpoint_layers(model, 2)
    seen: list[torch.device] = []
    second.register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    with pytest.raises(RuntimeError, match="meta"):  # accelerate's hooks would move the others
        model(input_ids=torch.arange(4)[None])
    assert seen == [META]


def test_inputs_follow_an_embedding_that_is_not_on_the_first_device(base_of) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_of("llama"), dtype=torch.float32).to(META)
    placement.move_inputs_to_embedding(model)
    seen: list[torch.device] = []
    decoder = model.get_decoder()
    watch = lambda _, args, kwargs: seen.append(kwargs["position_ids"].device)  # noqa: E731
    decoder.register_forward_pre_hook(watch, with_kwargs=True)
    ids = torch.arange(4)[None]
    with contextlib.suppress(RuntimeError):  # the meta device computes no mask
        decoder(input_ids=ids, position_ids=ids)
    assert seen == [META]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", long("qlora"), long("full")])
def test_a_placed_model_trains_and_resumes_as_a_whole_one(
    train_run, plan_run, run_worker, taught_base, mode: str
) -> None:
    settings = {
        "model.name": taught_base,
        "tuning.mode": mode,
        "tuning.lora.dropout": 0.1,
        "train.max_steps": 4,
        "train.learning_rate": 1e-3,
        "train.gradient_checkpointing": True,
        "train.predict_with_generate": True,
        "train.save_strategy": "steps",
        "train.save_steps": 2,
    }
    whole = plan_run(settings)
    placed = plan_run({**settings, "model.device_map": ALL_CPU})
    assert run_worker(whole) == run_worker(placed) == 0
    resumed = train_run(
        {
            **settings,
            "model.device_map": ALL_CPU,
            "train.resume_from": placed.checkpoints / "checkpoint-2",
        }
    )
    one, two = run_json(whole), run_json(placed)
    assert two["loss"] == one["loss"]
    for when in ("before", "after"):
        for name in ("eval_loss", "rougeL"):
            assert two["metrics"][when][name] == one["metrics"][when][name]
    assert two["fast_path"] == one["fast_path"]
    (expected,) = whole.weights(mode).glob("*.safetensors")
    for folder in (placed, resumed):
        (found,) = folder.weights(mode).glob("*.safetensors")
        torch.testing.assert_close(load_file(found), load_file(expected), rtol=0, atol=0)
