"""Install the fused loss on an output head whose logits follow from its scores by a formula."""

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from sft_play.models.fast.capture import as_it_was
from sft_play.models.fast.loss.formula import HeadFormula, head_formula_of
from sft_play.models.fast.loss.head import FusedHead, output_head
from sft_play.models.fast.setup import TrainingSetup, Unsupported, base_model_of
from sft_play.models.sharding import device_of
from sft_play.plan.fast import TRAINED_TOKENS, ZERO_3

CHECK_TOKENS = 8


def install_loss(setup: TrainingSetup) -> int:
    """Fuse the output head and the loss, which then compute labelled tokens only."""
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
    """Return why the loss cannot be fused, None if it can. Runs the model on a few tokens."""
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
        return "the logits are not those of the output head (scaled or changed behind it)"
    return None


@torch.no_grad()
def _logits_come_from_head(model: nn.Module, head: nn.Linear, formula: HeadFormula) -> bool:
    """Return whether the model's logits follow from its head's scores by a formula.

    The model is run to find out, with its weights.
    """
    outputs: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        device = device_of(head.weight)
        with as_it_was(model, device):
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
    # The cap rounds to 2^-8 of a logit in bfloat16; a scale that matters changes more. Weights that
    # produce NaN pass here: the evaluation refuses them.
    return not difference > 2**-7 * expected.abs().max().item()


def _formula_of(model: nn.Module) -> HeadFormula | None:
    """Return how a model's logits follow from its head's scores, None if in no known way."""
    base, head = base_model_of(model), model.get_output_embeddings()
    for module in base.modules():  # of Llama 4 with its tower, the language model has the head
        if any(child is head for child in module.children()):
            return head_formula_of(module, head)
    return None
