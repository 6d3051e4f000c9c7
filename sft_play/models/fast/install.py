"""Install fused kernels on a model: forward methods on its modules; classes are not patched.

The kernels run in training steps (training mode, gradients on) and on packed batches. Evaluation
and generation run the code of the model's classes, so that scores do not depend on the kernels that
trained the weights.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.fast import attention, norms, residual
from sft_play.models.fast.attention_interface import use_interface
from sft_play.models.fast.capture import PACKED, Call
from sft_play.models.fast.experts import find_experts, fused_forward, why_experts_not_fusable
from sft_play.models.fast.linear_cross_entropy import fuse_loss, why_loss_not_fusable
from sft_play.models.fast.lora import fuse_lora_linear, why_not_fusable
from sft_play.models.fast.mixer_install import NotResettable, install_mixers
from sft_play.models.fast.mlp import lora_mlp
from sft_play.models.fast.norms import is_training
from sft_play.models.fast.proof import prove
from sft_play.models.fast.recognise import (
    GatedMlp,
    calls_attention_interface,
    gated_mlp_of,
    is_linear,
    layer_roles_of,
    norm_kind_of,
    why_not_like_llama,
)
from sft_play.models.fast.setup import TrainingSetup, Unsupported, base_model_of
from sft_play.plan.fast import LINEARS_OF_MLP, MIN_CAPABILITY, PARTS, has_liger
from sft_play.process import Process

logger = logging.getLogger(__name__)


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


def _install(setup: TrainingSetup) -> FusedKernels:
    if setup.config.train.fast_path is False:
        return FusedKernels({}, {"fused kernels": "train.fast_path=false"})
    if setup.has_values:
        _ = setup.proof_inputs  # from the model's own code: before anything is installed
    on: dict[str, int] = {}
    off: dict[str, str] = {}
    for part, install in INSTALLERS.items():
        setup.left_out.clear()
        try:
            count = install(setup)
        except Unsupported as reason:
            off[part] = str(reason)
            continue
        if count:
            on[part] = count
        if setup.left_out:
            off[part] = "; ".join(setup.left_out)
    if "mlp" in on:
        reason = _why_mlp_linears_not_fusable(setup)
        if reason:
            off[LINEARS_OF_MLP] = reason
    return FusedKernels(_in_order(on), _in_order(off))


def _in_order(parts: dict[str, Any]) -> dict[str, Any]:
    """Return parts in the order of PARTS; others come last."""
    names = [part for part in PARTS if part in parts]
    return {part: parts[part] for part in dict.fromkeys([*names, *parts])}


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
    """Install attention without masks; where it is like Llama's, with rotary and projections.

    Other modules keep their own code around the attention function. A module that needs a mask
    would not get one, so either all modules are fused or none.
    """
    _check_attention_kernels(setup)
    modules = [module for module in setup.decoder.modules() if calls_attention_interface(module)]
    if not modules:
        raise Unsupported("no module calls an attention function of transformers")
    for module in modules:
        _check_attention(module)
    whole = _whole_attentions(setup, modules)
    others = [module for module in modules if module not in whole]
    if others:
        _use_interface(setup, others)
    for module in whole:
        module.forward = _attention_forward_of(module)
        setup.taken.update(child for child in module.children() if is_linear(child))
    setup.decoder.register_forward_pre_hook(attention.remove_mask, with_kwargs=True)
    return len(modules)


def _whole_attentions(setup: TrainingSetup, modules: list[nn.Module]) -> set[nn.Module]:
    """Return the modules that `attention_forward` computes as a whole."""
    alike = [module for module in modules if why_not_like_llama(module) is None]
    try:
        return set(prove(alike, _attention_forward_of, setup, _unmasked(setup)))
    except Unsupported:
        return set()
    finally:
        setup.left_out.clear()  # the others are proved next


def _use_interface(setup: TrainingSetup, modules: list[nn.Module]) -> None:
    """Let modules call our attention function where transformers would call another.

    Raises: Unsupported unless each then computes the same without its mask.
    """
    if setup.zero_stage == 3:
        name = type(modules[0]).__name__
        raise Unsupported(f"{name} is not like Llama's, and ZeRO-3 partitions what would prove it")
    try:
        use_interface(setup.decoder)
    except ValueError as reason:
        raise Unsupported(str(reason)) from None
    agreed = prove(modules, lambda module: module.forward, setup, _unmasked(setup))
    if len(agreed) < len(modules):
        raise Unsupported(setup.left_out.pop())


def _attention_forward_of(module: nn.Module) -> Callable[..., Any]:
    return MethodType(attention.attention_forward, module)


def _check_attention(module: nn.Module) -> None:
    """Raise Unsupported if no fused attention computes what a module asks for."""
    dropouts = [child.p for child in module.children() if isinstance(child, nn.Dropout)]
    dropout = max(getattr(module, "attention_dropout", 0.0), *dropouts, 0.0)
    if dropout:
        raise Unsupported(f"the model's attention has a dropout of {dropout}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("the model's attention looks ahead")


def _unmasked(setup: TrainingSetup) -> Callable[[Call, str], Call]:
    """Return how fused attention is called where own code gets a mask."""

    def fused_call(call: Call, batch: str) -> Call:
        documents = setup.proof_inputs.documents if batch == PACKED else None
        mask = attention.unmasked(documents)
        return Call(call.args, {**call.kwargs, "attention_mask": mask})

    return fused_call


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


def _install_mlp(setup: TrainingSetup) -> int:
    """Fuse gated MLPs, or only their elementwise part if their linears cannot be fused."""
    modules = []
    for module in setup.decoder.modules():
        roles = gated_mlp_of(module)
        if roles is not None:
            module.fused_roles = roles
            modules.append(module)
    if not modules:
        raise Unsupported("no gated MLP with SiLU or GELU (tanh)")
    agreed = prove(modules, _mlp_forward_of, setup)
    for module in agreed:
        module.forward = _mlp_forward_of(module)
        setup.taken.update(child for child in module.children() if is_linear(child))
    return len(agreed)


def _mlp_forward_of(module: nn.Module) -> Callable[..., Any]:
    return MethodType(mlp_forward, module)


def _why_mlp_linears_not_fusable(setup: TrainingSetup) -> str | None:
    """Return why the linears of the MLPs run their own forward, None where they are fused."""
    if setup.config.tuning.mode == "full":
        return None  # nothing is fused into the product of a trained weight
    for module in setup.decoder.modules():
        if not _is_fused(module, mlp_forward):
            continue
        for linear in module.children():
            reason = why_not_fusable(linear) if is_linear(linear) else None
            if reason:
                return reason
    return None


def _is_fused(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Return whether a function was set as the forward method of a module."""
    return getattr(vars(module).get("forward"), "__func__", None) is function


