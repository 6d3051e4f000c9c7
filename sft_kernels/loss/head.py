"""An output head that computes the loss of labeled tokens instead of logits.

It is installed on heads whose logits follow from its scores by a known formula.

Legend: B rows, T tokens, H hidden features, V vocabulary, N labeled tokens.
"""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from sft_kernels.capture import preserving_state
from sft_kernels.loss.linear_cross_entropy import (
    HeadFormula,
    fused_linear_cross_entropy,
    head_formula_of,
)
from sft_kernels.loss.tokens import IGNORE_INDEX, LossTokens
from sft_kernels.needs import TRAINED_TOKENS, ZERO_3
from sft_kernels.sharded import device_of
from sft_kernels.training_setup import TrainingSetup, Unsupported, base_model_of, to_compute_dtype


class FusedHead:
    """The forward method of an output head: returns logits, or the loss if tokens are set.

    It is set on the instance of a Linear, so that parameters, names and saved files do not change.
    The loss is computed here, inside the model's forward pass. Only there does DDP detect that the
    head's weight is used, and only there is autocast active.
    """

    def __init__(self, head: nn.Linear, formula: HeadFormula):
        self.head = head
        self.formula = formula
        self.tokens: LossTokens | None = None
        self.nll: Tensor | None = None  # of the tokens, after all hooks of the head
        self.hook = head.register_forward_hook(self.keep)

    def keep(self, head: nn.Module, args: tuple, output: Tensor) -> None:
        if self.tokens is not None:
            self.nll = output

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.tokens is None:
            return type(self.head).forward(self.head, hidden)
        targets, counts = self.tokens.targets, self.tokens.counts
        hidden = hidden.flatten(0, 1).index_select(0, self.tokens.positions)  # (N, H)
        if self.formula.scale != 1.0:
            hidden = hidden * self.formula.scale
        hidden = to_compute_dtype(hidden)
        weight = to_compute_dtype(self.head.weight)  # (V, H)
        softcap = self.formula.softcap
        if counts is None:
            nll = fused_linear_cross_entropy(hidden, weight, targets, softcap)
        else:
            groups = zip(hidden.split(counts), targets.split(counts), strict=True)
            nll = torch.stack(
                [fused_linear_cross_entropy(rows, weight, ids, softcap) for rows, ids in groups]
            )
        # Returned in place of logits, so that DDP finds the graph. A model may scale or cap it; the
        # value used is the one that a hook reads before that.
        return nll.reshape(1, 1, -1)


def is_loss_fused(model: nn.Module) -> bool:
    """Return whether `fuse_loss` was called."""
    return isinstance(forward_of_head(model), FusedHead)


def fused_nll(
    model: nn.Module, wrapped: Any, arguments: dict[str, Any], tokens: LossTokens
) -> Tensor:
    """Return the summed nll of tokens in nats, a float32 scalar; with groups, of each group (G,).

    `wrapped` is called with `arguments`; it is the model itself, or DDP or DeepSpeed around it.
    """
    fused = forward_of_head(model)
    assert isinstance(fused, FusedHead), "fuse_loss comes first"
    fused.tokens = tokens
    try:
        wrapped(**arguments)
        nll = fused.nll
    finally:
        fused.tokens = fused.nll = None
    assert nll is not None, "the model has not called its head"
    return nll.reshape(() if tokens.counts is None else -1)


def read_loss_last(model: nn.Module) -> None:
    """Read the fused loss after the hooks of a wrapper.

    Those of ZeRO-3 add the gathering of a trained head to the autograd graph.
    """
    fused = forward_of_head(model)
    if isinstance(fused, FusedHead):
        fused.hook.remove()
        fused.hook = fused.head.register_forward_hook(fused.keep)


def forward_of_head(model: nn.Module) -> Any:
    """Return the forward method that was set on the output head; None if it has its own."""
    head = output_head(model)
    return None if head is None else vars(head).get("forward")


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes the logits; it is a copy if the head is fully trained."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        return head.modules_to_save[head.active_adapters[0]]
    return head


