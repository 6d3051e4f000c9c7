"""Tiny published checkpoints that read images: the tokens, template and processor of their type.

The tokens of images have ids of their own behind the vocabulary of the shipped tokenizer, as on the
hub, and the template writes what the template of the type's repositories writes for an image.
"""

import copy
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from published_files import write_processor, write_weights
from published_models import published_class, published_config
from tiny_models import TINY, Sizes, draw_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPLATE = """\
{%%- for message in messages -%%}
    {%%- if message['role'] == 'assistant' -%%}
        {{- '<|assistant|>' + message['content'] + '<|end|>' -}}
    {%%- else -%%}
        {{- '<|' + message['role'] + '|>' -}}
        {%%- if message['content'] is string -%%}
            {{- message['content'] -}}
        {%%- else -%%}
            {%%- for part in message['content'] -%%}
                {%%- if part['type'] == 'image' -%%}{{- %(image)r -}}
                {%%- else -%%}{{- part['text'] -}}{%%- endif -%%}
            {%%- endfor -%%}
        {%%- endif -%%}
    {%%- endif -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{- '<|assistant|>' -}}{%%- endif -%%}
"""


@dataclass(frozen=True)
class ImageTokens:
    """How a type writes images: in its template, as names of its tokenizer, as ids in its config."""

    written: str
    tokens: tuple[str, ...]
    ids: dict[str, str]  # field of the config: token
    named: dict[str, str] = field(default_factory=dict)  # attribute of the tokenizer: token


_QWEN = ImageTokens(
    "<|vision_start|><|image_pad|><|vision_end|>",
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
)
_GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
IMAGE_TOKENS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": ImageTokens(
        "<start_of_image>",
        tuple(_GEMMA.values()),
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_id": "<image_soft_token>",
        },
        _GEMMA,
    ),
    "internvl": ImageTokens(
        "<IMG_CONTEXT>",
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {"image_token_id": "<IMG_CONTEXT>"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "glm4v": ImageTokens(
        "<|begin_of_image|><|image|><|end_of_image|>",
        (
            *("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
            *("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        {
            "image_token_id": "<|image|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_token_id": "<|video|>",
        },
    ),
    "llava": ImageTokens(
        "<image>", ("<image>",), {"image_token_id": "<image>"}, {"image_token": "<image>"}
    ),
    "mistral3": ImageTokens(
        "[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), {"image_token_id": "[IMG]"}
    ),
    "gemma4": ImageTokens(
        "<|image|>",
        ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "llama4": ImageTokens(
        "<|image|>",
        (
            *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        {"image_token_id": "<|patch|>"},
    ),
    "smolvlm": ImageTokens(
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES),
        {"image_token_id": "<image>"},
    ),
    "lfm2_vl": ImageTokens(
        "<image>",
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)),
        ),
        {"image_token_id": "<image>"},
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
    ),
}


# Types whose processor needs torchvision, which a GPU host has
WITH_TORCHVISION = tuple(
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("torchvision") is None, reason="without torchvision"
        ),
    )
    for name in ("mistral3", "gemma4", "llama4", "smolvlm", "lfm2_vl")
)


def image_tokenizer(shipped: PreTrainedTokenizerBase, model_type: str) -> PreTrainedTokenizerBase:
    """Return a copy of the shipped tokenizer with the image tokens and template of a type."""
    spec = IMAGE_TOKENS[model_type]
    tokenizer = copy.deepcopy(shipped)
    tokenizer.add_special_tokens({"additional_special_tokens": list(spec.tokens)})
    for name, token in spec.named.items():
        tokenizer._set_model_specific_special_tokens({name: token})
    tokenizer.chat_template = TEMPLATE % {"image": spec.written}
    return tokenizer


def image_model(
    tokenizer: PreTrainedTokenizerBase, model_type: str, sizes: Sizes = TINY, seed: int = 0
) -> PreTrainedModel:
    """Return the tiny model of a type in float32, whose config has the ids of the tokenizer."""
    torch.manual_seed(seed)
    sizes = replace(sizes, vocabulary=-(-len(tokenizer) // 64) * 64)
    config = published_config(model_type, sizes)
    for name, token in IMAGE_TOKENS[model_type].ids.items():
        assert hasattr(config, name), name
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    vision = config.vision_config
    if getattr(vision, "deepstack_visual_indexes", None):
        vision.deepstack_visual_indexes = [0]  # what is added after the last layer no token sees
    model = published_class(config)(config)
    draw_weights(model)
    return model.eval()


def write_image_model(
    model_type: str, folder: Path, shipped: PreTrainedTokenizerBase, sizes: Sizes = TINY
) -> Path:
    """Write a tiny checkpoint that reads images, with tokenizer and processor; return the folder."""
    tokenizer = image_tokenizer(shipped, model_type)
    model = image_model(tokenizer, model_type, sizes)
    if model.can_generate():
        model.generation_config.bos_token_id = None
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    write_weights(model, folder)
    tokenizer.save_pretrained(folder)
    write_processor(model.config.model_type, folder)
    template = folder / "chat_template.json"
    if template.is_file():  # in place of a .jinja
        template.write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    settings = folder / "preprocessor_config.json"
    if not settings.is_file():
        return folder
    values = json.loads(settings.read_text())
    if ("size" in values and "shortest_edge" in values["size"]) or "min_pixels" in values:
        bounds = {"min_pixels": 256, "max_pixels": 2048}
        size = {"size": {"shortest_edge": 256, "longest_edge": 2048}}
        values |= bounds if "min_pixels" in values else size
        settings.write_text(json.dumps(values, indent=2))
    return folder


def draw_image(path: Path, size: tuple[int, int], seed: int = 0) -> Path:
    """Write an image of colored noise; the name's suffix says the format."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def image_rows(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a row of messages with an image for each size, and one of text alone."""
    rows = []
    for number, size in enumerate(sizes):
        draw_image(folder / f"{number}.png", size, seed=number)
        asked = [
            {"type": "image", "image": f"{number}.png"},
            {"type": "text", "text": f"What is in picture {number}?"},
        ]
        answer = f"Noise of {size[0]} by {size[1]}."
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    text = [{"role": "user", "content": "And 2 + 3?"}, {"role": "assistant", "content": "5"}]
    return [*rows, {"messages": text}]
