"""What settings need of the machine: GPUs of some kind, an installed package. Loads no torch."""

import importlib.metadata
import importlib.util

from sft_play.config.backends import backend_of
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.plan.devices import Hardware
from sft_play.plan.float8 import require_float8

FLASH4 = "flash-attn-4"  # the package of FlashAttention 4
FLASH4_CAPABILITY = (9, 0)  # Hopper: elsewhere nobody has compared it with torch's kernels
INSTALL_FLASH4 = "python -m tools.install add requirements-hopper.txt"
FLASH2 = "flash-attn"  # the package of FlashAttention 2
FLASH2_CAPABILITY = (8, 0)
INSTALL_FLASH2 = ".venv/bin/pip install flash-attn --no-build-isolation"


def require(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Raise EnvironmentFault where a setting asks for what this machine does not have."""
    _require_backend(loaded.config, hardware)
    require_float8(loaded, hardware)
    _require_flash4(loaded, hardware)
    _require_flash2(loaded, hardware)


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


def _require_flash4(loaded: LoadedConfig, hardware: Hardware) -> None:
    if not loaded.config.model.has_flash4:
        return
    asked = loaded.described("model.attn_implementation")
    for gpu in hardware.gpus:
        if gpu.capability != FLASH4_CAPABILITY:
            found = ".".join(map(str, gpu.capability))
            raise EnvironmentFault(
                f"{asked}: cuda:{gpu.index} {gpu.name} has capability {found}, and FlashAttention "
                "4 is used on Hopper GPUs (9.0) alone; set MODEL_ATTN_IMPLEMENTATION=auto"
            )
    if hardware.kind != "cuda":
        raise EnvironmentFault(
            f"{asked}: FlashAttention 4 needs a Hopper GPU and no GPU is usable here; set "
            "MODEL_ATTN_IMPLEMENTATION=auto, or see make gpu-info"
        )
    if _are_here(hardware) and not _is_installed(FLASH4):
        raise EnvironmentFault(
            f"{asked}: {FLASH4} is not installed; run {INSTALL_FLASH4}, or set "
            "MODEL_ATTN_IMPLEMENTATION=auto"
        )


def _require_flash2(loaded: LoadedConfig, hardware: Hardware) -> None:
    if loaded.config.model.attn_implementation != "flash_attention_2":
        return
    asked = loaded.described("model.attn_implementation")
    instead = "set MODEL_ATTN_IMPLEMENTATION=auto, whose kernels need no package"
    if hardware.kind != "cuda":
        raise EnvironmentFault(
            f"{asked}: FlashAttention 2 needs a GPU and no GPU is usable here; {instead}"
        )
    for gpu in hardware.gpus:
        if gpu.capability < FLASH2_CAPABILITY:
            found = ".".join(map(str, gpu.capability))
            raise EnvironmentFault(
                f"{asked}: cuda:{gpu.index} {gpu.name} has capability {found}, and FlashAttention "
                f"2 needs 8.0; {instead}"
            )
    if _are_here(hardware) and not _is_installed(FLASH2):
        raise EnvironmentFault(
            f"{asked}: {FLASH2} is not installed, and make install leaves it out; {instead}, or "
            f"build it: {INSTALL_FLASH2}"
        )


def _are_here(hardware: Hardware) -> bool:
    return any(gpu.uuid for gpu in hardware.gpus)  # those of a plan for others have none


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
