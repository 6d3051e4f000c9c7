"""What of the fast path goes on a model, and putting it there: methods on the model's own modules, nothing on classes.

All of it is for training steps (training mode, gradients on) and for packed batches; evaluation and generation run the code of
the model's classes, so that what they say of the weights does not hang on the kernels that trained them.
"""

import importlib.util
import logging
from dataclasses import dataclass
from types import MethodType

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.fast import attention, norms, residual
from sft_play.models.fast.gated import activation_of
from sft_play.models.fast.lora import can_fuse, fuse_linear
from sft_play.models.fast.loss import can_fuse_loss, fuse_loss
from sft_play.models.fast.mlp import lora_mlp
from sft_play.models.fast.norms import is_training
from sft_play.plan.fast import FAST_PARTS
from sft_play.process import Process

logger = logging.getLogger(__name__)

NORMS = {
    "gemma": norms.GEMMA,
    "gemma2": norms.GEMMA_SANDWICH,
    "gemma3": norms.GEMMA_SANDWICH,
    "gemma3_text": norms.GEMMA_SANDWICH,
}
LIKE_LLAMA = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
}  # layers of h += attention(norm(h)), h += mlp(norm(h))
FIRST_CAPABILITY = (8, 0)  # of a GPU that torch's flash attention runs on


@dataclass(frozen=True)
class Installed:
    """What is on, with the number of modules of each part, and what is not, with the reason."""

    on: dict[str, int]
    off: dict[str, str]

    def line(self) -> str:
        """Return the facts of the log line."""
        on = ", ".join(f"{part} x{count}" for part, count in self.on.items()) or "off"
        off = "".join(f"; no {part}: {reason}" for part, reason in self.off.items())
        return f"fast path: {on}{off}"


@dataclass(frozen=True)
class Target:
    """A model to make fast, and how it is to be trained."""

    model: PreTrainedModel | PeftModel
    config: Config
    device: torch.device
    compute_dtype: torch.dtype
    zero_stage: int

    @property
    def base(self) -> PreTrainedModel:
        """transformers' model, which adapters wrap."""
        return base_of(self.model)

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers, without the head."""
        return self.base.get_decoder()

    @property
    def attentions(self) -> list[nn.Module]:
        return [layer.self_attn for layer in self.decoder.layers]


class Unsupported(Exception):
    """Why a part stays away from a model."""


def make_fast(
    model: PreTrainedModel | PeftModel, config: Config, process: Process, zero_stage: int = 0
) -> Installed:
    """Put on a model, adapters included, every part that computes what its own code does, and log which.

    Raises: ConfigError for train.fast_path=true where nothing fits.
    """
    installed = _install(Target(model, config, process.device, process.compute_dtype, zero_stage))
    if config.train.fast_path is True and not installed.on:
        raise ConfigError(
            f"train.fast_path=true: {next(iter(installed.off.values()))}; set TRAIN_FAST_PATH=auto"
        )
    base_of(model).fast_path = installed
    logger.info("%s", installed.line())
    return installed


def installed_on(model: nn.Module) -> Installed:
    """Return what `make_fast` put on a model; nothing where it was not called."""
    return getattr(base_of(model), "fast_path", Installed({}, {}))


def takes_boundaries(model: nn.Module) -> bool:
    """Return whether packed batches should name the boundaries of their documents."""
    return "attention" in installed_on(model).on


def base_of(model: nn.Module) -> nn.Module:
    """Return transformers' model without the adapters around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _install(target: Target) -> Installed:
    model_type = target.base.config.model_type
    known = FAST_PARTS.get(model_type, frozenset())
    if target.config.train.fast_path is False:
        return Installed({}, {"fused kernels": "train.fast_path=false"})
    if not known:
        return Installed({}, {"fused kernels": f"nobody has looked whether they fit {model_type}"})
    on: dict[str, int] = {}
    off: dict[str, str] = {}
    for part, install in INSTALLERS.items():
        try:
            if part not in known:
                raise Unsupported(f"{model_type} computes it in another way")
            on[part] = install(target)
        except Unsupported as reason:
            off[part] = str(reason)
    return Installed(on, off)


def _install_attention(target: Target) -> int:
    """Attention without masks, with rotary embeddings and projections around it."""
    _look_for_kernels_of_attention(target)
    for module in target.attentions:
        if module.attention_dropout:
            raise Unsupported(f"the model's attention has a dropout of {module.attention_dropout}")
        if not module.is_causal:
            raise Unsupported("the model's attention looks ahead")
        if module.head_dim > attention.LARGEST_HEAD:
            raise Unsupported(f"heads of {module.head_dim} features")
    for module in target.attentions:
        module.forward = MethodType(attention.attention_forward, module)
    target.decoder.register_forward_pre_hook(attention.route, with_kwargs=True)
    return len(target.attentions)


