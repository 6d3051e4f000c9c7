"""Published composite checkpoints as a run trains them: a step is that of plain PEFT.

`make test-architectures` tries every type; these are the ones that people download.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from architecture_steps import Gap, adapted, fused, gap, reference_step, settings, trained_step
from marks import long
from published_files import weight_files
from published_models import (
    BUILT_TYPES,
    IMAGE_TEXT_TYPES,
    PEOPLES,
    published_model,
    write_published,
)
from safetensors.torch import load_file, save_file
from tiny_models import MODEL_TYPES, TINY, WHOLE_BLOCKS

from sft_play.errors import SftPlayError
from sft_play.evaluation import plain
from sft_play.inference.merge import merge_run
from sft_play.models.architecture import encoders_of
from sft_play.plan.config_json import known_model

ROOT = Path(__file__).resolve().parents[1]
MODEL_NAME = re.compile(r"(?:MODEL_NAME=|model\.name=|\bname: )\"?([\w-]+/[\w.-]+)")
# Why the others of transformers' image-text types are not trained on text rows
REFUSED = {
    "cannot run on text only": (
        *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0"),
        *("pix2struct", "pp_formulanet", "qwen2_5_omni", "qwen3_omni_moe", "t5gemma2"),
        "voxtral_realtime",
    )
}
# Their text pass is none that rows of text can train: a random canvas, codes of sound, one token,
# a prompt that is read in both directions, boxes
NO_TEXT_PASS = (*("diffusion_gemma", "florence2", "kyutai_speech_to_text", "paligemma", "udop"),)
# N-gram embeddings read the tokens before a document, and Kosmos counts positions otherwise: the
# check before the first step refuses
# packing
NEVER_PACKED = ("qwen4_exp", "kosmos-2.5")
# PEFT loads no saved adapter of theirs: they train in mode full alone
NOT_ADAPTED = ("deepseek_ocr2",)


def without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(vars(module).get("dropout"), float):
            module.dropout = 0.0


def step_gap(model_type: str, is_packed: bool, text_type: str | None = None) -> Gap:
    """Return how much a step differs from plain PEFT's."""
    model = published_model(model_type, text_type=text_type).train()
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    without_dropout(model)
    chosen = settings("full" if model_type in NOT_ADAPTED else "lora")
    plain = adapted(model, chosen)
    if model_type == "gemma4":  # plain PEFT's own step in float32 is 9e-5 from one in float64
        plain = plain.double()
    made = fused(plain, chosen)
    return gap(reference_step(plain), trained_step(made, is_packed))


# of layers that others of these types or tests/test_architectures.py have, too
REPEATED = ("gemma4", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "glm4v", "kimi_k25")
STEPS = [
    *(long(name, True, None) if name in REPEATED else (name, True, None) for name in PEOPLES),
    ("mistral3", True, "ministral3"),
    *((name, False, None) for name in ("gemma3", "qwen2_5_vl", "smolvlm")),  # padded rows
]


@pytest.mark.parametrize("model_type, is_packed, text_type", STEPS)
def test_a_step_of_the_declared_class_is_that_of_plain_peft(model_type, is_packed, text_type):
    found = step_gap(model_type, is_packed, text_type)
    assert found.is_rounding, found


@pytest.mark.architectures
@pytest.mark.parametrize("model_type", sorted(set(BUILT_TYPES) - set(PEOPLES)))
def test_every_type_trains_or_says_why_not(model_type):
    reasons = [reason for reason, types in REFUSED.items() if model_type in types]
    if reasons:
        with pytest.raises((SftPlayError, ValueError), match=reasons[0]):
            encoders_of(published_model(model_type))
    elif model_type not in NO_TEXT_PASS:
        assert step_gap(model_type, is_packed=False).is_rounding
        assert step_gap(model_type, is_packed=True).is_rounding != (model_type in NEVER_PACKED)


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("gemma3", "full"),
        long("qwen3_5", "full"),
        long("qwen3_5_moe", "lora"),
        ("mistral3", "qlora"),
        long("llama4", "lora"),
    ],
)
def test_what_leaves_is_what_came(train_run, model_type, mode, tokenizer, tmp_path):
    sizes = WHOLE_BLOCKS if mode == "qlora" else TINY
    base = write_published(model_type, tmp_path / "base", tokenizer, sizes, dtype=torch.bfloat16)
    changes = {"model.name": base, "tuning.mode": mode, "train.learning_rate": 0.01}
    folder = train_run({**changes, "train.reopen_saved": True}, may_trace=False)
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
        if is_of_encoder(name):
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


@pytest.mark.parametrize("model_type", ["mistral3", long("qwen3_5_moe")])
def test_a_resumed_run_reads_weights_that_are_saved_under_other_names(
    train_run, model_type, tokenizer, tmp_path
):
    base = write_published(model_type, tmp_path / "base", tokenizer)
    changes = {"model.name": base, "tuning.mode": "full", "train.learning_rate": 0.01}
    changes |= {"train.max_steps": 4, "train.save_strategy": "steps", "train.save_steps": 2}
    whole = train_run({**changes, "train.reopen_saved": False}, may_trace=False)
    checkpoint = whole.checkpoints / "checkpoint-2"
    again = train_run(
        {**changes, "train.resume_from": checkpoint, "train.reopen_saved": False}, may_trace=False
    )
    for name, path in weight_files(whole.weights("full")).items():
        found = weight_files(again.weights("full"))[name]
        assert torch.equal(load_file(path)[name], load_file(found)[name]), name


def is_of_encoder(name: str) -> bool:
    return name.startswith(("mtp.", "visual.", "model.visual", "vision", "multi_modal"))


def names_vllm_reads(model_type: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether all adapter tensors are named by the declared class, which vLLM maps."""
    path = "language_model.model" if model_type == "llama4" else "model.language_model"
    return all(name.startswith(f"base_model.model.{path}.layers.") for name in tensors)


def test_an_adapter_with_the_text_models_names_is_dead_and_refused(train_run, tokenizer, tmp_path):
    base = write_published("qwen3_5", tmp_path / "base", tokenizer)
    folder = train_run({"model.name": base, "train.reopen_saved": False}, may_trace=False)
    adapter = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    renamed = {
        name.replace("language_model.", ""): tensor for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"PEFT does not load .* adapter tensors"):
        plain.load_folder(plain.Folder(adapter, "float32", {"": "cpu"}))


def test_the_page_names_every_type():
    page = (ROOT / "docs" / "evidence" / "composite.md").read_text()
    words = re.findall(r"[\w.-]+", page)
    tried = {word.rstrip(".") for word in words}
    assert sorted(set(IMAGE_TEXT_TYPES) - tried) == []


def test_the_model_of_every_config_and_page_has_a_tiny_one_of_its_type():
    pages = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    named = {name for page in pages for name in MODEL_NAME.findall(page.read_text())}
    assert "google/gemma-3-27b-it" in named
    types = {name: known_model(name).config["model_type"] for name in named if known_model(name)}
    assert len(types) >= 4
    has_tiny = {*MODEL_TYPES, *BUILT_TYPES}
    assert {name for name, model_type in types.items() if model_type not in has_tiny} == set()
