"""Published composite checkpoints as a run trains them: a step is that of plain PEFT.

`make test-architectures` tries every type; these are the ones that people download.
"""

import json
import shutil

import pytest
import torch
from architecture_steps import (
    Gap,
    adapted,
    fused,
    gap,
    reference_step,
    settings,
    trained_step,
)
from published_files import weight_files
from published_models import BUILT_TYPES, published_model, write_published
from run_files import run_json
from safetensors.torch import load_file, save_file
from tiny_models import TINY, WHOLE_BLOCKS

from sft_play.errors import SftPlayError
from sft_play.evaluation import plain
from sft_play.inference.merge import merge_run
from sft_play.models.architecture import towers_of

PEOPLES = (
    *("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("mistral3", "llama4", "glm4v", "internvl", "smolvlm", "lfm2_vl", "mllama", "kimi_k25"),
)
# Why the others of transformers' image-text types are not trained on text rows
REFUSED = {
    "cannot be run on text alone": (
        *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0"),
        *("pix2struct", "pp_formulanet", "qwen2_5_omni", "qwen3_omni_moe", "t5gemma2"),
        *("udop", "voxtral_realtime"),
    ),
}
# Their text pass is none that rows of text can train: a random canvas, codes of sound, one token,
# positions of their own, a prompt that is read in both directions
NO_TEXT_PASS = (
    *("diffusion_gemma", "florence2", "kyutai_speech_to_text", "kosmos-2.5", "git", "paligemma"),
)
# N-gram embeddings read the tokens before a document: the check before the first step refuses
# packing
NEVER_PACKED = ("qwen4_exp",)


def step_gap(model_type: str, is_packed: bool) -> Gap:
    """Return how much a step differs from plain PEFT's."""
    model = published_model(model_type).train()
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    lora = settings("lora")
    plain = adapted(model, lora)
    made = fused(plain, lora)
    return gap(reference_step(plain), trained_step(made, is_packed))


@pytest.mark.parametrize("model_type", PEOPLES)
def test_a_step_of_the_declared_class_is_that_of_plain_peft(model_type) -> None:
    found = step_gap(model_type, is_packed=True)
    assert found.is_rounding, found


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl", "smolvlm"])
def test_so_is_a_step_of_padded_rows(model_type) -> None:
    found = step_gap(model_type, is_packed=False)
    assert found.is_rounding, found


@pytest.mark.architectures
@pytest.mark.parametrize("model_type", sorted(set(BUILT_TYPES) - set(PEOPLES)))
def test_every_type_trains_or_says_why_not(model_type) -> None:
    reasons = [reason for reason, types in REFUSED.items() if model_type in types]
    if reasons:
        with pytest.raises((SftPlayError, ValueError), match=reasons[0]):
            towers_of(published_model(model_type))
    elif model_type not in NO_TEXT_PASS:
        assert step_gap(model_type, is_packed=False).is_rounding
        assert step_gap(model_type, is_packed=True).is_rounding != (model_type in NEVER_PACKED)


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("gemma3", "lora"),
        ("gemma3", "full"),
        ("qwen3_5", "full"),
        ("qwen3_5_moe", "lora"),
        ("mistral3", "qlora"),
        ("llama4", "lora"),
    ],
)
def test_what_leaves_is_what_came(
    model_type, mode, tokenizer, tmp_path, plan_run, run_worker
) -> None:
    sizes = WHOLE_BLOCKS if mode == "qlora" else TINY
    base = write_published(model_type, tmp_path / "base", tokenizer, sizes, dtype=torch.bfloat16)
    changes = {"model.name": base, "tuning.mode": mode, "train.learning_rate": 0.01}
    folder = plan_run({**changes, "train.reopen_saved": True})
    assert run_worker(folder) == 0, run_json(folder)["cause"]
    saved = folder.weights(mode)
    if mode != "full":
        assert names_vllm_reads(model_type, load_file(saved / "adapter_model.safetensors"))
        assert "tensor by tensor" in merge_run(folder)[-1]
        saved = folder.path / "merged"
    before, after = weight_files(base), weight_files(saved)
    assert before.keys() == after.keys()
    trained = 0
    for name in before:
        old, new = load_file(before[name])[name], load_file(after[name])[name]
        trained += not torch.equal(old.float(), new.float())
        if is_of_tower(name):
            assert old.dtype == new.dtype and torch.equal(old, new), name
    assert trained
    for path in base.glob("*processor*.json"):
        assert path.read_bytes() == (saved / path.name).read_bytes()
    old, new = (json.loads((place / "config.json").read_text()) for place in (base, saved))
    for config in (old, new):
        for part in (config, config.get("text_config", {})):
            for key in ("dtype", "torch_dtype", "eos_token_id"):
                part.pop(key, None)
    assert old == new


def is_of_tower(name: str) -> bool:
    return name.startswith(("mtp.", "visual.", "model.visual", "vision", "multi_modal"))


def names_vllm_reads(model_type: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether all adapter tensors are named by the declared class, which vLLM maps."""
    path = "language_model.model" if model_type == "llama4" else "model.language_model"
    return all(name.startswith(f"base_model.model.{path}.layers.") for name in tensors)


def test_an_adapter_with_the_text_models_names_is_dead_and_refused(
    tokenizer, tmp_path, plan_run, run_worker
) -> None:
    base = write_published("qwen3_5", tmp_path / "base", tokenizer)
    folder = plan_run({"model.name": base, "train.reopen_saved": False})
    assert run_worker(folder) == 0, run_json(folder)["cause"]
    adapter = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    renamed = {
        name.replace("language_model.", ""): tensor for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
    request = {
        "folder": str(adapter),
        "is_adapter": True,
        "has_config": False,
        "trust_remote_code": False,
        "dtype": "float32",
        "device_map": {"": "cpu"},
        "offload_folder": None,
        "quantization": None,
        "revision": None,
        "stored": None,
    }
    with pytest.raises(ValueError, match=r"(\d+) of \1 adapter tensors, .* belong to no layer"):
        plain.load(request)
