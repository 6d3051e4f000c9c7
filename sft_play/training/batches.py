"""Micro-batches of a training step, and their share of its loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sft_play.data.collate import Batch, TokenSequence, labelled
from sft_play.models.losses import summed_nll

# Keys of a micro-batch that are not inputs of the model; N labelled tokens
REAL_LENGTHS = "real_lengths"  # list of int: tokens of each document that is no filler
LOSS_POSITIONS = "loss_positions"  # (N,), see `collate.labelled`
LOSS_TARGETS = "loss_targets"  # (N,)


def token_mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
    """Return this micro-batch's share of the step's mean loss: nats / labelled tokens of the step.

    `num_items_in_batch` counts the labelled tokens of all micro-batches of all ranks. So every
    token has the same weight, however the step is split.
    """
    return summed_nll(outputs.logits, labels) / num_items_in_batch


def collate_for_step(
    collate: Callable[[Sequence[TokenSequence]], Batch], sequences: Sequence[TokenSequence]
) -> Batch:
    """Return the collated batch with its labelled tokens and the lengths of its real documents.

    They are found on the CPU: on a GPU the count would force a synchronization.
    """
    batch = collate(sequences)
    positions, targets = labelled(batch["labels"])
    return {
        **batch,
        LOSS_POSITIONS: positions,
        LOSS_TARGETS: targets,
        REAL_LENGTHS: [length for sequence in sequences for length in sequence.real_lengths],
    }