def mlp_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of a gated MLP: fused in training, its class's own otherwise.

    Shapes: (B, T, H) to (B, T, H).
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    roles: GatedMlp = self.fused_roles
    up = None if roles.up is None else getattr(self, roles.up)
    gate = getattr(self, roles.gate)
    return lora_mlp(hidden_states, gate, up, getattr(self, roles.down), roles.activation)


def _install_experts(setup: TrainingSetup) -> int:
    """Fuse modules that hold many experts; return 0 where there are none."""
    modules = find_experts(setup.decoder)
    fusable = []
    for module in modules:
        reason = why_experts_not_fusable(module)
        if reason is None:
            fusable.append(module)
        else:
            setup.left_out.append(reason)
    if modules and not fusable:
        raise Unsupported(setup.left_out[0])

    def fused(module: nn.Module) -> Callable[..., Any]:
        return fused_forward(module, setup.has_values)

    agreed = prove(fusable, fused, setup)
    for module in agreed:
        module.forward = fused(module)
    return len(agreed)


def _install_linears(setup: TrainingSetup) -> int:
    """Fuse every linear of the decoder with adapters that no larger fused function computes.

    `attention_forward` calls its linears fused; the others get a fused forward method of their own.
    """
    if setup.config.tuning.mode == "full":
        raise Unsupported("mode full trains the weights themselves")
    in_attention: set[nn.Module] = set()
    for module in setup.decoder.modules():
        if _is_fused(module, attention.attention_forward):
            in_attention.update(module.children())
    count = 0
    reasons: dict[str, int] = {}
    for linear in setup.decoder.modules():
        if not isinstance(linear, LoraLayer) or not is_linear(linear):
            continue
        if linear in setup.taken and linear not in in_attention:
            continue
        reason = why_not_fusable(linear)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        count += 1
        if linear not in in_attention:
            fuse_lora_linear(linear)
    if not count:
        raise Unsupported(next(iter(reasons), "no adapters there"))
    for reason, number in reasons.items():
        setup.left_out.append(f"{number} of {number + count}: {reason}")
    return count


