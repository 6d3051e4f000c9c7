"""A micro-batch, from the collator to the loss.

Legend: B rows, T tokens per row, N labeled tokens in G groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sft_kernels.boundaries import DOCUMENTS, Documents
from sft_kernels.loss.tokens import LossTokens
from sft_kernels.trees import Branch


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
