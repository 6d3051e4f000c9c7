"""What settings need of machine and model, and which variables slow a run or do nothing to it.

Loads no torch.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from packaging.version import Version

from sft_play.config.backends import backend_of
from sft_play.config.invocation import FORCE_SINGLE, Words
from sft_play.config.loader import LoadedConfig
from sft_play.config.schedules import MATRIX_OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.cards import Card
from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.ranks import Ranks

FLASH2 = "flash-attn"  # the package of FlashAttention 2
FLASH2_CAPABILITY = (8, 0)  # or newer
INSTALL_FLASH2 = ".venv/bin/pip install flash-attn --no-build-isolation"


def require(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Raise EnvironmentFault where a setting asks for what this machine does not have."""
    _require_backend(loaded.config, hardware)
    require_float8(loaded, hardware)
    _require_flash_attention(loaded, hardware)


def _require_backend(config: Config, hardware: Hardware) -> None:
    backend = backend_of(config)
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


def _require_flash_attention(loaded: LoadedConfig, hardware: Hardware) -> None:
    if loaded.config.model.attn_implementation != "flash_attention_2":
        return
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
    if _gpus_here(hardware) and _version(FLASH2) is None:
        raise EnvironmentFault(
            f"{asked}: {FLASH2} is not installed; run {INSTALL_FLASH2}, or {instead}"
        )


def _first_below(capability: tuple[int, int], hardware: Hardware) -> Gpu | None:
    return next((gpu for gpu in hardware.gpus if gpu.capability < capability), None)


def _capability(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))


def _gpus_here(hardware: Hardware) -> list[Gpu]:
    """Return the GPUs of this machine; those that GPUS names have no UUID."""
    return [gpu for gpu in hardware.gpus if gpu.uuid]


