"""Find the MLPs and linears of a decoder, and install their fused functions."""

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sft_play.models.fast.attention.forward import attention_forward
from sft_play.models.fast.experts.install import find_experts
from sft_play.models.fast.linears.lora import LinearGroup, fuse_lora_linear, why_not_fusable
from sft_play.models.fast.linears.mlp import lora_mlp
from sft_play.models.fast.proof import prove
from sft_play.models.fast.recognise import GatedMlp, gated_mlp_of, is_linear
from sft_play.models.fast.setup import TrainingSetup, Unsupported, fuse, is_fused, is_training


def install_mlp(setup: TrainingSetup) -> int:
    """Fuse gated MLPs, or only their elementwise part if their linears cannot be fused."""
    modules = []
    for module in setup.decoder.modules():
        roles = gated_mlp_of(module)
        if roles is not None:
            bind_mlp(module, roles)
            modules.append(module)
    if not modules and find_experts(setup.decoder):
        return 0
    if not modules:
        raise Unsupported("no gated MLP with SiLU or GELU (tanh)")
    agreed = prove(modules, mlp_forward, setup)
    fuse(agreed, mlp_forward)
    for module in agreed:
        setup.taken.update(child for child in module.children() if is_linear(child))
    return len(agreed)


def bind_mlp(module: nn.Module, roles: GatedMlp) -> None:
    """Set what `mlp_forward` reads of a gated MLP."""
    names = (roles.gate,) if roles.up is None else (roles.gate, roles.up)
    module.fused_roles = roles
    module.inner_linears = LinearGroup(*(getattr(module, name) for name in names))
    module.down_linear = LinearGroup(getattr(module, roles.down))


def why_mlp_linears_not_fusable(setup: TrainingSetup) -> str | None:
    """Return why the linears of the MLPs run their own forward, None where they are fused."""
    if setup.config.tuning.mode == "full":
        return None  # nothing is fused into the product of a trained weight
    for module in setup.decoder.modules():
        if not is_fused(module, mlp_forward):
            continue
        for linear in module.children():
            reason = why_not_fusable(linear) if is_linear(linear) else None
            if reason:
                return reason
    return None


def mlp_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of a gated MLP: fused in training, its class's own otherwise.

    Shapes: (B, T, H) to (B, T, H).
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    roles: GatedMlp = self.fused_roles
    return lora_mlp(hidden_states, self.inner_linears, self.down_linear, roles.activation)


def install_linears(setup: TrainingSetup) -> int:
    """Fuse every linear of the decoder with adapters that no larger fused function computes.

    `attention_forward` calls its linears fused; the others get a fused forward method of their own.
    """
    if setup.config.tuning.mode == "full":
        raise Unsupported("mode full trains the weights themselves")
    in_attention: set[nn.Module] = set()
    for module in setup.decoder.modules():
        if is_fused(module, attention_forward):
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
