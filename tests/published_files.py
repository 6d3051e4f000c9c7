"""What lies in a published folder: tensors under their published names, processors, templates."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

# Types whose experts are published as one tensor, though transformers would write each by itself
STACKED_EXPERTS = {"qwen3_5_moe"}
# Types whose experts are published with the input features first
TRANSPOSED_EXPERTS = {"qwen3_vl_moe"}
# Types with a head for several tokens that transformers leaves out; its layer is like the last one
SEVERAL_TOKENS = {"qwen3_5", "qwen3_5_moe"}

# Beginnings of names that transformers writes, where its conversions cannot be turned round, and
# those of the repositories. Its own conversions read the latter.
LISTENERS = (
    *("glmasr", "granite_speech", "granite_speech_plus", "qwen2_audio"),
    *("vibevoice_asr", "voxtral", "voxtral_realtime"),
)
RENAMED = {
    **{name: {"language_model.model.model.": "language_model.model."} for name in LISTENERS},
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
    },
    "qianfan_ocr": {"language_model.model.encoder.": "language_model.model."},
}

# Published repositories without text_config: its fields lie next to vision_config, in older words
FLAT_CONFIG = {"qwen2_vl", "qwen2_5_vl"}

# Published repositories that have their template in chat_template.json and the tokenizer's config
REPEATED_TEMPLATES = {"gemma3", "qwen2_vl", "qwen2_5_vl"}
# Published repositories that have it in chat_template.json alone
JSON_TEMPLATES = {
    *("mistral3", "smolvlm", "idefics3", "llava", "llava_next", "llava_onevision", "mllama")
}
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def write_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights under their published names, and both configs."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model_type = model.config.model_type
    if model_type in STACKED_EXPERTS:
        conversions = [each for each in conversions if not isinstance(each, WeightConverter)]
    # As after loading: a model that was built writes no prefix such as `vision_model.`
    model._weight_conversions = conversions
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = _renamed(load_file(path), RENAMED.get(model_type, {}))
    path.unlink()
    if model_type in TRANSPOSED_EXPERTS:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    if model_type in SEVERAL_TOKENS:
        tensors |= _several_tokens(tensors, model.config.get_text_config())
    save_file(tensors, path, metadata={"format": "pt"})
    if model_type in FLAT_CONFIG:
        _flatten_config(folder / "config.json")
    if model_type == "qwen2_5_omni":  # its class does not open a folder without voices
        torch.save({}, folder / "spk_dict.pt")


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, by name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in places.items()}
    whole = folder / "model.safetensors"
    return dict.fromkeys(load_file(whole), whole)


def _flatten_config(path: Path) -> None:
    """Write a config as transformers 4 did before the language model had a part of its own."""
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
    path.write_text(json.dumps({**text, **fields, **old}, indent=2) + "\n", encoding="utf-8")


def _renamed(
    tensors: dict[str, torch.Tensor], beginnings: dict[str, str]
) -> dict[str, torch.Tensor]:
    """Return the tensors under names with other beginnings."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in beginnings.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = tensor
    return renamed


