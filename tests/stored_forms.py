"""Twins of a checkpoint whose weights are stored in other forms, as public tools write them."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import WHOLE_BLOCKS, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inputs import experts_in_mxfp4

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny_llama"
E4M3_MAX = 448.0
Tensors = dict[str, Tensor]


def copy_of(folder: Path, source: Path = TINY_LLAMA) -> Path:
    """Copy a checkpoint's folder."""
    shutil.copytree(source, folder)
    return folder


def change_config(folder: Path, **values: object) -> None:
    """Set keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Rewrite a folder's weights."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def with_linears(folder: Path, quantize: Callable[[str, Tensor], Tensors], **declared: object):
    """Store the linears of a copy of the shipped model as `quantize` says; return its folder."""
    copy_of(folder)
    change_config(folder, quantization_config=declared)

    def change(tensors: Tensors) -> Tensors:
        stored: Tensors = {}
        for name, tensor in tensors.items():
            is_linear = name.endswith("_proj.weight")
            stored |= quantize(name, tensor.float()) if is_linear else {name: tensor}
        return stored

    change_tensors(folder, change)
    return folder


def e4m3(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_block(folder: Path) -> Path:
    """DeepSeek V3, Qwen3-FP8: blocks of 128 x 128, of which the last are parts here."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = torch.empty(rows, columns)
        spread = torch.empty_like(weight)
        for row in range(rows):
            for column in range(columns):
                part = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
                scale[row, column] = weight[part].abs().max() / E4M3_MAX
                spread[part] = scale[row, column]
        return {name: e4m3(weight, spread), f"{name}_scale_inv": scale}

    return with_linears(
        folder, quantize, quant_method="fp8", activation_scheme="dynamic",
        weight_block_size=[128, 128],
    )  # fmt: skip


def fp8_tensor(folder: Path) -> Path:
    """Ministral 3: one scale of a weight, one of its activations."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        scale = weight.abs().max() / E4M3_MAX
        return {
            name: e4m3(weight, scale),
            f"{name}_scale_inv": scale.bfloat16(),
            name.replace(".weight", ".activation_scale"): torch.tensor(0.02).bfloat16(),
        }

    return with_linears(
        folder, quantize, quant_method="fp8", activation_scheme="static", weight_block_size=None,
        modules_to_not_convert=["lm_head"],
    )  # fmt: skip


def by_row(dtype: torch.dtype, largest: float) -> Callable[[str, Tensor], Tensors]:
    """Return the function that stores a weight with one scale of each row."""

    def quantize(name: str, weight: Tensor) -> Tensors:
        scale = weight.abs().amax(1, keepdim=True) / largest
        numbers = weight / scale
        numbers = numbers.round() if dtype == torch.int8 else numbers
        return {name: numbers.to(dtype), f"{name}_scale": scale}

    return quantize


def compressed_fp8(folder: Path) -> Path:
    return compressed(folder, "float", by_row(torch.float8_e4m3fn, E4M3_MAX))


def compressed_int8(folder: Path) -> Path:
    return compressed(folder, "int", by_row(torch.int8, 127))


def compressed(folder: Path, kind: str, quantize: Callable[[str, Tensor], Tensors]) -> Path:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    return with_linears(
        folder, quantize, quant_method="compressed-tensors",
        format=f"{kind}-quantized", config_groups={"group_0": {"weights": weights}},
    )  # fmt: skip


def fbgemm(folder: Path) -> Path:
    return with_linears(folder, by_row(torch.float8_e4m3fn, E4M3_MAX), quant_method="fbgemm_fp8")


def bnb_8bit(folder: Path) -> Path:
    def quantize(name: str, weight: Tensor) -> Tensors:
        largest = weight.abs().amax(1)
        stem = name.removesuffix(".weight")
        return {
            name: (weight / largest[:, None] * 127).round().to(torch.int8),
            f"{stem}.SCB": largest,
            f"{stem}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    return with_linears(folder, quantize, quant_method="bitsandbytes", load_in_8bit=True)


def bnb_4bit(folder: Path, double_quant: bool = True) -> Path:
    """As transformers writes it, and with it Unsloth: for a GPU's bfloat16."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    copy_of(folder)
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, quantization_config=quantization)
    model.save_pretrained(folder)
    return folder


def mxfp4(folder: Path) -> Path:
    """A gpt-oss whose experts are in MXFP4: 32 4-bit values share one exponent."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = tiny_model("gpt_oss", WHOLE_BLOCKS, vocab_size=len(tokenizer))
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        change_tensors(folder, experts_in_mxfp4)
    change_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return folder
