"""Which tokens of a batch attend to which: the type that the collator makes and attention reads.

A row is one or more documents. A token attends to the earlier tokens of its document, and tokens of
an image may attend to the whole image. A document may be a tree of samples with one beginning
(`data.trees`): a token attends to the earlier tokens of its samples.

Legend: B rows, T tokens per row, N documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sft_kernels.trees import Branch

# The keyword arguments that pass documents to transformers' models
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
DOCUMENTS = "documents"  # the keyword argument that passes them to ours, `watch_documents`
ImageBlock = tuple[int, int, int]  # its start and end, its document's start, in flattened rows


class TreeRows(NamedTuple):
    """Trees in flattened rows: facts about each token, (B * T,) int32.

    Token i attends to token j if j <= i < ends[j]; positions count in a token's samples.
    """

    positions: Tensor
    ends: Tensor
    branches: Sequence[Branch] = ()  # of all rows, padding included


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin in a batch's flattened rows, and cached indices computed from it."""

    boundaries: Tensor  # (N + 1,) int32, the cu_seq_lens of flash attention
    longest: int  # tokens of the longest document, at least
    given_lengths: Sequence[int] | None = None  # tokens per document, if they are on the CPU
    image_blocks: Sequence[ImageBlock] = ()
    context: Any = None  # `ContextGroup` of the ranks that share each row's tokens
    tree: TreeRows | None = None  # None: no document is a tree of several samples
    # By the mask that attention gets: the tokens that image tokens attend to, as `ImageRows`
    image_rows: dict[Tensor, Any] = field(default_factory=dict)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], blocks: Sequence[ImageBlock] = ()) -> Self:
        """Return documents of so many tokens each, one after another."""
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(boundaries, max(lengths), lengths, blocks)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that pass the documents to transformers' models."""
        values = (self.boundaries, self.boundaries, self.longest, self.longest)
        return dict(zip(BOUNDARIES, values, strict=True))

    def as_trees(self, positions: Tensor, ends: Tensor, branches: Sequence[Branch]) -> Self:
        """Return the documents as trees; the first two are (B * T,), of `trees.lay_out`."""
        tree = TreeRows(positions.int(), ends.int(), branches)
        return replace(self, longest=int(positions.max()) + 1, tree=tree)

    def on(self, device: torch.device) -> Self:
        """Return the same documents for modules on a device; they are copied there once."""
        if self.boundaries.device == device:
            return self
        if device not in self._elsewhere:
            moved = self.changed(lambda tensor: tensor.to(device))
            self._elsewhere[device] = replace(moved, given_lengths=self.lengths)
        return self._elsewhere[device]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the documents with changed tensors, e.g. on another device."""
        tree = self.tree
        if tree is not None:
            tree = tree._replace(positions=change(tree.positions), ends=change(tree.ends))
        return replace(self, boundaries=change(self.boundaries), tree=tree)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of each document; waits for the GPU if the batch lacks the lengths."""
        if self.given_lengths is not None:
            return list(self.given_lengths)
        return self.boundaries.diff().tolist()

    @cached_property
    def indices(self) -> dict[Any, Any]:
        """What kernels have computed from the boundaries, by their keys."""
        return {}

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Self]:
        return {}
