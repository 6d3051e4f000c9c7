"""Which parts of a model have fused kernels, and what these need. No torch."""

import importlib.util

from packaging.version import Version

PARTS = ("attention", "linears", "mlp", "experts", "norms", "loss")  # in the order of the report
ALL_PARTS = "fused kernels"  # used if one reason applies to all parts
LINEARS_OF_MLP = "linears of the mlp"  # of the part mlp: its elementwise kernel does not need them
# Why a part is not fused
ZERO_3 = "weights partitioned by ZeRO-3"
DORA = "PEFT computes DoRA"
DROPOUT = "PEFT computes the dropout of adapters"
TRAINED_TOKENS = "the output head has trained tokens"
MIN_CAPABILITY = (8, 0)  # of a GPU for torch's flash attention
PROVEN_EXPERTS = 4  # per module, for which a proof runs the original implementation
FLOAT8_CAPABILITY = (8, 9)  # Ada, the first with float8 tensor cores
FLOAT8_MULTIPLE = 16  # torch._scaled_mm needs matrices whose sizes are multiples of it


def has_liger() -> bool:
    """Return whether the package with the kernels for norms and rotary embeddings is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


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