def _look_for_kernels_of_attention(target: Target) -> None:
    chosen = target.config.model.attn_implementation
    if chosen not in ("auto", "sdpa"):
        raise Unsupported(f"model.attn_implementation={chosen}")
    if target.device.type != "cuda":
        return
    if target.compute_dtype.itemsize != 2:
        raise Unsupported("its kernels compute in 16 bits")
    if torch.cuda.get_device_capability(target.device) < FIRST_CAPABILITY:
        raise Unsupported("its kernels need a GPU of capability 8.0")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unsupported("liger-kernel is not installed")


def _install_linears(target: Target) -> int:
    """The linears of attention: `attention_forward` calls them fused, and those of a model that keeps its own are fused one by one."""
    linears = [
        linear
        for module in target.attentions
        for linear in (*attention.projections(module), module.o_proj)
    ]
    adapted = _fusable(target, linears)
    for linear in adapted if "forward" not in vars(target.attentions[0]) else ():
        fuse_linear(linear)
    return len(adapted)


def _fusable(target: Target, linears: list[nn.Module]) -> list[nn.Module]:
    """Those with adapters. Raises: Unsupported with what keeps one from being fused, or when there is none."""
    if target.config.tuning.mode == "full":
        raise Unsupported("mode full trains the weights themselves")
    obstacle = next(filter(None, map(can_fuse, linears)), None)
    adapted = [linear for linear in linears if isinstance(linear, LoraLayer)]
    if obstacle or not adapted:
        raise Unsupported(obstacle or "no adapters there")
    return adapted


def _install_mlp(target: Target) -> int:
    """Gated MLPs; where weights are trained or cannot be fused, their elementwise half."""
    modules = [layer.mlp for layer in target.decoder.layers]
    for module in modules:
        if activation_of(_gate(module)) is None:
            raise Unsupported(f"its activation is {type(_gate(module)).__name__}")
    for module in modules:
        module.forward = MethodType(mlp_forward, module)
    return len(modules)


def mlp_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward method of a gated MLP while it trains, of its class else; (B, T, H) to (B, T, H)."""
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    gate, up = (
        (self.gate_up_proj, None)
        if hasattr(self, "gate_up_proj")
        else (self.gate_proj, self.up_proj)
    )
    return lora_mlp(hidden_states, gate, up, self.down_proj, activation_of(_gate(self)))


def _gate(mlp: nn.Module) -> nn.Module:
    return mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn  # Phi 3


def _install_norms(target: Target) -> int:
    """RMS norms: those of a layer together with the sums that they read, the others by Liger's kernels on a GPU."""
    if target.zero_stage == 3:
        raise Unsupported("ZeRO-3 partitions the weights")
    kind = NORMS.get(target.base.config.model_type, norms.LLAMA)
    found = {
        module for module in target.decoder.modules() if type(module).__name__.endswith("RMSNorm")
    }
    joined: set[nn.Module] = set()
    for layer in target.decoder.layers if target.base.config.model_type in LIKE_LLAMA else ():
        pair = {layer.input_layernorm, layer.post_attention_layernorm}
        if any(norm.weight.requires_grad for norm in pair) or getattr(
            target.base.config, "resid_pdrop", 0.0
        ):
            continue
        layer.norm_kind = kind
        layer.forward = MethodType(residual.layer_forward, layer)
        joined |= pair
    if target.device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        if not joined:
            raise Unsupported(
                "the kernels are for GPUs"
                if target.device.type != "cuda"
                else "liger-kernel is not installed"
            )
        return len(joined)
    for module in found - joined:
        module.norm_kind = kind
        module.forward = MethodType(norms.norm_forward, module)
    return len(found)


def _install_loss(target: Target) -> int:
    """The output head and the loss in one, over labelled tokens alone."""
    if obstacle := can_fuse_loss(target.model, target.zero_stage):
        raise Unsupported(obstacle)
    fuse_loss(target.model)
    return 1


# In this order: attention decides how its linears are called.
INSTALLERS = {
    "attention": _install_attention,
    "linears": _install_linears,
    "mlp": _install_mlp,
    "norms": _install_norms,
    "loss": _install_loss,
}
