"""Whether kernels of flash-linear-attention compute a model's recurrent layers. Loads no torch."""

from importlib import metadata
from importlib.util import find_spec

from packaging.version import Version

from sft_play.plan.devices import Hardware
from sft_play.plan.model_shape import ModelShape

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
    layers = model.structure.recurrent_layers if model.structure else 0
    here = [gpu for gpu in hardware.gpus if gpu.uuid]  # others have none
    if not layers or not here:
        return []
    reason = MISSING
    if find_spec("fla") is not None:
        reason = why_no_kernels(here[0].capability, _version_of_triton())
    if reason is None:
        return []
    return [
        f"{layers} of {model.layers} layers are recurrent, and {reason}: transformers computes "
        "them in plain torch, several times slower and in more memory than is planned"
    ]


def _version_of_triton() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
