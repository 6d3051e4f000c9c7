"""Install fused kernels on a model: forward methods on its modules; classes are not patched.

The kernels run in training steps (training mode, gradients on) and on packed batches. Evaluation
and generation run the code of the model's classes, so that scores do not depend on the kernels that
trained the weights.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.fast import attention, norms, residual
from sft_play.models.fast.activations import activation_of
from sft_play.models.fast.attention_kernels import LARGEST_FLASH_HEAD
from sft_play.models.fast.linear_cross_entropy import fuse_loss, why_loss_not_fusable
from sft_play.models.fast.lora import fuse_lora_linear, why_not_fusable
from sft_play.models.fast.mixer_install import NotResettable, install_mixers
from sft_play.models.fast.mlp import lora_mlp
from sft_play.models.fast.norms import is_training
from sft_play.plan.fast import (
    FAST_PARTS,
    LINEARS_OF_MLP,
    MIN_CAPABILITY,
    RESIDUAL_MODEL_TYPES,
    has_liger,
    unknown_model,
)
from sft_play.process import Process

logger = logging.getLogger(__name__)

NORMS = {
    "gemma": norms.GEMMA,
    "gemma2": norms.GEMMA_SANDWICH,
    "gemma3": norms.GEMMA_SANDWICH,
    "gemma3_text": norms.GEMMA_SANDWICH,
}


@dataclass(frozen=True)
class FusedKernels:
    """The parts of a model that are fused, and those that are not."""

    on: dict[str, int]  # part: number of modules
    off: dict[str, str]  # part: why it is not fused

    def line(self) -> str:
        """Return the log line."""
        on = ", ".join(f"{part} x{count}" for part, count in self.on.items()) or "off"
        off = "".join(f"; no {part}: {reason}" for part, reason in self.off.items())
        return f"fast path: {on}{off}"


@dataclass(frozen=True)
class TrainingSetup:
    """A model to install kernels on, and how it will be trained."""

    model: PreTrainedModel | PeftModel
    config: Config
    process: Process
    zero_stage: int

    @property
    def base(self) -> PreTrainedModel:
        """Return transformers' model, without the adapters around it."""
        return base_model_of(self.model)

    @property
    def decoder(self) -> nn.Module:
        """Return the stack of layers, without the head."""
        return self.base.get_decoder()

    @property
    def attentions(self) -> list[nn.Module]:
        return [layer.self_attn for layer in self.decoder.layers]

    @property
    def on_gpu(self) -> bool:
        return self.process.device.type == "cuda"


class Unsupported(Exception):
    """Raised with the reason why a part of a model cannot be fused."""


def install_fused_kernels(
    model: PreTrainedModel | PeftModel, config: Config, process: Process, zero_stage: int = 0
) -> FusedKernels:
    """Fuse every part of a model, with its adapters, whose fused result is the same; log them.

    Raises: ConfigError for train.fast_path=true if nothing can be fused.
    """
    setup = TrainingSetup(model, config, process, zero_stage)
    kernels = _with_mixers(setup, _install(setup))
    if config.train.fast_path is True and not kernels.on:
        reason = next(iter(kernels.off.values()))
        raise ConfigError(f"train.fast_path=true: {reason}; set TRAIN_FAST_PATH=auto")
    record_fused_kernels(model, kernels)
    return kernels


def record_fused_kernels(model: nn.Module, kernels: FusedKernels) -> None:
    """Log the fused parts of a model, and keep them for `fused_kernels_of`."""
    base_model_of(model).fast_path = kernels
    logger.info("%s", kernels.line())


def fused_kernels_of(model: nn.Module) -> FusedKernels:
    """Return the fused parts of a model, none if nothing was installed."""
    return getattr(base_model_of(model), "fast_path", FusedKernels({}, {}))


def uses_varlen_attention(model: nn.Module) -> bool:
    """Return whether packed batches should have document boundaries."""
    return "attention" in fused_kernels_of(model).on or has_mixers(model)