def _install_norms(setup: TrainingSetup) -> int:
    """Fuse RMSNorms: with the residual adds before them, or with Liger's kernel on a GPU."""
    if setup.zero_stage == 3:
        raise Unsupported("ZeRO-3 partitions the weights")
    kinds = {}
    for module in setup.decoder.modules():
        kind = norm_kind_of(module)
        if kind is not None:
            kinds[module] = kind
    if not kinds:
        raise Unsupported("no RMSNorm")
    layers = {}
    for layer in setup.decoder.modules():
        roles = layer_roles_of(layer, kinds)
        if roles is not None:
            layers[layer] = roles
    own_gradient = _norms_before_linears(setup, layers)
    for module, kind in kinds.items():
        module.norm_kind = replace(kind, in_place=module in own_gradient)
    fused_with_add = _install_residual_adds(setup, layers)
    others = [module for module in kinds if module not in fused_with_add]
    reason = None
    if not setup.on_gpu:
        reason = "the kernels are for GPUs"
    elif not has_liger():
        reason = "liger-kernel is not installed"
    if reason:
        if not fused_with_add:
            raise Unsupported(reason)
        return len(fused_with_add)
    agreed = prove(others, _norm_forward_of, setup)
    for module in agreed:
        module.forward = _norm_forward_of(module)
    return len(fused_with_add) + len(agreed)


def _norm_forward_of(module: nn.Module) -> Callable[..., Any]:
    return MethodType(norms.norm_forward, module)


def _norms_before_linears(
    setup: TrainingSetup, layers: dict[nn.Module, residual.LayerRoles]
) -> set[nn.Module]:
    """Return the norms whose output is not added to the residual stream.

    The gradient of their output belongs to nobody else, and may be overwritten.
    """
    found = set(setup.decoder.children())
    for layer, roles in layers.items():
        found |= {getattr(layer, roles.norm1), getattr(layer, roles.norm2)}
    for module in setup.decoder.modules():
        if _is_fused(module, attention.attention_forward):
            found.update(module.children())
    return found


def _install_residual_adds(
    setup: TrainingSetup, layers: dict[nn.Module, residual.LayerRoles]
) -> set[nn.Module]:
    """Fuse the residual adds of pre-norm layers with the norms after them; return the norms."""
    candidates = []
    for layer, roles in layers.items():
        pair = (getattr(layer, roles.norm1), getattr(layer, roles.norm2))
        if not any(norm.weight.requires_grad for norm in pair):
            layer.fused_roles = roles
            candidates.append(layer)
    try:
        agreed = prove(candidates, _layer_forward_of, setup)
    except Unsupported as reason:
        setup.left_out.append(str(reason))
        return set()
    fused: set[nn.Module] = set()
    for layer in agreed:
        layer.forward = _layer_forward_of(layer)
        fused |= {getattr(layer, layers[layer].norm1), getattr(layer, layers[layer].norm2)}
    return fused


def _layer_forward_of(layer: nn.Module) -> Callable[..., Any]:
    return MethodType(residual.layer_forward, layer)


def _install_loss(setup: TrainingSetup) -> int:
    """Fuse the output head and the loss, which then compute labelled tokens only."""
    reason = why_loss_not_fusable(setup.model, setup.zero_stage)
    if reason:
        raise Unsupported(reason)
    fuse_loss(setup.model)
    return 1


# The order matters: linears are those that no part before them computes itself. An installer
# returns the number of modules that it has fused: 0 where a model has none of its kind.
INSTALLERS: dict[str, Callable[[TrainingSetup], int]] = {
    "attention": _install_attention,
    "mlp": _install_mlp,
    "experts": _install_experts,
    "linears": _install_linears,
    "norms": _install_norms,
    "loss": _install_loss,
}