def _several_tokens(tensors: dict[str, torch.Tensor], text: Any) -> dict[str, torch.Tensor]:
    """Return random tensors of a head for several tokens, with one layer like the model's last."""
    last = f"model.language_model.layers.{text.num_hidden_layers - 1}."
    head = {
        name.replace(last, "mtp.layers.0."): torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    for name in [name for name in head if ".experts." in name]:
        head |= _single_experts(name, head.pop(name))
    norm = head["mtp.layers.0.input_layernorm.weight"]
    head["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm)).to(norm.dtype)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = torch.randn_like(norm)
    return head


def _single_experts(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the matrices of stacked experts one by one, as the head of Qwen3.5 has them.

    That of Qwen3.6 has them stacked.
    """
    layer, kind = name.rsplit(".", 1)
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    parts = zip(kinds, stacked.chunk(len(kinds), dim=1), strict=True)
    return {
        f"{layer}.{expert}.{one}.weight": matrix.clone()
        for one, matrices in parts
        for expert, matrix in enumerate(matrices)
    }


def write_processor(model_type: str, folder: Path) -> None:
    """Write the files of the image processor, and the template where its repositories have it."""
    for name, content in PROCESSORS.get(model_type, DEFAULT_PROCESSOR).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    template, tokenizer = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if model_type in REPEATED_TEMPLATES:
        text = {"chat_template": template.read_text()}
        template.unlink()
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **text}, indent=2))
        (folder / "chat_template.json").write_text(json.dumps(text, indent=2))
    if model_type in JSON_TEMPLATES:
        (folder / "chat_template.jinja").unlink()
        text = json.dumps({"chat_template": TEMPLATE}, indent=2)
        (folder / "chat_template.json").write_text(text + "\n", encoding="utf-8")


IMAGENET = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 0.00392156862745098,
}
DEFAULT_PROCESSOR: dict[str, Any] = {
    "preprocessor_config.json": {**STEPS, **IMAGENET, "size": {"height": 32, "width": 32}}
}


def _of_qwen(image: str, processor: str, merge_size: int = 2, **changes: Any) -> dict[str, Any]:
    own = {
        "image_processor_type": image,
        "merge_size": merge_size,
        "patch_size": 8,
        "processor_class": processor,
        "temporal_patch_size": 2,
    }
    return {"preprocessor_config.json": {**own, **changes}}


_VIDEO = {
    **HALVES,
    "merge_size": 2,
    "patch_size": 8,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "temporal_patch_size": 2,
    "video_processor_type": "Qwen3VLVideoProcessor",
}
_QWEN3 = {
    **_of_qwen(
        "Qwen2VLImageProcessorFast",
        "Qwen3VLProcessor",
        **HALVES,
        size={"longest_edge": 16777216, "shortest_edge": 65536},
    ),
    "video_preprocessor_config.json": _VIDEO,
}
_QWEN2 = {"max_pixels": 12845056, "min_pixels": 3136, **IMAGENET}

PROCESSORS: dict[str, dict[str, Any]] = {
    "internvl": {
        "preprocessor_config.json": {
            **STEPS,
            **HALVES,
            "crop_to_patches": False,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "processor_class": "InternVLProcessor",
            "size": {"height": 32, "width": 32},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    },
    "glm4v": _of_qwen(
        "Glm4vImageProcessor",
        "Glm4vProcessor",
        **IMAGENET,
        size={"longest_edge": 9633792, "shortest_edge": 12544},
    ),
    "llava": {
        "preprocessor_config.json": {
            **STEPS,
            **IMAGENET,
            "crop_size": {"height": 32, "width": 32},
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 32},
        },
        "processor_config.json": {
            "num_additional_image_tokens": 1,
            "patch_size": 8,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    },
    "gemma3": {
        "preprocessor_config.json": {
            **STEPS,
            **HALVES,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 4,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "size": {"height": 32, "width": 32},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    },
    "llama4": {
        "preprocessor_config.json": {
            **STEPS,
            **HALVES,
            "image_processor_type": "Llama4ImageProcessorFast",
            "max_patches": 16,
            "processor_class": "Llama4Processor",
            "resample": 2,
            "size": {"height": 32, "width": 32},
        },
        "processor_config.json": {
            "patch_size": 8,
            "pixel_shuffle_ratio": 0.5,
            "processor_class": "Llama4Processor",
        },
    },
    "mistral3": {
        "preprocessor_config.json": {
            **STEPS,
            **IMAGENET,
            "do_convert_rgb": True,
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": 8,
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 32},
        },
        "processor_config.json": {
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": 8,
            "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
    },
    "smolvlm": {
        "preprocessor_config.json": {
            **STEPS,
            **HALVES,
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": {"longest_edge": 32},
            "processor_class": "SmolVLMProcessor",
            "resample": 1,
            "size": {"longest_edge": 64},
        },
        "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    },
    "gemma4": {
        "processor_config.json": {
            "image_processor": {
                **STEPS,
                "do_normalize": False,
                "image_mean": [0.0, 0.0, 0.0],
                "image_std": [1.0, 1.0, 1.0],
                "do_convert_rgb": True,
                "image_processor_type": "Gemma4ImageProcessor",
                "image_seq_length": 70,
                "max_soft_tokens": 70,
                "patch_size": 8,
                "pooling_kernel_size": 3,
                "resample": 3,
            },
            "image_seq_length": 70,
            "processor_class": "Gemma4Processor",
        }
    },
    "lfm2_vl": {
        "preprocessor_config.json": {
            **STEPS,
            **HALVES,
            "do_image_splitting": True,
            "do_pad": True,
            "downsample_factor": 2,
            "encoder_patch_size": 8,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "max_image_tokens": 8,
            "max_num_patches": 32,
            "max_pixels_tolerance": 2.0,
            "max_tiles": 4,
            "min_image_tokens": 4,
            "min_tiles": 2,
            "processor_class": "Lfm2VlProcessor",
            "resample": 2,
            "size": {"height": 32, "width": 32},
            "tile_size": 32,
            "use_thumbnail": True,
        },
        "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
    },
    "qwen2_vl": _of_qwen("Qwen2VLImageProcessor", "Qwen2VLProcessor", **_QWEN2),
    "qwen2_5_vl": _of_qwen("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor", **_QWEN2),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}
