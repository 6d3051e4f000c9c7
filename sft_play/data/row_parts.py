"""The part of a batch that a rank computes where several ranks share each row.

The batch is collated whole, and cut: part r of c has tokens r T / c to (r + 1) T / c of every row.
Boundaries of documents stay those of whole rows. Every labelled token belongs to one part: that of
the token which predicts it, so a document's labels may be on other ranks than its tokens.

Legend: B rows of a batch, T tokens of a row, c parts, N labelled tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sft_play.data.collate import Batch

CUT = ("input_ids", "position_ids")  # (B, T) each
UNUSED = ("attention_mask", "labels")  # boundaries and labelled tokens stand for them
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class RowPart:
    """Cuts the `rank`-th of `size` parts out of every row."""

    rank: int
    size: int

    def tokens(self, width: int) -> int:
        """Return the tokens of a part of rows of `width` tokens."""
        return -(-width // self.size)

    def cut(self, batch: Batch) -> Batch:
        """Return this part of a collated batch; what is neither cut nor unused stays.

        Rows are padded to a multiple of `size`, as part of their last document. A batch without
        boundaries has padded rows of one document each, and gets boundaries and positions.
        """
        rows, width = batch["input_ids"].shape
        padding = self.size * self.tokens(width) - width
        found = {name: value for name, value in batch.items() if name not in UNUSED}
        if BOUNDARIES[0] not in batch:
            found["position_ids"] = torch.arange(width).expand(rows, width)
            found |= dict.fromkeys(BOUNDARIES, torch.arange(0, (rows + 1) * width, width).int())
            found |= {"max_length_q": width, "max_length_k": width}
        for name in CUT:
            whole = functional.pad(found[name], (0, padding))
            found[name] = whole.unflatten(1, (self.size, -1))[:, self.rank].contiguous()
        for name in BOUNDARIES:
            found[name] = found[name] + padding * (found[name] // width)
        for name in ("max_length_q", "max_length_k"):
            found[name] += padding
        return found

    def own(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return which of positions (N,) in rows of `width` tokens are here, and where (own,)."""
        tokens = self.tokens(width)
        rows, columns = positions // width, positions % width - self.rank * tokens
        is_here = (columns >= 0) & (columns < tokens)
        return is_here, (rows * tokens + columns)[is_here]
