"""Which parts of a run use fused kernels, and why the others do not.

`sft_kernels` decides from the modules of the loaded model. For models like Llama, whose steps are
planned in closed form, the rules here predict its result before the model is loaded.
tests/test_models_adapters.py compares both. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sft_kernels.needs import (
    ALL_PARTS,
    DORA,
    DROPOUT,
    LINEARS_OF_MLP,
    MIN_CAPABILITY,
    TRAINED_TOKENS,
    ZERO_3,
    has_liger,
)
from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.config.sections.model import HEADS
from sft_play.plan.model_shape import FOUR_NORMS, LAYER_NORMS, LLAMA_LIKE
from sft_play.plan.traced import TracedStep

ATTENTION_LINEARS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP_LINEARS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
# A trace (plan.counting), if there is one, says what is fused
UNTRACED = "what its modules compute is found when the model is loaded"


@dataclass(frozen=True)
class FastSetup:
    """The facts that determine the choice of kernels."""

    config: Config
    model_type: str
    is_gpu: bool
    is_half: bool  # matrix multiplications in 16 bits
    zero_stage: int
    capability: tuple[int, int] | None = None  # of the GPU, if it is known
    traced: TracedStep | None = None  # of the model, if it is not like Llama


@dataclass(frozen=True)
class FastPlan:
    """The fused parts, and why the others are not fused."""

    on: tuple[str, ...]
    off: Mapping[str, str]

    def describe(self) -> str:
        """Return `fused kernels`, `fused kernels but for linears (...)` or `no fused kernels`."""
        if not self.on:
            return f"no fused kernels ({'; '.join(self.off.values())})"
        if not self.off:
            return "fused kernels"
        parts_by_reason: dict[str, list[str]] = {}
        for part, reason in self.off.items():
            parts_by_reason.setdefault(reason, []).append(part)
        missing = [f"{' and '.join(parts)} ({reason})" for reason, parts in parts_by_reason.items()]
        return f"fused kernels but for {'; '.join(missing)}"


UNKNOWN_KERNELS = FastPlan((), {ALL_PARTS: UNTRACED})


def plan_kernels(setup: FastSetup) -> FastPlan:
    """Return which parts of a run are planned to be fused."""
    if setup.traced is not None:
        return FastPlan(setup.traced.on, setup.traced.off)
    if backend_of(setup.config).has_own_kernels:
        return FastPlan(("attention", "loss"), {})
    if setup.config.train.fast_path is False:
        return FastPlan((), {ALL_PARTS: "train.fast_path=false"})
    if setup.model_type not in LLAMA_LIKE:
        return UNKNOWN_KERNELS
    linears = of_mlp = why_not_adapters(setup)
    if setup.config.tuning.mode == "full":
        linears, of_mlp = "mode full trains the weights themselves", None
    elif not has_packed_parts(setup):
        targets = _targets(setup)
        if not targets & ATTENTION_LINEARS:
            linears = "no adapters there"
        if not targets & MLP_LINEARS:
            of_mlp = None
    reasons = {
        "attention": _why_not_attention(setup),
        "linears": linears,
        "mlp": None,
        "norms": _why_not_norms(setup),
        "loss": _why_not_loss(setup),
    }
    on = tuple(part for part, reason in reasons.items() if reason is None)
    reasons[LINEARS_OF_MLP] = of_mlp
    return FastPlan(on, {part: reason for part, reason in reasons.items() if reason is not None})


def is_fast(setup: FastSetup) -> bool:
    """Return whether memory and speed of the layers are those of the fused kernels.

    The estimates cover them on a GPU in 16 bits. In mode full the linears are always plain.
    """
    if not setup.is_gpu or not setup.is_half:
        return False
    if setup.traced is not None:
        return setup.traced.is_fused
    if has_packed_parts(setup) or setup.model_type not in LLAMA_LIKE:
        return False
    if setup.config.tuning.mode != "full" and why_not_adapters(setup) is not None:
        return False
    if backend_of(setup.config).has_own_kernels:
        return True
    has_sdpa = setup.config.model.attn_implementation in ("auto", "sdpa")
    return setup.config.train.fast_path is not False and has_sdpa


def fuses_loss(setup: FastSetup) -> bool:
    """Return whether head and loss use as much memory as the fused kernel."""
    if not setup.is_gpu or not setup.is_half:
        return False
    if backend_of(setup.config).has_own_kernels:
        return is_fast(setup)
    return "loss" in plan_kernels(setup).on


def has_packed_parts(setup: FastSetup) -> bool:
    """Return whether ZeRO-3 shards 4-bit weights, which cannot be gathered for a proof."""
    return setup.zero_stage == 3 and setup.config.tuning.mode == "qlora"


def _why_not_attention(setup: FastSetup) -> str | None:
    implementation = setup.config.model.attn_implementation
    if implementation not in ("auto", "sdpa"):
        return f"model.attn_implementation={implementation}"
    if setup.is_gpu and not setup.is_half:
        return "its kernels compute in 16 bits"
    if setup.is_gpu and setup.capability is not None and setup.capability < MIN_CAPABILITY:
        return "its kernels need a GPU of capability 8.0"
    if setup.is_gpu and not has_liger():
        return "liger-kernel is not installed"
    return None


def why_not_adapters(setup: FastSetup) -> str | None:
    """Return why PEFT computes the linears with adapters."""
    lora = setup.config.tuning.lora
    if lora.use_dora:
        return DORA
    if lora.dropout:
        return DROPOUT
    return ZERO_3 if has_packed_parts(setup) else None


def _targets(setup: FastSetup) -> set[str]:
    """Return the last words of the names of the layers with adapters."""
    targets = setup.config.tuning.lora.target_modules
    if targets == "all-linear":
        return {*ATTENTION_LINEARS, *MLP_LINEARS}
    return {target.rpartition(".")[2] for target in targets}


def _why_not_norms(setup: FastSetup) -> str | None:
    if has_packed_parts(setup):
        return ZERO_3
    if setup.is_gpu and has_liger():
        return None
    saved = {name.rpartition(".")[2] for name in setup.config.tuning.lora.modules_to_save or ()}
    are_frozen = setup.config.tuning.mode != "full" and not saved & set(LAYER_NORMS)
    # fused with the residual adds; a norm after attention or MLP is not part of the residual stream
    if are_frozen and setup.model_type not in FOUR_NORMS:
        return None
    return "liger-kernel is not installed" if setup.is_gpu else "the kernels are for GPUs"


def _why_not_loss(setup: FastSetup) -> str | None:
    if has_packed_parts(setup):
        return ZERO_3
    tuning = setup.config.tuning
    if setup.config.trained_tokens:
        return TRAINED_TOKENS
    if tuning.mode != "full" and _targets(setup) & HEADS:
        return "the output head has adapters"
    return None
