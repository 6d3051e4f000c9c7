"""How a checkpoint stores its weights, and in which modes it trains. Pure: no torch, no weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan.config_json import ModelConfigJson
from sft_play.runs.model_folder import Header

Block = tuple[int, int]

FP8_BLOCK = (128, 128)  # of DeepSeek V3 and all that follow it
SECTIONS = ("quantization_config", "compression_config", "quantization")
# formats of compressed-tensors that store each weight in a tensor of the same shape
ONE_TO_ONE = {"float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "dense"}
PACKED = {  # by the end of the names of their tensors
    ".absmax": "4 bits of bitsandbytes",
    ".qweight": "packed integers (GPTQ or AWQ)",
    ".weight_packed": "packed integers (compressed-tensors)",
    ".weight_scale_2": "NVFP4",
}
MXFP4 = "MXFP4"
NAMES = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "modelopt": "ModelOpt",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "bitnet": "BitNet",
    "quark": "Quark",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "fbgemm_fp8": "FBGEMM FP8",
}


@dataclass(frozen=True)
class StoredAs:
    """The format of quantized weights, and how they are trained.

    `dequantized`: each weight is read as the number that it represents, and the model has 16 bits.
    `packed`: it is trained unchanged, under adapters.
    """

    name: str
    way: Literal["dequantized", "packed", "refused"]
    block: Block | None = None  # rows and columns that share a scale, if config.json names them
    dtype: str = "bfloat16"  # the compute dtype that the model declares


def stored_as(config: ModelConfigJson, headers: Iterable[Header] = ()) -> StoredAs | None:
    """Return the format that config.json or the files show; None for plain weights."""
    declared = _declared(config)
    dtypes = dict(headers)
    found = _shown(dtypes) if declared is None else _format(declared)
    if found is None:
        return None
    if found.way == "packed" and dtypes and not any(name.endswith(".absmax") for name in dtypes):
        return None  # a merged folder whose config.json still contains the base's section
    text = config.get("text_config") or config
    dtypes = (part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype"))
    dtype = next(filter(None, dtypes), None)
    return replace(found, dtype=dtype) if dtype in ("float16", "float32") else found


def _format(declared: ModelConfigJson) -> StoredAs:
    """Return the format that a quantization_config declares."""
    method = str(declared.get("quant_method") or "").lower()
    if declared.get("load_in_8bit"):
        return StoredAs("8 bits of bitsandbytes", "dequantized")
    if declared.get("load_in_4bit") or method == "bitsandbytes":
        return StoredAs("4 bits of bitsandbytes", "packed")
    if method in ("fp8", "mxfp8", "fbgemm_fp8"):
        block = declared.get("weight_block_size")
        words = f"FP8 in blocks of {block[0]} x {block[1]}" if block else "FP8"
        return StoredAs(words, "dequantized", tuple(block) if block else None)
    if method == "mxfp4":
        return StoredAs(MXFP4, "dequantized")
    if method == "compressed-tensors":
        return _compressed(declared)
    algorithm = str(declared.get("quant_algo") or "")
    if algorithm.upper().startswith("FP8"):
        return StoredAs("ModelOpt FP8", "dequantized")
    if not method and "bits" in declared:
        return StoredAs(f"MLX {declared['bits']}-bit", "refused")
    name = " ".join(filter(None, (NAMES.get(method, method), algorithm)))
    bits = declared.get("bits") or declared.get("nbits")
    return StoredAs(f"{name} {bits}-bit" if bits else name or "an unknown format", "refused")


def keeps_mxfp4(config: Config, stored: StoredAs | None) -> bool:
    """Return whether experts that are stored in MXFP4 are trained in this format."""
    return config.tuning.mode == "qlora" and stored is not None and stored.name == MXFP4


def refuse_untrainable(config: Config, stored: StoredAs | None) -> None:
    """Raise ConfigError for a format that this mode cannot train, with the setting to change."""
    if stored is None or stored.way == "dequantized":
        return
    where = f"model.name={config.model.name}: its weights are"
    if stored.way == "refused":
        raise ConfigError(
            f"{where} stored as {stored.name}, which cannot be trained; set MODEL_NAME to its "
            "16-bit original"
        )
    tuning = config.tuning
    if tuning.backend == "unsloth":
        return  # it chooses the mode from the files itself
    if tuning.mode != "qlora" or tuning.has_float8_base:
        raise ConfigError(
            f"{where} in 4 bits, and tuning.mode={tuning.mode} needs 16: set TUNING_MODE=qlora, or "
            "MODEL_NAME to its 16-bit original"
        )


def _declared(config: ModelConfigJson) -> ModelConfigJson | None:
    """Return the quantization section of a config.json; None without one."""
    for part in (config, config.get("text_config") or {}):
        for section in SECTIONS:
            declared = part.get(section)
            if declared and isinstance(declared, Mapping):
                return declared.get("quantization_config") or declared
    return None


def _compressed(declared: ModelConfigJson) -> StoredAs:
    """Return the format of compressed-tensors; each of its groups of layers may have a format."""
    groups = [group for group in (declared.get("config_groups") or {}).values() if group]
    found = {group.get("format") or declared.get("format") for group in groups}
    found = {str(name) for name in found or {declared.get("format")} if name}
    is_sparse = (declared.get("sparsity_config") or {}).get("format", "dense") != "dense"
    weights = [group.get("weights") or {} for group in groups]
    is_one_to_one = found <= ONE_TO_ONE and not is_sparse
    words = f"compressed-tensors {', '.join(sorted(found))}{' and sparse' if is_sparse else ''}"
    block = next(filter(None, (weight.get("block_structure") for weight in weights)), None)
    if isinstance(block, str):  # of its first versions: 128x128
        block = block.split("x")
    return StoredAs(
        words,
        "dequantized" if is_one_to_one else "refused",
        (int(block[0]), int(block[1])) if block else None,
    )


def _shown(dtypes: Mapping[str, str]) -> StoredAs | None:
    """Return the format that the names and types of tensors show."""
    for ending, words in PACKED.items():
        if any(name.endswith(ending) for name in dtypes):
            return StoredAs(words, "packed" if ending == ".absmax" else "refused")
    weights = {dtype for name, dtype in dtypes.items() if name.endswith(".weight")}
    if any(name.endswith("_blocks") and dtype == "U8" for name, dtype in dtypes.items()):
        return StoredAs(MXFP4, "dequantized")
    if any(name.endswith(".SCB") for name in dtypes):
        return StoredAs("8 bits of bitsandbytes", "dequantized")
    if weights & {"U8", "I32", "U32"}:
        return StoredAs("packed integers", "refused")
    if any(dtype.startswith("F8_E") for dtype in dtypes.values()):
        is_by_block = any(name.endswith("weight_scale_inv") for name in dtypes)
        return StoredAs("FP8", "dequantized", FP8_BLOCK if is_by_block else None)
    return StoredAs("integers of 8 bits", "dequantized") if "I8" in weights else None