def _version(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


FLOAT8_CAPABILITY = (8, 9)  # Ada, the first with float8 tensor cores


def may_be_float8(config: Config, card: Card | None) -> bool:
    """Return whether a run that has no float8 base could have one on GPUs of a known card."""
    if card is None or card.capability < FLOAT8_CAPABILITY or config.tuning.has_float8_base:
        return False
    lora = config.tuning.lora
    is_plain = not lora.use_dora and lora.init_lora_weights != "orthogonal"
    return config.tuning.mode == "lora" and config.tuning.backend == "bnb" and is_plain


def require_float8(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Raise EnvironmentFault where a base in float8 is asked for and a GPU has no float8.

    A CPU computes what they would.
    """
    gpu = _first_below(FLOAT8_CAPABILITY, hardware)
    if loaded.config.tuning.has_float8_base and gpu is not None:
        raise EnvironmentFault(
            f"{loaded.described('tuning.base_dtype')}: cuda:{gpu.index} {gpu.name} has capability "
            f"{_capability(gpu)}, and float8 products need 8.9 (Ada, Hopper and later); set "
            "TUNING_BASE_DTYPE=auto, or TUNING_MODE=qlora for a 4-bit base"
        )


def refuse_deepspeed(loaded: LoadedConfig, ranks: Ranks) -> None:
    """Raise ConfigError for what DeepSpeed cannot train."""
    if loaded.config.train.optim in MATRIX_OPTIMIZERS and ranks.strategy == "deepspeed":
        raise ConfigError(
            f"{loaded.described('train.optim')}: it steps whole matrices, and DeepSpeed cuts flat "
            "lists of weights; set TRAIN_OPTIM=adamw_torch_fused, or use make train-distributed "
            "TRAIN_STRATEGY=ddp"
        )
    if loaded.config.tuning.trains_towers and ranks.strategy == "deepspeed":
        raise ConfigError(
            f"{loaded.described('tuning.towers')}: ZeRO sums gradients in the order in which they "
            "come, and a rank without an image in a batch has another; set TRAIN_STRATEGY=ddp, or "
            "TUNING_TOWERS=frozen"
        )
    if loaded.config.tuning.has_float8_base and ranks.strategy == "deepspeed":
        raise ConfigError(
            f"{loaded.described('tuning.base_dtype')}: DeepSpeed converts all weights to one type; "
            "train with make train-distributed (TRAIN_STRATEGY=ddp, or fsdp to divide the base), "
            "or set TUNING_BASE_DTYPE=auto"
        )


HOPPER = 9  # major compute capability
# flash-linear-attention refuses these on Hopper: issue 640 of fla-org/flash-linear-attention
FIRST_WRONG_TRITON = Version("3.4.0")
FIRST_RIGHT_TRITON = Version("3.7.1")
MISSING = (
    "flash-linear-attention is not installed (python -m tools.install add requirements-gpu.txt)"
)


def why_no_kernels(capability: tuple[int, int], triton: str | None) -> str | None:
    """Return why the installed kernels do not run on a GPU with a version of Triton, None if so."""
    if capability[0] != HOPPER or triton is None:
        return None
    if FIRST_WRONG_TRITON <= Version(triton) < FIRST_RIGHT_TRITON:
        return (
            f"Triton {triton} computes gradients of flash-linear-attention wrongly on this GPU "
            f"(Triton {FIRST_RIGHT_TRITON}, which torch 2.13 brings, does not)"
        )
    return None


def recurrent_warnings(model: ModelShape, hardware: Hardware) -> list[str]:
    """Return what is to be said of recurrent layers on the GPUs of this machine."""
    layers = model.counts.recurrent_layers
    here = _gpus_here(hardware)
    if not layers or not here:
        return []
    reason = MISSING
    if importlib.util.find_spec("fla") is not None:
        reason = why_no_kernels(here[0].capability, _version("triton"))
    if reason is None:
        return []
    return [
        f"{layers} of {model.layers} layers are recurrent, and {reason}: transformers computes "
        "them in plain torch, several times slower and in more memory than is planned"
    ]


class PackingChoice(NamedTuple):
    """Whether rows are packed, and where `auto` does not, why."""

    is_packed: bool
    because: str | None = None


def resolve_packing(config: Config, model_type: str) -> PackingChoice:
    """Return whether train.packing is on.

    `auto` packs on a CPU too. There, two cores train the rows that ship (56 tokens on average) 1.4
    times as fast in micro-batches of 16 and 1.6 times in those of 1, in CPU seconds: sequences are
    no longer than needed, so attention costs no more. `true` also packs an architecture that `auto`
    does not. Every packed run checks before the first step whether its documents stay apart.
    Raises: ConfigError for `true` where packing cannot work.
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
    """Return whether a packed batch has to name the boundaries of its documents.

    Flash attention and our kernels work by them; sdpa and eager find them in position ids, in any
    batch.
    """
    return has_fast_attention or attn_implementation not in ("auto", "sdpa", "eager")


# Switches that are on, and what they cost on a GPU
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel, which makes training several times "
    "slower; it is for finding the kernel that fails",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated anew, which makes training "
    "several times slower",
    "NCCL_P2P_DISABLE": "GPUs reach each other through the host's memory, which makes collectives "
    "several times slower",
    "NCCL_IB_DISABLE": "machines talk over TCP and not over InfiniBand",
}
OF_NCCL = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", *(name for name in SLOW if "NCCL" in name))


def switch_warnings(config: Config, ranks: Ranks, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that slows this run, or that it does not read."""
    found = list(slow_switches(environ)) if ranks.device == "cuda" else []
    for name in sorted(environ):
        reason = _unread_because(name, config, ranks) if environ[name].strip() else None
        if reason:
            found.append(f"{name}={environ[name]} has no effect: {reason}")
    return found


def slow_switches(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that slows training on GPUs."""
    words = Words(environ)
    for name, effect in SLOW.items():
        if words.is_on(name):
            yield f"{name}={environ[name]}: {effect}"
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by another one"


def _unread_because(name: str, config: Config, ranks: Ranks) -> str | None:
    """Return why a run does not read a variable, None if it may."""
    backend = config.tuning.backend
    if name.startswith("UNSLOTH_") and name != FORCE_SINGLE and backend != "unsloth":
        return f"tuning.backend={backend}, and TUNING_BACKEND=unsloth reads it"
    if name == "DEEPSPEED_CONFIG" and ranks.strategy != "deepspeed":
        return "this run does without DeepSpeed; make train-deepspeed reads it"
    if name == "NCCL_TIMEOUT" and config.train.ddp_timeout is not None:
        return "train.ddp_timeout is set; no library reads this name"
    if name in OF_NCCL and ranks.device == "cpu" and ranks.strategy != "single":
        return "processes on a CPU talk over gloo, which reads GLOO_SOCKET_IFNAME"
    return None
