"""Detect divergence, and select the best checkpoint: when to stop, what to keep and save.

A run diverges without NaN if its loss rises to the loss of a uniform guess and stays there.
train.metric_for_best_model defines the best checkpoint.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from sft_play.config.metrics import is_higher_better
from sft_play.config.schema import TrainSection
from sft_play.errors import ConfigError, DivergedError
from sft_play.models.sharding import trains_sharded
from sft_play.runs.report import BestCheckpoint
from sft_play.training.state import Control, State

logger = logging.getLogger(__name__)

NEAR = 0.95  # of ln(vocabulary): a model that has collapsed guesses a little better than evenly
RISE = 0.15  # of ln(vocabulary) above the lowest loss: a random model begins at ln(vocabulary)
LOGS = 3  # logged losses for which the loss must stay there,
STEPS = 10  # and steps: a single bad batch is not a divergence

LogHistory = Sequence[Mapping[str, Any]]


def metric_of(train: TrainSection) -> str:
    """Return the name in the log of the score by which checkpoints are compared."""
    return f"eval_{train.metric_for_best_model.removeprefix('eval_')}"


def best_step(log_history: LogHistory, metric: str) -> int | None:
    """Return the first step with the best score; None without an evaluation."""
    scored = scores_by_step(log_history, metric)
    if not scored:
        return None
    sign = -1 if is_higher_better(metric) else 1
    return min(scored, key=lambda step: sign * scored[step])


def evaluations_since_best(log_history: LogHistory, metric: str) -> int:
    """Return how many evaluations came after the one with the best score."""
    best = best_step(log_history, metric)
    return sum(best is not None and step > best for step in scores_by_step(log_history, metric))


def scores_by_step(log_history: LogHistory, metric: str) -> dict[int, float]:
    """Return the score of each step that was evaluated."""
    return {
        entry["step"]: entry[metric]
        for entry in log_history
        if metric in entry and math.isfinite(entry[metric])
    }


class LossWatch:
    """Follows the logged losses of a run, in nats per token.

    A run that diverges fails, unless it publishes the weights of an earlier step. In that case
    `best_step` returns the step with the best score, `diverged` is the error, and training ends.
    """

    def __init__(
        self,
        vocabulary: int,
        learning_rate: float,
        best_step: Callable[[], int | None] = lambda: None,
    ):
        self.learning_rate = learning_rate
        self.best_step = best_step
        self.uniform = math.log(vocabulary)
        self.before = math.inf  # loss of the held-out rows before training
        self.lowest = math.inf
        self.diverged: DivergedError | None = None
        self._since: int | None = None  # first step of the series that is as bad as a guess
        self._logs = 0
        self._last: list[float] = []

    def start(self, loss: float) -> str | None:
        """Record the loss before training, once; return a warning if it equals that of a guess.

        A resumed run gets the loss of the original run from `replay`.
        """
        if math.isfinite(self.before):
            return None
        self.before = loss
        self.lowest = min(self.lowest, loss)
        if loss < self.uniform:
            return None
        return (
            f"loss={loss:.4g} before training is no better than a uniform guess over the "
            f"vocabulary ({self.uniform:.4g}): see that MODEL_NAME and its tokenizer belong "
            "together, or continue if the model is to be trained from random weights"
        )

    def replay(self, log_history: LogHistory) -> None:
        """Record what the run logged before it was resumed. Raises: DivergedError."""
        for entry in log_history:
            if entry["step"] == 0 and "test_loss" in entry:
                self.start(entry["test_loss"])
            elif "loss" in entry:
                self.record(entry["step"], entry["loss"])

    def record(self, step: int, loss: float) -> None:
        """Record the loss that is logged at a step. Raises: DivergedError."""
        self.lowest = min(self.lowest, loss)
        self._last = [*self._last, loss][-LOGS:]
        if not self._is_guess(loss):
            self._since, self._logs = None, 0
            return
        if self._since is None:
            self._since = step
        self._logs += 1
        if self._logs >= LOGS and step - self._since >= STEPS:
            self.diverge(self._error(loss, f"since step {self._since}"), step)

    def finalize(self, step: int, after: float = math.nan, is_best: bool = False) -> None:
        """Check the last losses of a run, and the loss `after` of the held-out rows.

        `after` is NaN if these rows were not scored.
        Random weights may end a few steps as guesses: the held-out rows show if they have learned.
        `is_best` is True if the best weights are those that were scored and are published.
        Raises: DivergedError.
        """
        end = f"at the end, step {step}"
        if after < self.before and not (is_best or self.diverged):
            return
        if self._last and self._is_guess(median(self._last)):
            self.diverged = self.diverged or self._error(median(self._last), end)
        if self.diverged and not is_best:
            raise self.diverged
        if self._is_guess(after):
            raise self._error(after, end)
        if self.diverged and after > self.before:
            raise DivergedError(
                f"{self.diverged}; the best weights have loss={after:.4g} on the held-out rows, "
                f"where it was {self.before:.4g} before training, so they are not published either"
            )

    def diverge(self, error: DivergedError, step: int) -> None:
        """Record that the run has diverged. Raises: DivergedError if nothing else is published."""
        best = self.best_step()
        if best is not None and not self.diverged:
            logger.warning(
                "%s; training ends at step %d, and the weights of step %s are scored and published",
                error,
                step,
                best,
            )
        self.diverged = self.diverged or error
        if best is None:
            raise self.diverged

    def _is_guess(self, loss: float) -> bool:
        return loss >= max(NEAR * self.uniform, self.lowest + RISE * self.uniform)

    def _error(self, loss: float, when: str) -> DivergedError:
        return DivergedError(
            f"loss={loss:.4g} {when}, and it was {self.lowest:.4g}: as bad as a uniform guess over "
            f"the vocabulary ({self.uniform:.4g}), so the run has diverged; try "
            f"TRAIN_LEARNING_RATE={self.learning_rate / 10:g} or more TRAIN_WARMUP_STEPS"
        )


class EarlyStopping:
    """Ends training after `patience` evaluations in a row without a better score."""

    def __init__(self, metric: str, patience: int):
        self.metric = metric
        self.patience = patience

    def on_evaluate(self, state: State, control: Control, **_: Any) -> None:
        """End training after `patience` evaluations without a better score."""
        since = evaluations_since_best(state.log_history, self.metric)
        if since < self.patience:
            return
        control.should_training_stop = True
        if state.global_step < state.max_steps:
            logger.info(
                "early stopping at step %d of %d: %s was best at step %s, and %d evaluations "
                "were not better (train.early_stopping_patience=%d)",
                state.global_step,
                state.max_steps,
                self.metric,
                best_step(state.log_history, self.metric),
                since,
                self.patience,
            )

    on_train_begin = on_evaluate  # no further step if the resumed run had ended


def refuse_divided(train: TrainSection, model: torch.nn.Module) -> None:
    """Refuse to load the best weights if FSDP shards the trained weights.

    Raises: ConfigError.
    """
    if train.load_best_model_at_end and trains_sharded(model):
        raise ConfigError(
            "train.load_best_model_at_end=true: FSDP divides the trained weights, which are read "
            "only at the start; set it to false: the best checkpoint is kept anyway"
        )


def warning_of(watch: LossWatch, best: BestCheckpoint | None) -> str | None:
    """Return the warning of a run that publishes its best weights although it has diverged."""
    if watch.diverged is None or best is None:
        return None
    return (
        f"{watch.diverged}; published are the weights of step {best.step}, the best by "
        f"{best.metric}={best.value:.4g}"
    )
