"""Check that settings fit machine, model and each other; errors say what to type instead.

Loads no torch.
"""

import difflib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, NoReturn

from sft_kernels.needs import FLOAT8_CAPABILITY
from sft_play.config import deepspeed
from sft_play.config.backends import backend_of
from sft_play.config.loader import LoadedConfig
from sft_play.config.schedules import MATRIX_OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.cards import Card
from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.inputs import PlanInputs, why_not_offloaded, why_not_shared
from sft_play.plan.step import StepSpec
from sft_play.plan.strategy import refuse_remainder, unsharded

FLASH2 = "flash-attn"  # the package of FlashAttention 2
FLASH2_CAPABILITY = (8, 0)  # or newer
INSTALL_FLASH2 = ".venv/bin/pip install flash-attn --no-build-isolation"


def require_needs(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Raise EnvironmentFault if a setting needs something that this machine does not have."""
    backend = backend_of(loaded.config)
    if backend.needs_gpu and hardware.kind != "cuda":
        raise EnvironmentFault(
            f"tuning.backend={backend.name}: {backend.title} needs an NVIDIA GPU and none is "
            "usable here; set TUNING_BACKEND=bnb, or see make gpu-info"
        )
    if backend.package and importlib.util.find_spec(backend.package) is None:
        raise EnvironmentFault(
            f"tuning.backend={backend.name}: {backend.package} is not installed; "
            f"run {backend.install_command}, or set TUNING_BACKEND=bnb"
        )
    gpu = _first_below(FLOAT8_CAPABILITY, hardware)
    if loaded.config.tuning.has_float8_base and gpu is not None:  # a CPU emulates it
        raise EnvironmentFault(
            f"{loaded.described('tuning.base_dtype')}: cuda:{gpu.index} {gpu.name} has capability "
            f"{_capability(gpu)}, and float8 needs 8.9 (Ada, Hopper and later); set "
            "TUNING_BASE_DTYPE=auto, or TUNING_MODE=qlora for a 4-bit base"
        )
    if loaded.config.model.attn_implementation == "flash_attention_2":
        _require_flash_attention(loaded, hardware)


def _require_flash_attention(loaded: LoadedConfig, hardware: Hardware) -> None:
    asked = loaded.described("model.attn_implementation")
    needed = "FlashAttention 2 needs a GPU of capability 8.0 or newer"
    instead = "set MODEL_ATTN_IMPLEMENTATION=auto, whose kernels need no package"
    if hardware.kind != "cuda":
        raise EnvironmentFault(f"{asked}: {needed}, and no GPU is usable here; {instead}")
    gpu = _first_below(FLASH2_CAPABILITY, hardware)
    if gpu is not None:
        raise EnvironmentFault(
            f"{asked}: cuda:{gpu.index} {gpu.name} has capability {_capability(gpu)}, and "
            f"{needed}; {instead}"
        )
    if gpus_here(hardware) and version_of(FLASH2) is None:
        raise EnvironmentFault(
            f"{asked}: {FLASH2} is not installed; run {INSTALL_FLASH2}, or {instead}"
        )


def _first_below(capability: tuple[int, int], hardware: Hardware) -> Gpu | None:
    return next((gpu for gpu in hardware.gpus if gpu.capability < capability), None)


def _capability(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))


def gpus_here(hardware: Hardware) -> list[Gpu]:
    """Return the GPUs of this machine; GPUs from the variable GPUS have no UUID."""
    return [gpu for gpu in hardware.gpus if gpu.uuid]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def may_be_float8(config: Config, card: Card | None) -> bool:
    """Return whether a run without a float8 base could use one on GPUs of a known card."""
    if card is None or card.capability < FLOAT8_CAPABILITY or config.tuning.has_float8_base:
        return False
    lora = config.tuning.lora
    is_plain = not lora.use_dora and lora.init_lora_weights != "orthogonal"
    return config.tuning.mode == "lora" and config.tuning.backend == "bnb" and is_plain


# accelerate replaces any other optimizer by DeepSpeed's CPU Adam, too, without a message
OFFLOADED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def refuse_combinations(inputs: PlanInputs, described: Callable[[str], str]) -> None:
    """Raise ConfigError for settings that contradict each other on these ranks."""
    config, machine = inputs.config, inputs.machine
    why_not = why_not_offloaded(config, machine.ranks)
    if config.train.weight_offloading is True and why_not is not None:
        raise ConfigError(
            f"{described('train.weight_offloading')}: {why_not}, or TRAIN_WEIGHT_OFFLOADING=false"
        )
    if machine.offload and config.train.optim not in OFFLOADED_OPTIMIZERS:
        raise ConfigError(
            f"{described('train.optim')}: with offload_optimizer DeepSpeed computes AdamW "
            "on the CPU; set TRAIN_OPTIM=adamw_torch, or delete offload_optimizer from the "
            "DeepSpeed JSON"
        )
    is_qlora = config.tuning.mode == "qlora"
    if machine.zero_stage == 3 and is_qlora and machine.ranks.device == "cpu":
        raise ConfigError(
            "ZeRO-3 with tuning.mode=qlora aborts on a CPU; set TUNING_MODE=lora, or train with "
            "make train-distributed TRAIN_STRATEGY=fsdp, or zero2"
        )
    is_deepspeed = machine.ranks.strategy == "deepspeed"
    if is_deepspeed and config.train.optim in MATRIX_OPTIMIZERS:
        raise ConfigError(
            f"{described('train.optim')}: it steps matrices, and DeepSpeed cuts flat "
            "lists of weights; set TRAIN_OPTIM=adamw_torch_fused, or use make train-distributed "
            "TRAIN_STRATEGY=ddp"
        )
    if is_deepspeed and config.tuning.trains_encoders:
        raise ConfigError(
            f"{described('tuning.encoders')}: ZeRO reduces gradients in the order in which "
            "they are computed, and a rank without an image in a batch has another; "
            "set TRAIN_STRATEGY=ddp, or TUNING_ENCODERS=frozen"
        )
    if is_deepspeed and config.tuning.has_float8_base:
        raise ConfigError(
            f"{described('tuning.base_dtype')}: DeepSpeed converts all weights to one type; "
            "train with make train-distributed (TRAIN_STRATEGY=ddp, or fsdp to divide the base), "
            "or set TUNING_BASE_DTYPE=auto"
        )
    if machine.ranks.strategy == "ep" and inputs.model.guess is None:
        refuse_remainder(inputs.model.counts.stacked_experts, machine.ranks.world_size)
    whole = unsharded(config)
    if machine.zero_stage == 3 and config.tuning.mode != "full" and whole:
        raise ConfigError(
            f"{', '.join(map(described, whole))}: PEFT "
            "reads complete weights for it, which ZeRO-3 shards over the GPUs; train with "
            "make train-distributed TRAIN_STRATEGY=zero2, or delete the setting"
        )
    backend = backend_of(config)
    if machine.zero_stage and not backend.runs_under_deepspeed:
        raise ConfigError(
            f"tuning.backend={backend.name} does not run under DeepSpeed; "
            "use make train-distributed, or set TUNING_BACKEND=bnb"
        )


def refuse_bfloat16(loaded: LoadedConfig, path: Path, raw: deepspeed.DeepSpeedJson) -> NoReturn:
    """Refuse bfloat16 under DeepSpeed without a GPU. Raises: ConfigError."""
    asked = loaded.described("train.bf16")
    if deepspeed.json_precision(raw) == "bf16":
        asked = f"{path}: bf16.enabled=true"
    raise ConfigError(
        f"{asked}: transformers supports bfloat16 with DeepSpeed only on GPUs; "
        'write "auto" there, or use make train-distributed without DeepSpeed'
    )


def refuse_step(loaded: LoadedConfig, inputs: PlanInputs, step: StepSpec) -> None:
    """Raise ConfigError if ranks cannot share rows as requested, or a layer's name is misspelt.

    The name of a layer to adapt is misspelt if it is nearly that of a layer of the model. Other
    unknown names are left to the model itself, which has more layers than the plan knows.
    """
    targets = step.adapters.targets
    known = {kind.name.rpartition(".")[2] for kind in step.model.matrices}
    for name in () if step.is_full or isinstance(targets, str) else targets:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near and name not in known:
            raise ConfigError(
                f"tuning.lora.target_modules: the model has no linear layer {name}; did you mean "
                f"{near[0]}? It has {', '.join(sorted(known))}"
            )
    asked = loaded.config.train.context_parallel
    reason = None if asked in ("auto", 1) else why_not_shared(inputs, step, asked)
    if reason is not None:
        raise ConfigError(
            f"{loaded.described('train.context_parallel')}: {reason}; set TRAIN_CONTEXT_PARALLEL=1"
        )


class PackingChoice(NamedTuple):
    """Whether rows are packed, and if `auto` does not pack them, why."""

    is_packed: bool
    because: str | None = None


def resolve_packing(config: Config, model_type: str) -> PackingChoice:
    """Return whether train.packing is on.

    `auto` packs on a CPU too. There, two cores train the rows that ship (56 tokens on average) 1.4
    times as fast in micro-batches of 16 and 1.6 times in those of 1, in CPU seconds: sequences are
    no longer than needed, so attention costs no more. `true` also packs architectures that `auto`
    does not. Every packed run checks before the first step whether its documents are isolated.
    Raises: ConfigError for `true` if packing cannot work.
    """
    setting = config.train.packing
    backend = backend_of(config)
    support = backend.packing
    if setting is False:
        return PackingChoice(False)
    if config.tuning.mode not in support.modes:
        if setting is True:
            raise ConfigError(
                f"train.packing=true: {support.mode_reason}; set TRAIN_PACKING=auto, "
                "or TUNING_BACKEND=bnb"
            )
        return PackingChoice(False, support.mode_reason)
    if setting is True:
        return PackingChoice(True)
    if model_type in support.except_types:
        return PackingChoice(False, f"{model_type} does not keep packed documents apart")
    if support.model_types is not None and model_type not in support.model_types:
        return PackingChoice(
            False,
            f"nobody has looked whether {model_type} keeps packed documents apart under "
            f"{backend.title}; TRAIN_PACKING=true looks before the first step",
        )
    if support.max_seq_len and config.model.max_seq_len > support.max_seq_len:
        return PackingChoice(False, support.length_reason)
    return PackingChoice(True)


def needs_boundaries(attn_implementation: str, has_fast_attention: bool = False) -> bool:
    """Return whether a packed batch must contain the boundaries of its documents.

    Flash attention and our kernels need them; sdpa and eager derive them from position ids, in any
    batch.
    """
    return has_fast_attention or attn_implementation not in ("auto", "sdpa", "eager")
