"""The labeled tokens of a batch. Legend: B rows, T tokens per row, N labeled tokens in G groups."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default


class LossTokens(NamedTuple):
    """The labeled tokens of a batch, in groups of consecutive ones.

    Found on the CPU: counting them on a GPU would make the CPU wait for the number.
    """

    positions: Tensor  # (N,) int64, in the flattened (B * T): of the tokens that predict them
    targets: Tensor  # (N,) int64
    total_weight: float  # their number if each weighs 1
    counts: Sequence[int] | None = None  # (G,) tokens of each group; None: one group
    weights: Tensor | None = None  # (G,) float32, of each token of a group; None: each weighs 1


def labelled(
    labels: Tensor, weights: Tensor | None = None, parents: Tensor | None = None
) -> LossTokens:
    """Return the tokens whose labels (B, T) are predicted; with weights (B, T), by their weight.

    A label is predicted by the token before it, or by the one that parents (B * T,) name; by none
    if that is -1.

    >>> found = labelled(torch.tensor([[-100, 6, 7], [-100, -100, 9]]))
    >>> found.positions.tolist(), found.targets.tolist()
    ([0, 1, 4], [6, 7, 9])
    """
    if parents is not None:
        labels = labels.masked_fill(parents.view_as(labels) < 0, IGNORE_INDEX)
    rows, columns = labels[:, 1:].ne(IGNORE_INDEX).nonzero(as_tuple=True)
    of_labels = rows * labels.shape[1] + columns + 1
    targets = labels.flatten()[of_labels]
    positions = of_labels - 1 if parents is None else parents[of_labels]
    if weights is None:
        return LossTokens(positions, targets, float(len(targets)))
    of_tokens, order = weights.flatten()[of_labels].sort(stable=True)
    distinct, counts = of_tokens.unique_consecutive(return_counts=True)
    total = of_tokens.double().sum().item()
    return LossTokens(positions[order], targets[order], total, counts.tolist(), distinct)
