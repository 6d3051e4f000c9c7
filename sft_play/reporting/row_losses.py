"""The loss of each test row, before and after training. Reads eval/; loads no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.reporting import bootstrap
from sft_play.reporting.bootstrap import Estimate
from sft_play.runs.folder import RunFolder


@dataclass(frozen=True)
class RowLoss:
    """A line of eval/before.losses.jsonl or eval/after.losses.jsonl."""

    origin: str  # file:line of the row
    nats: float  # of all its tokens with loss
    tokens: int  # that have a loss


def read_losses(folder: RunFolder, when: str) -> list[RowLoss]:
    """Return eval/<when>.losses.jsonl in order; nothing where there is no such file."""
    path = folder.evaluation / f"{when}.losses.jsonl"
    if not path.exists():
        return []
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [RowLoss(row["origin"], row["nats"], row["tokens"]) for row in values]


def are_same_rows(before: Sequence[RowLoss], after: Sequence[RowLoss]) -> bool:
    """Return whether two lists are of the same rows, cut into the same number of tokens."""
    rows = [(row.origin, row.tokens) for row in before]
    return rows == [(row.origin, row.tokens) for row in after]


def loss_estimate(rows: Sequence[RowLoss]) -> Estimate:
    """Return the loss per token of rows, with its interval over the rows."""
    scored = [row for row in rows if row.tokens]
    losses = [row.nats / row.tokens for row in scored]
    return bootstrap.estimate(losses, [row.tokens for row in scored])


def loss_difference(before: Sequence[RowLoss], after: Sequence[RowLoss]) -> Estimate | None:
    """Return how much the loss per token rose, None where the rows are not the same."""
    if not before or not are_same_rows(before, after):
        return None
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].tokens]
    early = [row.nats / row.tokens for row, _ in pairs]
    late = [row.nats / row.tokens for _, row in pairs]
    return bootstrap.paired_difference(early, late, [row.tokens for row, _ in pairs])
