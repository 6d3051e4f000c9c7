"""The part of a micro-batch that a rank computes where several ranks share each row.

The batch is collated whole, and cut: part r of c has tokens r T / c to (r + 1) T / c of every row.
Boundaries of documents stay those of whole rows. Every labelled token belongs to one part: that of
the token which predicts it, so a document's labels may be on other ranks than its tokens.

Legend: B rows of a micro-batch, T tokens of a row, c parts, N labelled tokens.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from sft_play.data.collate import Batch
from sft_play.training.batches import (
    LOSS_GROUPS,
    LOSS_POSITIONS,
    LOSS_TARGETS,
    REAL_LENGTHS,
    WeightGroups,
)

PADDED = ("input_ids", "position_ids")  # (B, T) each
UNUSED = ("attention_mask", "labels")  # boundaries and labelled tokens stand for them
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class RowPart:
    """Cuts the `rank`-th of `size` parts out of every row."""

    rank: int
    size: int

    def __call__(self, batch: Batch) -> Batch:
        """Return this part of a batch of `collate_for_step`."""
        found = self.cut(batch)
        if self.rank:
            found[REAL_LENGTHS] = []  # they count once
        width, tokens = batch["input_ids"].shape[1], found["input_ids"].shape[1]
        return found | self._labelled(batch, width, tokens)

    def cut(self, batch: Batch) -> Batch:
        """Return this part of a batch's tokens.

        Rows are padded to a multiple of `size`, as part of their last document. A batch without
        boundaries has padded rows of one document each, and gets boundaries and positions.
        """
        rows, width = batch["input_ids"].shape
        padding = -width % self.size
        tokens = (width + padding) // self.size
        found = {name: value for name, value in batch.items() if name not in UNUSED}
        if BOUNDARIES[0] not in batch:
            found["position_ids"] = torch.arange(width).expand(rows, width)
            found |= dict.fromkeys(BOUNDARIES, torch.arange(0, (rows + 1) * width, width).int())
            found |= {"max_length_q": width, "max_length_k": width}
        for name in PADDED:
            whole = functional.pad(found[name], (0, padding))
            found[name] = whole.unflatten(1, (self.size, tokens))[:, self.rank].contiguous()
        for name in BOUNDARIES:
            found[name] = found[name] + padding * (found[name] // width)
        for name in ("max_length_q", "max_length_k"):
            found[name] += padding
        return found

    def _labelled(self, batch: Batch, width: int, tokens: int) -> Batch:
        """Return the labelled tokens whose predictions are in this part, and their weights."""
        positions = batch[LOSS_POSITIONS]
        rows, columns = positions // width, positions % width - self.rank * tokens
        is_here = (columns >= 0) & (columns < tokens)
        found: Batch = {
            LOSS_POSITIONS: (rows * tokens + columns)[is_here],
            LOSS_TARGETS: batch[LOSS_TARGETS][is_here],
        }
        if LOSS_GROUPS in batch:
            groups: WeightGroups = batch[LOSS_GROUPS]
            counts = torch.stack([each.sum() for each in is_here.split(groups.counts)])
            total = (groups.weights.double() @ counts.double()).item()
            found[LOSS_GROUPS] = WeightGroups(groups.weights, counts.tolist(), total)
        return found
