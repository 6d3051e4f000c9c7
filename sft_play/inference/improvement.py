"""The share of a run's improvement that exported weights keep, from losses of the same rows.

Legend: R rows. A table (R, 4) has the nats of each row's labels before and after training, the
number of labels, and their nats with the exported weights.
"""

import contextlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from sft_play.config.schema import Config
from sft_play.data.splits import drawn
from sft_play.data.store import Sample, Split
from sft_play.errors import CheckpointError
from sft_play.evaluation.plain import scored
from sft_play.evaluation.reference import Reference, make_reference
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.load import TrainedModel, load_run, without_rounding
from sft_play.reporting.answers import read_row_losses
from sft_play.runs.folder import RunFolder

LEAST_NATS = 0.02  # a smaller improvement cannot be distinguished from noise
MOST_TOKENS = 16_384  # of all scored rows: a CPU needs minutes for them with 8B
MOST_ROW_TOKENS = 1024
DRAWS = 1000  # of rows, for the interval


@dataclass(frozen=True)
class Losses:
    """Losses of exported weights, the run and its base on the same rows, in nats per token."""

    eval_loss: float
    run_loss: float
    loss_before: float  # of the base
    rows: int

    @classmethod
    def of_table(cls, table: np.ndarray) -> "Losses":
        """Return the losses over all rows of a table (R, 4)."""
        before, after, labels, found = table.sum(0).tolist()
        return cls(found / labels, after / labels, before / labels, len(table))

    @property
    def lost(self) -> float:
        """The exported weights' loss minus the run's loss, in nats per token."""
        return self.eval_loss - self.run_loss

    @property
    def gain(self) -> float:
        """The run's improvement over its base, in nats per token."""
        return self.loss_before - self.run_loss

    @property
    def gain_kept(self) -> float:
        """The share of the improvement that is kept; NaN if there was no significant one."""
        kept = self.loss_before - self.eval_loss
        return kept / self.gain if self.gain > LEAST_NATS else math.nan

    def kept(self) -> str:
        """Return how much of the improvement is kept, for a remedy."""
        return f"keeps {self.gain_kept:.3f} of the improvement"

    @property
    def is_below_base(self) -> bool:
        """Return whether the run is better than its base, and the exported weights are worse."""
        return self.eval_loss > self.loss_before > self.run_loss

    def __str__(self) -> str:
        base = f", and the base has {self.loss_before:.3f}" if self.is_below_base else ""
        found = f"eval_loss {self.eval_loss:.3f} instead of {self.run_loss:.3f}"
        return f"{found}{base} ({self.rows} rows)"

    def line(self) -> str:
        """Return the line to print for these losses."""
        return (
            f"eval_loss={self.eval_loss:.4f} (run {self.run_loss:.4f}, {self.rows} rows) "
            f"gain kept={self.gain_kept:.3f}"
        )

    def faults(self, least_gain: float) -> list[str]:
        """Return the loss of quality, if less than a share of the improvement is kept."""
        kept = self.gain_kept
        if self.lost <= LEAST_NATS if math.isnan(kept) else kept >= least_gain:
            return []
        if self.is_below_base:
            return [f"worse than the base: {self}"]
        if math.isnan(kept):
            return [str(self)]
        lost, allowed = (f"{100 * (1 - share):.3g} %" for share in (kept, least_gain))
        return [f"it loses {lost} of the improvement, more than {allowed}: {self}"]


def read_scored_rows(folder: RunFolder, split: Split) -> tuple[list[Sample], np.ndarray] | None:
    """Return scored test rows and three columns of their table; None if they are missing.

    These are the first rows that are not too long, MOST_TOKENS in total; at least one row.
    """
    before, after = (read_row_losses(folder, when) for when in ("before", "after"))
    if not 0 < len(before) == len(after) <= len(split):
        return None
    scored = split.take(drawn(np.arange(len(split)), len(before)))
    chosen: list[int] = []
    total = 0
    for index, length in enumerate(map(int, scored.lengths)):
        if length <= MOST_ROW_TOKENS and total + length <= MOST_TOKENS:
            chosen.append(index)
            total += length
    chosen = chosen or [0]
    rows = [(before[index].nats, after[index].nats, after[index].tokens) for index in chosen]
    return [scored[index] for index in chosen], np.array(rows)


def interval(table: np.ndarray) -> tuple[float, float]:
    """Return the middle 95 % of the kept share, over draws of as many rows with replacement."""
    drawn = np.random.default_rng(0).integers(len(table), size=(DRAWS, len(table)))
    shares = [Losses.of_table(table[rows]).gain_kept for rows in drawn]
    low, high = np.nanquantile(shares, [0.025, 0.975])
    return float(low), float(high)


def reference_of(folder: RunFolder, config: Config) -> Reference:
    """Return the run model's outputs for its test rows, computed if they were not written."""
    written = Reference.read(folder.evaluation)
    if written is not None:
        return written
    trained = trained_model(folder, config)
    split = prepared_data(folder, config, trained.tokenizer).test
    system = config.data.system_prompt
    reference = make_reference(
        trained.model, split, trained.tokenizer, trained.process, system, trained.images
    )
    if reference is None:
        raise CheckpointError(
            f"{folder.path}: no test row has an answer among its first tokens, so a merge cannot "
            "be measured; set DATA_TEST_PATH to rows with shorter prompts"
        )
    reference.write(folder.evaluation)
    return reference


def trained_model(folder: RunFolder, config: Config) -> TrainedModel:
    """Return the run's model, with its saved weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_run(folder, device, without_rounding(config))


def losses_now(folder: RunFolder, rows: int) -> tuple[float, float]:
    """Return the current losses of the adapter and of its base on rows of the reference.

    These are the first `rows` rows; in nats per token.
    """
    config = folder.read_config()
    trained = trained_model(folder, config)
    chosen = reference_of(folder, config).shortened(rows).rows
    losses = []
    for context in (contextlib.nullcontext, trained.model.disable_adapter):
        with torch.no_grad(), trained.process.autocast(), context():
            outputs = scored(trained.model, chosen, trained.process.device)
        losses.append(outputs.nats.mean().item())
    return losses[0], losses[1]
