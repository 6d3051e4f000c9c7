"""The smallest random checkpoint of each composite type, as it is published.

Class, files and names of tensors are those of the repositories on the hub. A config is the default
one of transformers, made small; `published_changes` has what the names of its fields do not tell,
and `NOT_BUILT` the types of which there is no tiny model, with the reason.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from published_changes import NOT_BUILT, changes_by_type
from published_files import age_config, hub_tensors, write_processor
from safetensors.torch import load_file
from shrunk_configs import merged, shrunk_config
from tiny_models import TINY, Sizes, draw_weights
from torch import nn
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
BUILT_TYPES = tuple(name for name in IMAGE_TEXT_TYPES if name not in NOT_BUILT)


def auto_class(model_type: str) -> type:
    """Return the auto class that makes the published class of a type."""
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForMultimodalLM


def published_config(model_type: str, sizes: Sizes = TINY, **changes: Any) -> PreTrainedConfig:
    """Return the tiny composite config of a type; `changes` are fields of it and of its parts."""
    return shrunk_config(
        model_type, sizes, merged(changes_by_type(sizes).get(model_type, {}), changes)
    )


def published_model(
    model_type: str, sizes: Sizes = TINY, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Return a tiny model of the published class with random float32 weights, in training mode."""
    torch.manual_seed(seed)
    model = auto_class(model_type).from_config(published_config(model_type, sizes, **changes))
    draw_weights(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0  # as transformers does when it loads Kosmos
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

    A file of weights holds at most `shard_bytes`; None writes one file.
    """
    model = published_model(model_type, sizes, **changes)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # not the complex angles of Llama 4's tower
            tensor.data = tensor.data.to(dtype)
    model.save_pretrained(folder)
    age_config(model_type, folder)
    written = folder / "model.safetensors"
    tensors = hub_tensors(model, load_file(written))
    written.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes or "1GB")
    write_processor(model, folder, tokenizer)
    return folder


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a checkpoint, by name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in places.items()}
    whole = folder / "model.safetensors"
    return dict.fromkeys(load_file(whole), whole)