CHECK_TOKENS = 8


def install_loss(setup: TrainingSetup) -> int:
    """Fuse the output head and the loss for labeled tokens only; return 1."""
    if setup.has_packed_parts:
        raise Unsupported(ZERO_3)
    reason = why_loss_not_fusable(setup.model)
    if reason:
        raise Unsupported(reason)
    fuse_loss(setup.model)
    return 1


def fuse_loss(model: nn.Module) -> None:
    """Install the fused loss on the model's output head, for `fused_nll`.

    Check `why_loss_not_fusable` first, and call this before the model is wrapped.
    """
    head = output_head(model)
    formula = _formula_of(model)
    assert formula is not None, "why_loss_not_fusable comes first"
    head.forward = FusedHead(head, formula)


def why_loss_not_fusable(model: nn.Module) -> str | None:
    """Return why the loss cannot be fused; None if it can. Runs the model on a few tokens."""
    head = output_head(model)
    if isinstance(head, TrainableTokensWrapper):
        return TRAINED_TOKENS
    if isinstance(head, LoraLayer):
        return "the output head has adapters"
    if type(head) is not nn.Linear or head.bias is not None:
        with_bias = " with a bias" if getattr(head, "bias", None) is not None else ""
        return f"the output head is {type(head).__name__}{with_bias}, not a plain Linear"
    if "forward" in vars(head):
        return "the output head is patched already"
    formula = _formula_of(model)
    if formula is None or not _logits_come_from_head(model, head, formula):
        return "the logits are not those of the output head (scaled or changed after it)"
    return None


@torch.no_grad()
def _logits_come_from_head(model: nn.Module, head: nn.Linear, formula: HeadFormula) -> bool:
    """Return whether the model computes its logits from its head's scores by a formula.

    To check it, the model runs with its weights. In a trace, which has no values, the result is
    always True.
    """
    if isinstance(head.weight, FakeTensor):
        return True  # tests check it for every model of plan.fast
    outputs: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        device = device_of(head.weight)
        with preserving_state(model, device):
            model.eval()
            ids = torch.arange(CHECK_TOKENS, device=device)[None] % len(head.weight)
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    expected_shape = (1, CHECK_TOKENS, len(head.weight))
    if len(outputs) != 1 or outputs[0].shape != expected_shape or logits.shape != expected_shape:
        return False
    expected = formula.logits(outputs[0].float())
    difference = (logits.float() - expected).abs().max().item()
    # The cap rounds to 2^-8 of a logit in bfloat16; a relevant scale changes more. Weights that
    # produce NaN pass this check: the evaluation rejects them.
    return not difference > 2**-7 * expected.abs().max().item()


def _formula_of(model: nn.Module) -> HeadFormula | None:
    """Return the formula from the head's scores to the model's logits; None if it is unknown."""
    base, head = base_model_of(model), model.get_output_embeddings()
    for module in base.modules():  # Llama 4 with an encoder: the language model has the head
        if any(child is head for child in module.children()):
            return head_formula_of(module, head)
    return None


def summed_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p(label) in nats over labeled tokens, a float32 scalar.

    logits (B, T, V), labels (B, T) int64; position t predicts label t + 1. The result of
    a batch without labels is 0, with a gradient.
    """
    predicted = logits[:, :-1].float().flatten(0, 1)  # (B * (T - 1), V)
    targets = labels[:, 1:].flatten().to(predicted.device)
    return functional.cross_entropy(predicted, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def nll_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the `summed_nll` of each row, float32 (B,)."""
    predicted = logits[:, :-1].float().flatten(0, 1)  # (B * (T - 1), V)
    targets = labels[:, 1:].to(predicted.device)
    nll = functional.cross_entropy(
        predicted, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return nll.view_as(targets).sum(dim=1)
