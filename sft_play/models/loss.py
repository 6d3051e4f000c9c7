"""The loss of a batch, with or without the fused head."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sft_kernels.loss.head import fused_nll, is_loss_fused, summed_nll
from sft_play.data.batch import Batch


def sum_nll(model: nn.Module, wrapped: Any, batch: Batch, **options: Any) -> Tensor:
    """Return the weighted sum of the nats of a batch's labeled tokens, with its autograd graph.

    `wrapped` is the model or its wrapper; it is called with the batch's arguments and `options`.
    """
    arguments, tokens = batch.arguments | options, batch.loss
    weights = tokens.weights
    if is_loss_fused(model):
        nll = fused_nll(model, wrapped, arguments, tokens)
        return nll if weights is None else nll @ weights.to(nll.device)
    logits = wrapped(**arguments).logits
    if weights is None and batch.labels is not None:
        return summed_nll(logits, batch.labels)
    predicted = logits.flatten(0, 1).index_select(0, tokens.positions.to(logits.device)).float()
    targets = tokens.targets.to(logits.device)
    nll = functional.cross_entropy(predicted, targets, reduction="none")
    if weights is None:
        return nll.sum()
    counts = torch.tensor(tokens.counts, device=weights.device)
    return nll @ weights.repeat_interleave(counts).to(nll.device)
