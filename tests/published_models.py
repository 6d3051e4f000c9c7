"""The smallest random checkpoint of each composite type, as it is published.

Class, files and names of tensors are those of the repositories on the hub. A config is the default
one of transformers, made small; `_changes` has what cannot be told from the names of its fields,
`NOT_BUILT` the types of which there is no tiny model, with the reason.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shrunk_configs import shrunk_config
from tiny_models import TINY, Sizes, draw_weights
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

IMAGE_TEXT_TYPES = tuple(
    sorted({**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})
)
NOT_BUILT: dict[str, str] = {}
BUILT_TYPES = tuple(name for name in IMAGE_TEXT_TYPES if name not in NOT_BUILT)


def auto_class(model_type: str) -> type:
    """Return the auto class that makes the published class of a type."""
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForMultimodalLM


def published_config(model_type: str, sizes: Sizes = TINY, **changes: Any) -> PreTrainedConfig:
    """Return the tiny composite config of a type; `changes` are fields of it and of its parts."""
    return shrunk_config(model_type, sizes, {**_changes(sizes).get(model_type, {}), **changes})


def published_model(
    model_type: str, sizes: Sizes = TINY, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Return a tiny model of the published class with random float32 weights, in training mode."""
    torch.manual_seed(seed)
    model = auto_class(model_type).from_config(published_config(model_type, sizes, **changes))
    draw_weights(model)
    model.generation_config.bos_token_id = None
    return model.train()


def write_published(
    model_type: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes = TINY,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny checkpoint with the files and tensor names of the type's repositories.

    `shard_bytes` is the most that a file of weights holds; None writes one file.
    """
    model = published_model(model_type, sizes, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_bytes or "1GB")
    tokenizer.save_pretrained(folder)
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        _add_tensors(folder, _mtp_tensors(folder))
    return folder


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a checkpoint, by name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in places.items()}
    whole = folder / "model.safetensors"
    return dict.fromkeys(load_file(whole), whole)


def _mtp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return a head that predicts the token after the next: a layer of full attention and norms.

    No class of transformers loads it.
    """
    files = weight_files(folder)
    layer = next(name for name in files if name.endswith("self_attn.q_proj.weight"))
    layer = layer.removesuffix("self_attn.q_proj.weight")
    tensors = {
        "mtp.layers.0." + name.removeprefix(layer): torch.rand_like(load_file(file)[name])
        for name, file in files.items()
        if name.startswith(layer)
    }
    norm = tensors["mtp.layers.0.input_layernorm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.rand_like(norm)
    tensors["mtp.fc.weight"] = torch.rand(len(norm), 2 * len(norm)).to(norm.dtype)
    return tensors


def _add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to the last file of a checkpoint, and to its index."""
    last = max(weight_files(folder).values())
    save_file({**load_file(last), **tensors}, last, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"].update(dict.fromkeys(tensors, last.name))
        content["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _changes(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return fields by type that the names of the fields do not tell."""
    return {}
