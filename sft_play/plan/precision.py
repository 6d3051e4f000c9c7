"""The number type of matrix products: decided once, for all ranks. Pure: no torch, no I/O."""

from pathlib import Path
from typing import Literal, NamedTuple

from sft_play.config import deepspeed
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan.devices import Hardware

Precision = Literal["bf16", "fp16", "float32"]
# torch's names
DTYPE_NAMES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}


class PrecisionChoice(NamedTuple):
    """A precision, and where it is not what was asked for, why."""

    precision: Precision
    warnings: list[str]


def precision(config: Config) -> Precision:
    """Return the precision of a resolved config, as accelerate spells it, or float32."""
    if config.train.bf16 is True:
        return "bf16"
    return "fp16" if config.train.fp16 is True else "float32"


def choose_precision(
    loaded: LoadedConfig,
    hardware: Hardware,
    raw: deepspeed.DeepSpeedJson,
    json_path: Path | None = None,
) -> PrecisionChoice:
    """Return bfloat16 where every GPU has it, else float16, and float32 on a CPU unless asked.

    What `raw`, the DeepSpeed JSON at `json_path`, says decides where the config leaves both to
    auto.
    Raises: ConfigError for float16 without a GPU.
    """
    train = loaded.config.train
    of_json = deepspeed.precision(raw)
    if of_json and train.bf16 == train.fp16 == "auto":
        wants_bf16 = of_json == "bf16"
        wants_fp16 = of_json == "fp16"
    else:
        wants_bf16 = train.bf16 is True
        if train.bf16 == "auto":
            wants_bf16 = hardware.supports_bf16 and train.fp16 is not True
        wants_fp16 = train.fp16 is True
        if train.fp16 == "auto":
            has_old_gpu = hardware.kind == "cuda" and not hardware.supports_bf16
            wants_fp16 = has_old_gpu and not wants_bf16
    warnings = []
    if wants_bf16 and hardware.kind == "cuda" and not hardware.supports_bf16:
        wants_bf16 = False
        wants_fp16 = train.fp16 is not False
        name, setting = "float32", "TRAIN_BF16=false"
        if wants_fp16:
            name, setting = "float16", "TRAIN_FP16=true TRAIN_BF16=false"
        warnings.append(
            "train.bf16=true, but a GPU here has no bfloat16 (capability under 8.0): "
            f"computing in {name}; {setting} says so"
        )
    if wants_bf16 and wants_fp16:
        wants_fp16 = False
        warnings.append(
            "train.bf16 and train.fp16 are both true: computing in bfloat16; "
            "TRAIN_FP16=false says so"
        )
    if wants_fp16 and hardware.kind != "cuda":
        asked, advice = loaded.described("train.fp16"), "set TRAIN_FP16=auto"
        if train.fp16 == "auto":
            asked, advice = f"{json_path}: fp16.enabled=true", 'write "auto" there'
        raise ConfigError(f"{asked}: float16 needs a GPU; {advice}")
    if wants_bf16:
        return PrecisionChoice("bf16", warnings)
    return PrecisionChoice("fp16" if wants_fp16 else "float32", warnings)
