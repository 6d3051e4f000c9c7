"""What settings need of the machine: GPUs of some kind, an installed package. Loads no torch."""

import importlib.metadata
import importlib.util

from sft_play.config.backends import backend_of
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.plan.devices import Hardware
from sft_play.plan.float8 import require_float8

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
    for gpu in hardware.gpus:
        if gpu.capability < FLASH2_CAPABILITY:
            found = ".".join(map(str, gpu.capability))
            raise EnvironmentFault(
                f"{asked}: cuda:{gpu.index} {gpu.name} has capability {found}, and {needed}; "
                f"{instead}"
            )
    if _are_here(hardware) and not _is_installed(FLASH2):
        raise EnvironmentFault(
            f"{asked}: {FLASH2} is not installed; run {INSTALL_FLASH2}, or {instead}"
        )


def _are_here(hardware: Hardware) -> bool:
    return any(gpu.uuid for gpu in hardware.gpus)  # those of a plan for others have none


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