def has_mixers(model: nn.Module) -> bool:
    """Return whether modules of a model start anew at each document of a packed batch."""
    return "mixers" in fused_kernels_of(model).on


def base_model_of(model: nn.Module) -> nn.Module:
    """Return transformers' model without the adapters around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _install(setup: TrainingSetup) -> FusedKernels:
    model_type = setup.base.config.model_type
    known_parts = FAST_PARTS.get(model_type, frozenset())
    if setup.config.train.fast_path is False:
        return FusedKernels({}, {"fused kernels": "train.fast_path=false"})
    if not known_parts:
        return FusedKernels({}, {"fused kernels": unknown_model(model_type)})
    on: dict[str, int] = {}
    off: dict[str, str] = {}
    for part, install in INSTALLERS.items():
        if part not in known_parts:
            off[part] = f"{model_type} computes it in another way"
            continue
        try:
            on[part] = install(setup)
        except Unsupported as reason:
            off[part] = str(reason)
    if "mlp" in on:
        reason = _why_mlp_linears_not_fusable(setup)
        if reason:
            off[LINEARS_OF_MLP] = reason
    return FusedKernels(on, off)


def _with_mixers(setup: TrainingSetup, kernels: FusedKernels) -> FusedKernels:
    """Start token mixers that keep a state at each document, whether or not kernels are fused.

    After attention: where that keeps documents apart, it is no such mixer.
    """
    try:
        use_kernels = setup.config.train.fast_path is not False
        mixers = install_mixers(setup.base, setup.decoder, setup.zero_stage, use_kernels)
    except NotResettable as reason:
        return replace(kernels, off={**kernels.off, "mixers": str(reason)})
    if not mixers.count:
        return kernels
    return replace(kernels, on={**kernels.on, "mixers": mixers.count})


def _install_attention(setup: TrainingSetup) -> int:
    """Install attention without masks, together with its rotary embeddings and projections."""
    _check_attention_kernels(setup)
    for module in setup.attentions:
        if module.attention_dropout:
            raise Unsupported(f"the model's attention has a dropout of {module.attention_dropout}")
        if not module.is_causal:
            raise Unsupported("the model's attention looks ahead")
        if module.head_dim > LARGEST_FLASH_HEAD:
            raise Unsupported(f"heads of {module.head_dim} features")
    for module in setup.attentions:
        module.forward = MethodType(attention.attention_forward, module)
    setup.decoder.register_forward_pre_hook(attention.remove_mask, with_kwargs=True)
    return len(setup.attentions)


def _check_attention_kernels(setup: TrainingSetup) -> None:
    """Raise Unsupported unless the attention kernels can run on this rank's device."""
    implementation = setup.config.model.attn_implementation
    if implementation not in ("auto", "sdpa"):
        raise Unsupported(f"model.attn_implementation={implementation}")
    if not setup.on_gpu:
        return
    if setup.process.compute_dtype.itemsize != 2:
        raise Unsupported("its kernels compute in 16 bits")
    if torch.cuda.get_device_capability(setup.process.device) < MIN_CAPABILITY:
        raise Unsupported("its kernels need a GPU of capability 8.0")
    if not has_liger():
        raise Unsupported("liger-kernel is not installed")


def _install_linears(setup: TrainingSetup) -> int:
    """Fuse the LoRA linears of attention.

    `attention_forward` calls them fused. Where it is not installed, each linear gets its own fused
    forward method.
    """
    linears: list[nn.Module] = []
    for module in setup.attentions:
        linears += [*attention.projections(module), module.o_proj]
    adapted = _fusable(setup, linears)
    if "forward" not in vars(setup.attentions[0]):
        for linear in adapted:
            fuse_lora_linear(linear)
    return len(adapted)


def _fusable(setup: TrainingSetup, linears: list[nn.Module]) -> list[LoraLayer]:
    """Return the linears with adapters.

    Raises: Unsupported if a linear cannot be fused, or none has adapters.
    """
    if setup.config.tuning.mode == "full":
        raise Unsupported("mode full trains the weights themselves")
    for linear in linears:
        reason = why_not_fusable(linear)
        if reason:
            raise Unsupported(reason)
    adapted = [linear for linear in linears if isinstance(linear, LoraLayer)]
    if not adapted:
        raise Unsupported("no adapters there")
    return adapted


