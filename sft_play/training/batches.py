"""Micro-batches of a training step, and their share of its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sft_play.data.collate import WEIGHTS, Batch, RowPart, TokenSequence, labelled
from sft_play.models.experts import BALANCE
from sft_play.models.fast.documents import CONTEXT, ContextGroup
from sft_play.models.fast.loss.head import fused_nll, is_loss_fused, summed_nll
from sft_play.models.images import trained_encoder_weights
from sft_play.training.experts import RouterLoss

# Keys of a micro-batch that are not inputs of the model; N labeled tokens
REAL_LENGTHS = "real_lengths"  # list of int: tokens of each document without padding
LOSS_POSITIONS = "loss_positions"  # (N,), see `collate.labelled`
LOSS_TARGETS = "loss_targets"  # (N,)
LOSS_GROUPS = "loss_groups"  # `WeightGroups` of them in this order; missing: each weighs 1


class WeightGroups(NamedTuple):
    """Labeled tokens by their weight in the loss: G groups of consecutive tokens."""

    weights: Tensor  # (G,) float32
    counts: list[int]  # tokens per group
    total: float  # sum of the weights of all tokens


def total_weight(batch: Batch) -> float:
    """Return the sum of the weights of a micro-batch's labeled tokens: usually their number."""
    groups = batch.get(LOSS_GROUPS)
    return float(len(batch[LOSS_TARGETS])) if groups is None else groups.total


def spread(loss: Tensor) -> Tensor:
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

    def compute(self, wrapped: Any, inputs: Batch, labelled_tokens: float) -> Tensor:
        """Return a micro-batch's summed loss in nats, divided by the step's labeled tokens.

        `wrapped` is the model or its wrapper. `labelled_tokens` counts those of all ranks.
        """
        inputs = dict(inputs)
        share = total_weight(inputs) / labelled_tokens
        if self.router_loss is not None:
            inputs[BALANCE] = True  # the model computes the loss
        has_images = "pixel_values" in inputs
        if self.context is not None:
            inputs[CONTEXT] = self.context
        loss = take_nll(self.model, wrapped, inputs) / labelled_tokens
        if self.encoder_weights and not has_images:
            # so that every rank has a gradient, which is zero, for every weight
            loss = loss + 0.0 * sum(weight.sum() for weight in self.encoder_weights)
        if self.router_loss is not None:
            loss = loss + self.router_loss.of_micro_batch(share).to(loss.device)
        return spread(loss)


def take_nll(model: nn.Module, wrapped: Any, inputs: Batch) -> Tensor:
    """Return the weighted sum of the nats of a micro-batch's labeled tokens, with its graph.

    `wrapped` is the model or its wrapper. Keys that are not model inputs are removed from `inputs`.
    """
    labels = inputs.pop("labels", None)
    positions = inputs.pop(LOSS_POSITIONS)
    targets = inputs.pop(LOSS_TARGETS)
    groups: WeightGroups | None = inputs.pop(LOSS_GROUPS, None)
    if is_loss_fused(model):
        counts = groups and groups.counts
        nll = fused_nll(model, wrapped, inputs, positions, targets, counts)
        return nll if groups is None else nll @ groups.weights.to(nll.device)
    logits = wrapped(**inputs).logits
    if groups is None and labels is not None:
        return summed_nll(logits, labels)
    predicted = logits.flatten(0, 1).index_select(0, positions.to(logits.device)).float()
    nll = functional.cross_entropy(predicted, targets.to(logits.device), reduction="none")
    if groups is None:
        return nll.sum()
    weights = groups.weights.repeat_interleave(torch.tensor(groups.counts, device=targets.device))
    return nll @ weights.to(nll.device)


def collate_for_step(
    collate: Callable[[Sequence[TokenSequence]], Batch],
    sequences: Sequence[TokenSequence],
    part: RowPart | None = None,
) -> Batch:
    """Return the collated batch with its labeled tokens and the lengths of its real documents.

    They are found on the CPU: on a GPU the count would force a synchronization. `part` selects
    the part of the batch that this rank computes.
    """
    batch = collate(sequences)
    positions, targets = labelled(batch["labels"])
    weights = batch.pop(WEIGHTS, None)
    if weights is not None:
        of_tokens, order = weights.flatten()[positions + 1].sort(stable=True)
        positions, targets = positions[order], targets[order]
        distinct, counts = of_tokens.unique_consecutive(return_counts=True)
        total = of_tokens.double().sum().item()
        batch[LOSS_GROUPS] = WeightGroups(distinct, counts.tolist(), total)
    batch |= {
        LOSS_POSITIONS: positions,
        LOSS_TARGETS: targets,
        REAL_LENGTHS: [length for sequence in sequences for length in sequence.real_lengths],
    }
    return batch if part is None else _cut(batch, part)


def _cut(batch: Batch, part: RowPart) -> Batch:
    """Return this rank's part of a micro-batch."""
    found = part.cut(batch)
    if part.rank:
        found[REAL_LENGTHS] = []  # counted once, by the first rank
    is_here, positions = part.own(batch[LOSS_POSITIONS], batch["input_ids"].shape[1])
    found |= {LOSS_POSITIONS: positions, LOSS_TARGETS: batch[LOSS_TARGETS][is_here]}
    if LOSS_GROUPS in batch:
        groups: WeightGroups = batch[LOSS_GROUPS]
        counts = torch.stack([each.sum() for each in is_here.split(groups.counts)])
        total = (groups.weights.double() @ counts.double()).item()
        found[LOSS_GROUPS] = WeightGroups(groups.weights, counts.tolist(), total)
    return found
