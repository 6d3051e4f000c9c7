"""Rows to batches: the order of an epoch, and padding. The one torch module of the data room.

Legend: B rows of a micro-batch, T tokens of its longest row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, Sampler

from sft_play.data.prepare import Split
from sft_play.data.render import IGNORE_INDEX


class TrainRows(Dataset):
    """Rendered rows by index; `~index` (negative) is the same row without loss, a filler."""

    def __init__(self, split: Split):
        self.rendered = split.rendered

    def __len__(self) -> int:
        return len(self.rendered)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rendered[index if index >= 0 else ~index]
        labels = row.labels if index >= 0 else [IGNORE_INDEX] * len(row.labels)
        return {"input_ids": row.ids, "labels": labels}


class StepSampler(Sampler[list[int]]):
    """The micro-batches of an epoch in global order, so that a step trains the same rows on any number of ranks.

    Rows are shuffled by seed and epoch and cut into optimizer steps of `effective_batch` rows. The last step is filled
    up with rows that carry no loss: every rank runs equally many micro-batches and no row counts twice. Micro-batch k
    of a step belongs to rank k % world_size.
    """

    def __init__(self, rows: int, batch_size: int, effective_batch: int, seed: int):
        assert effective_batch % batch_size == 0, f"a step of {effective_batch} rows is no multiple of {batch_size}"
        self.rows, self.batch_size, self.effective_batch, self.seed = rows, batch_size, effective_batch, seed
        self.epoch = 0
        self.drop_last = False  # accelerate asks

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.rows // self.effective_batch) * (self.effective_batch // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        order = torch.randperm(self.rows, generator=generator).tolist()
        order += [~order[0]] * (-len(order) % self.effective_batch)  # fillers
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


@dataclass(frozen=True)
class PadCollator:
    """Pad rows on the right to the longest: input_ids, attention_mask and labels, each (B, T) int64.

    >>> PadCollator(0)([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])["labels"].tolist()
    [[-100, 6], [7, -100]]
    """

    pad_id: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple_of) * self.multiple_of
        return {
            "input_ids": _padded([row["input_ids"] for row in rows], self.pad_id, width),
            "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], 0, width),
            "labels": _padded([row["labels"] for row in rows], IGNORE_INDEX, width),
        }


def _padded(lists: Sequence[Sequence[int]], fill: int, width: int) -> torch.Tensor:
    out = torch.full((len(lists), width), fill, dtype=torch.int64)  # (B, T)
    for row, values in enumerate(lists):
        out[row, : len(values)] = torch.tensor(values, dtype=torch.int64)
    return out
