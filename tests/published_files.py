"""The files of a published checkpoint: names of tensors, processors, chat templates.

What transformers writes differs from the repositories in a few names: `hub_tensors` knows them.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Siglip2VisionModel,
    SiglipVisionModel,
)
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

# Towers that transformers 4 kept one module further down, as most repositories still have them
NESTED_TOWERS = (CLIPVisionModel, SiglipVisionModel, Siglip2VisionModel)
MTP_TYPES = ("qwen3_5", "qwen3_5_moe")
# The chat template is in chat_template.json, and also in the tokenizer's config or nowhere else
TEMPLATE_IN_BOTH = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llama4", "mllama")
TEMPLATE_IN_JSON = (
    *("mistral3", "smolvlm", "idefics3", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "vipllava"),
)
# Their config.json has no text_config: its fields lie beside vision_config, in older words
FLAT_CONFIG = ("qwen2_vl", "qwen2_5_vl")
# One file describes the processor of the others
PREPROCESSOR_ALONE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *MTP_TYPES)


def hub_tensors(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers writes under the names of the type's repositories."""
    for name, module in model.named_modules():
        if isinstance(module, NESTED_TOWERS):
            tower = re.compile(rf"(^|\.){name.rsplit('.', 1)[-1]}\.")
            tensors = {tower.sub(r"\g<0>vision_model.", key, 1): tensors[key] for key in tensors}
    model_type = model.config.model_type
    head = _mtp_tensors(tensors) if model_type in MTP_TYPES else {}
    if model_type == "qwen3_5_moe":
        tensors = _fused_experts(tensors)
    return {**tensors, **head}


def age_config(model_type: str, folder: Path) -> None:
    """Write config.json as transformers 4 did, where the type's repositories still have that."""
    if model_type not in FLAT_CONFIG:
        return
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types"):
        text.pop(name)
    old = {
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "rope_theta": rope["rope_theta"],
        "torch_dtype": fields.pop("dtype"),
    }
    _write_json(path, {**text, **fields, **old})


def write_processor(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the tokenizer, its chat template and what describes the processor."""
    model_type = model.config.model_type
    tokenizer.save_pretrained(folder)
    _place_template(model_type, folder)
    processor = {"processor_class": PROCESSOR_MAPPING_NAMES.get(model_type)}
    if processor["processor_class"] and model_type not in PREPROCESSOR_ALONE:
        _write_json(folder / "processor_config.json", {"image_seq_length": 4, **processor})
    fields = {**_image_fields(model_type), **_sound_fields(model_type)}
    if fields:
        _write_json(folder / "preprocessor_config.json", {**fields, **processor})
    if model_type in ("qwen3_vl", "qwen3_vl_moe", *MTP_TYPES):
        video = {**fields, **processor, "video_processor_type": "Qwen3VLVideoProcessor"}
        _write_json(folder / "video_preprocessor_config.json", video)
    if model_type == "qwen2_5_omni":
        torch.save({"Chelsie": {"bos_token": 2300}}, folder / "spk_dict.pt")  # of its voices


def _place_template(model_type: str, folder: Path) -> None:
    template = folder / "chat_template.jinja"
    if model_type in TEMPLATE_IN_BOTH:
        path = folder / "tokenizer_config.json"
        fields = json.loads(path.read_text())
        _write_json(path, {**fields, "chat_template": template.read_text()})
    if model_type in (*TEMPLATE_IN_BOTH, *TEMPLATE_IN_JSON):
        _write_json(folder / "chat_template.json", {"chat_template": template.read_text()})
        template.unlink()


def _image_fields(model_type: str) -> dict[str, Any]:
    """Return what preprocessor_config.json says of images, empty where the type reads none."""
    shared = "qwen2_vl" if model_type in PREPROCESSOR_ALONE else model_type
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(shared)
    if not classes:
        return {}
    name = classes if isinstance(classes, str) else next(iter(classes.values()))
    fields = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": name.removesuffix("Pil"),
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    if name.startswith("Qwen2VL"):
        sizes = {"longest_edge": 16777216, "shortest_edge": 65536}
        return {
            **fields,
            "size": sizes,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
    return {**fields, "size": {"height": 32, "width": 32}}


def _sound_fields(model_type: str) -> dict[str, Any]:
    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type)
    if not name:
        return {}
    return {"feature_extractor_type": name, "feature_size": 80, "sampling_rate": 16000}


def _mtp_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a head that predicts the token after the next: a layer of full attention and norms.

    No class of transformers loads it.
    """
    query = next(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    layer = query.removesuffix("self_attn.q_proj.weight")
    head = {
        "mtp.layers.0." + name.removeprefix(layer): torch.rand_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    norm = head["mtp.layers.0.input_layernorm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = torch.rand_like(norm)
    head["mtp.fc.weight"] = torch.rand(len(norm), 2 * len(norm)).to(norm.dtype)
    return head


def _fused_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the matrices of a layer's experts, which transformers writes one by one."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    layers = {name.split("experts.")[0] for name in tensors if ".mlp.experts." in name}
    for layer in sorted(layers):
        count = sum(name.startswith(f"{layer}experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{layer}experts.{i}.{part}.weight"] for i in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{layer}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{layer}experts.down_proj"] = down
    return fused


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
