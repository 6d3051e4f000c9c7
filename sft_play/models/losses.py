"""Cross-entropy over labeled tokens, for training and evaluation alike.

Legend: B rows, T tokens, V vocabulary.
"""

from torch import Tensor
from torch.nn import functional

from sft_play.data.render import IGNORE_INDEX


def summed_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p(label) in nats over labeled tokens, a float32 scalar.

    logits (B, T, V), labels (B, T) int64; position t predicts label t + 1. A batch without labels
    gives 0, with a gradient.
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


def labelled_tokens_of_rows(labels: Tensor) -> Tensor:
    """Return the number of tokens of each row of labels (B, T) that have a loss, int64 (B,)."""
    return labels[:, 1:].ne(IGNORE_INDEX).sum(dim=1)
