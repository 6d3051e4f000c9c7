"""Micro-batches of a training step, and their share of its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sft_play.data.batch import Batch
from sft_play.data.collate import TokenSequence
from sft_play.models.context import ContextGroup, RowPart
from sft_play.models.experts import BALANCE
from sft_play.models.images import trained_encoder_weights
from sft_play.models.loss import sum_nll
from sft_play.training.experts import RouterLoss


def spread_nan(loss: Tensor) -> Tensor:
    """Return a loss whose gradients are NaN if it is NaN or infinite, else the loss itself.

    An infinite loss may have finite gradients, e.g. if the target's logit is -inf.
    """
    return loss * (1.0 + 0.0 * loss.detach())  # times 1, or NaN


@dataclass
class StepLoss:
    """Computes a micro-batch's share of the mean loss of its step, with the autograd graph."""

    model: nn.Module
    context: ContextGroup | None = None  # of ranks that share each row
    router_loss: RouterLoss | None = None

    def __post_init__(self) -> None:
        self.encoder_weights = trained_encoder_weights(self.model)

    def compute(self, wrapped: Any, batch: Batch, labelled_tokens: float) -> Tensor:
        """Return a micro-batch's summed loss in nats, divided by the step's labeled tokens.

        `wrapped` is the model or its wrapper. `labelled_tokens` counts those of all ranks.
        """
        # the model computes the router's loss
        options = {} if self.router_loss is None else {BALANCE: True}
        if self.context is not None:
            batch = self.context.shared(batch)
        loss = sum_nll(self.model, wrapped, batch, **options) / labelled_tokens
        if self.encoder_weights and "pixel_values" not in batch.inputs:
            # so that every rank has a gradient, which is zero, for every weight
            loss = loss + 0.0 * sum(weight.sum() for weight in self.encoder_weights)
        if self.router_loss is not None:
            share = batch.loss.total_weight / labelled_tokens
            loss = loss + self.router_loss.of_micro_batch(share).to(loss.device)
        return spread_nan(loss)


def collate_for_step(
    collate: Callable[[Sequence[TokenSequence]], Batch],
    sequences: Sequence[TokenSequence],
    part: RowPart | None = None,
) -> Batch:
    """Return the collated batch; with `part` the part of it that this rank computes."""
    batch = collate(sequences)
    return batch if part is None else part.cut(batch)