def _install_mlp(setup: TrainingSetup) -> int:
    """Fuse gated MLPs, or only their elementwise part if their linears cannot be fused."""
    modules = [layer.mlp for layer in setup.decoder.layers]
    for module in modules:
        activation = _activation_module(module)
        if activation_of(activation) is None:
            raise Unsupported(f"its activation is {type(activation).__name__}")
    for module in modules:
        module.forward = MethodType(mlp_forward, module)
    return len(modules)


def _why_mlp_linears_not_fusable(setup: TrainingSetup) -> str | None:
    """Return why the linears of the MLPs run their own forward, None where they are fused."""
    if setup.config.tuning.mode == "full":
        return None  # nothing is fused into the product of a trained weight
    for layer in setup.decoder.layers:
        for linear in layer.mlp.children():
            if isinstance(linear, nn.Linear | LoraLayer | ModulesToSaveWrapper):
                reason = why_not_fusable(linear)
                if reason:
                    return reason
    return None


def mlp_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of a gated MLP: fused in training, its class's own otherwise.

    Shapes: (B, T, H) to (B, T, H).
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    activation = activation_of(_activation_module(self))
    if hasattr(self, "gate_up_proj"):  # Phi 3
        return lora_mlp(hidden_states, self.gate_up_proj, None, self.down_proj, activation)
    return lora_mlp(hidden_states, self.gate_proj, self.up_proj, self.down_proj, activation)


def _activation_module(mlp: nn.Module) -> nn.Module:
    return mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn  # Phi 3


def _install_norms(setup: TrainingSetup) -> int:
    """Fuse RMSNorms: with the residual adds before them, or with Liger's kernel on a GPU."""
    if setup.zero_stage == 3:
        raise Unsupported("ZeRO-3 partitions the weights")
    kind = NORMS.get(setup.base.config.model_type, norms.LLAMA)
    fused_with_add = _install_residual_adds(setup, kind)
    reason = None
    if not setup.on_gpu:
        reason = "the kernels are for GPUs"
    elif not has_liger():
        reason = "liger-kernel is not installed"
    if reason and not fused_with_add:
        raise Unsupported(reason)
    if reason:
        return len(fused_with_add)
    modules = setup.decoder.modules()
    found = {module for module in modules if type(module).__name__.endswith("RMSNorm")}
    for module in found - fused_with_add:
        module.norm_kind = kind
        module.forward = MethodType(norms.norm_forward, module)
    return len(found)


def _install_residual_adds(setup: TrainingSetup, kind: norms.NormKind) -> set[nn.Module]:
    """Fuse the residual adds of Llama-like layers with the norms after them; return the norms."""
    config = setup.base.config
    fused: set[nn.Module] = set()
    if config.model_type not in RESIDUAL_MODEL_TYPES or getattr(config, "resid_pdrop", 0.0):
        return fused
    for layer in setup.decoder.layers:
        pair = {layer.input_layernorm, layer.post_attention_layernorm}
        if any(norm.weight.requires_grad for norm in pair):
            continue
        layer.norm_kind = kind
        layer.forward = MethodType(residual.layer_forward, layer)
        fused |= pair
    return fused


def _install_loss(setup: TrainingSetup) -> int:
    """Fuse the output head and the loss, which then compute labelled tokens only."""
    reason = why_loss_not_fusable(setup.model, setup.zero_stage)
    if reason:
        raise Unsupported(reason)
    fuse_loss(setup.model)
    return 1


# The order matters: attention decides how its linears are called.
INSTALLERS: dict[str, Callable[[TrainingSetup], int]] = {
    "attention": _install_attention,
    "linears": _install_linears,
    "mlp": _install_mlp,
    "norms": _install_norms,
    "loss": _install_loss,
}
