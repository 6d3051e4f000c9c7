"""A micro-batch, from the collator to the loss.

Legend: B rows, T tokens per row, N labeled tokens in G groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sft_kernels.documents import DOCUMENTS, Documents
from sft_kernels.trees import Branch
from sft_play.data.render import IGNORE_INDEX


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

    A label is predicted by the token before it, or by its place in parents (B * T,).

    >>> found = labelled(torch.tensor([[-100, 6, 7], [-100, -100, 9]]))
    >>> found.positions.tolist(), found.targets.tolist()
    ([0, 1, 4], [6, 7, 9])
    """
    next_labels = labels[:, 1:]
    rows, columns = next_labels.ne(IGNORE_INDEX).nonzero(as_tuple=True)
    positions, targets = rows * labels.shape[1] + columns, next_labels[rows, columns]
    of_labels = positions + 1
    if parents is not None:
        positions = parents[of_labels]
    if weights is None:
        return LossTokens(positions, targets, float(len(targets)))
    of_tokens, order = weights.flatten()[of_labels].sort(stable=True)
    distinct, counts = of_tokens.unique_consecutive(return_counts=True)
    total = of_tokens.double().sum().item()
    return LossTokens(positions[order], targets[order], total, counts.tolist(), distinct)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a micro-batch as tensors, all on one device."""

    inputs: Mapping[str, Any]  # arguments of the model, other than the documents
    labels: Tensor | None  # (B, T) int64, IGNORE_INDEX without loss; None if only `loss` has them
    loss: LossTokens
    branches: Sequence[Branch] = ()  # of each sample that is not a filler
    documents: Documents | None = None  # None: each row is one, or a mask or positions name them

    @property
    def ids(self) -> Tensor:
        """The tokens (B, T)."""
        return self.inputs["input_ids"]

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a model whose hooks read documents, see `watch_documents`."""
        return {**self.inputs, **({DOCUMENTS: self.documents} if self.documents else {})}

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the batch with more arguments of the model."""
        return replace(self, inputs={**self.inputs, **inputs})

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on a device."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory: torch's data loader calls this."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        inputs, labels, loss = tree_map_only(
            Tensor, change, (dict(self.inputs), self.labels, self.loss)
        )
        documents = self.documents and self.documents.changed(change)
        return replace(self, inputs=inputs, labels=labels, loss=loss, documents=documents)
