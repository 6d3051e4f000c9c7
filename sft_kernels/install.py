"""Install fused kernels on a model: forward methods on its modules; classes are not patched.

The kernels run in training steps (training mode, gradients on). Evaluation and generation run the
model's original implementation, so that scores do not depend on the kernels that trained the
weights. There are two exceptions: attention, if a batch names its documents, because a mask of
(T, T) may need more memory than training; and experts with adapters, whose original implementation
needs a copy of all experts.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from sft_kernels import partitioned
from sft_kernels.attention.forward import mask_chunks
from sft_kernels.attention.install import install_attention, reads_rows
from sft_kernels.experts.install import install_experts
from sft_kernels.linear_attention import torch_code
from sft_kernels.linears.lora import bind_when_changed
from sft_kernels.linears.mlp import install_linears, install_mlp, why_mlp_linears_not_fusable
from sft_kernels.loss.head import install_loss
from sft_kernels.mixers.install import install_mixers
from sft_kernels.needs import ALL_PARTS, LINEARS_OF_MLP, PARTS
from sft_kernels.norms.install import install_norms
from sft_kernels.packed import watch_documents
from sft_kernels.sharded import outermost_layers
from sft_kernels.training_setup import TrainingSetup, Unsupported, base_model_of

logger = logging.getLogger(__name__)

MIXERS = "mixers"


@dataclass(frozen=True)
class FusedKernels:
    """The parts of a model that are fused, and those that are not."""

    on: dict[str, int]  # part: number of modules
    off: dict[str, str]  # part: why it is not fused
    in_one_row: bool = False  # documents may share one row: no module counts its tokens

    @property
    def reads_boundaries(self) -> bool:
        """Return whether packed batches should have document boundaries."""
        return "attention" in self.on or MIXERS in self.on

    def line(self) -> str:
        """Return the log line."""
        on = ", ".join(f"{part} x{count}" for part, count in self.on.items()) or "off"
        off = "".join(f"; no {part}: {reason}" for part, reason in self.off.items())
        return f"fast path: {on}{off}"


def install_kernels(setup: TrainingSetup, proofs: Any = None) -> FusedKernels:
    """Fuse and log every part of a model whose fused result is the same; return the parts.

    Parts include their adapters. `proofs` stores those of earlier starts: every rank calls its
    `take(setup)` before parts are proved, and `write(setup)` after.
    """
    with _gathering(setup):
        kernels = _install_parts(setup, proofs)
    record_fused_kernels(setup.model, kernels)
    return kernels


def record_fused_kernels(model: nn.Module, kernels: FusedKernels) -> None:
    """Log the fused parts of a model, and store them for `fused_kernels_of`."""
    base_model_of(model).fast_path = kernels
    logger.info("%s", kernels.line())


def fused_kernels_of(model: nn.Module) -> FusedKernels:
    """Return the fused parts of a model; they are empty if nothing was installed."""
    return getattr(base_model_of(model), "fast_path", FusedKernels({}, {}))


def why_no_trees(model: nn.Module, kernels: FusedKernels) -> str | None:
    """Return why a model cannot train trees of samples, None if it can."""
    for module in model.modules():
        state = vars(module).get("mixer_state")
        if state and not state.takes_trees:
            return f"the state of {type(module).__name__} cannot branch"
    if "attention" not in kernels.on:
        return f"no fused attention ({kernels.off.get('attention', 'nothing is fused')})"
    return None


@contextlib.contextmanager
def _gathering(setup: TrainingSetup) -> Iterator[None]:
    """Keep weights outside of layers gathered; layers gather theirs while they run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(setup.gathered(setup.base))
        if setup.zero_stage == 3 and setup.has_values:
            stack.enter_context(partitioned.gathering_layers(setup.base))
        yield


def _install_parts(setup: TrainingSetup, proofs: Any) -> FusedKernels:
    """Install each part that passes its proof; return the fused parts.

    A part is compared with the model's original implementation. Mixers reset their state at each
    document whether or not kernels are fused.
    """
    on: dict[str, int] = {}
    off: dict[str, str] = {}
    parts = [*INSTALLERS]
    watch_documents(setup.base, setup.decoder, setup.encoders)
    if getattr(setup.decoder.config, "attention_chunk_size", None):
        setup.decoder.register_forward_pre_hook(mask_chunks, with_kwargs=True)
    if setup.why_off:
        off[ALL_PARTS] = setup.why_off
        parts = [MIXERS]
    elif setup.has_values or setup.is_traced:
        with torch_code():
            _ = setup.proof_inputs  # captured before anything is installed
        if proofs is not None and setup.has_values:
            proofs.take(setup)
        if setup.zero_stage == 3 and setup.has_values and not setup.is_full:
            _gather_with_layers(setup)
    for part in parts:
        setup.left_out.clear()
        try:
            with torch_code(part != MIXERS):
                count = INSTALLERS[part](setup)
        except Unsupported as reason:
            off[part] = str(reason)
            continue
        if count:
            on[part] = count
        if setup.left_out:
            off[part] = "; ".join(setup.left_out)
    bind_when_changed(setup.decoder)
    if "mlp" in on:
        reason = why_mlp_linears_not_fusable(setup)
        if reason:
            off[LINEARS_OF_MLP] = reason
    if proofs is not None:
        proofs.write(setup)
    in_one_row = "attention" in on and not reads_rows(setup.decoder)
    return FusedKernels(_in_order(on), _in_order(off), in_one_row)


def _gather_with_layers(setup: TrainingSetup) -> None:
    """Let ZeRO-3 gather all weights of a layer at once, for fused functions that read them.

    DeepSpeed frees them when the gradient of the layer's input is ready. It finds inputs only among
    the positional arguments.
    """
    inputs = setup.proof_inputs
    for layer in outermost_layers(setup.decoder):
        sample = inputs.samples.get(inputs.kinds[layer])
        if sample is not None and all(call.args for call in sample.calls.values()):
            partitioned.gather_with_layer(layer)


def _in_order(parts: dict[str, Any]) -> dict[str, Any]:
    """Return parts in the order of PARTS; others come last."""
    names = [part for part in PARTS if part in parts]
    return {part: parts[part] for part in dict.fromkeys([*names, *parts])}


# The order matters. Experts come first: attention runs the full decoder, in which PEFT's code
# would build and store all adapted experts. Linears are those that no earlier part computes itself.
# Mixers come last: if attention separates documents, it is not a mixer.
# An installer returns how many modules it has fused: 0 if a model has none of its kind.
INSTALLERS: dict[str, Callable[[TrainingSetup], int]] = {
    "experts": install_experts,
    "attention": install_attention,
    "mlp": install_mlp,
    "linears": install_linears,
    "norms": install_norms,
    "loss": install_loss,
    MIXERS: install_mixers,
}
