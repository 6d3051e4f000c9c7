"""Divergence, and the best checkpoint: when to end, what is kept, what is saved.

A run diverges without NaN where its loss rises to that of a uniform guess, and stays there. The
best checkpoint is that by train.metric_for_best_model.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from transformers import TrainerCallback
from transformers.integrations import deepspeed_load_checkpoint

from sft_play.config.metrics import is_higher_better
from sft_play.config.schema import TrainSection
from sft_play.errors import ConfigError, DivergedError
from sft_play.models.sharding import trains_divided
from sft_play.runs import seal

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

NEAR = 0.95  # of ln(vocabulary): a model that has collapsed guesses a little better than evenly
RISE = 0.15  # of ln(vocabulary) above the lowest loss: a random model begins at ln(vocabulary)
LOGS = 3  # that a loss must stay there,
STEPS = 10  # and steps: a single bad batch is no divergence

LogHistory = Sequence[Mapping[str, Any]]


def metric_of(train: TrainSection) -> str:
    """Return the name in the log of the score by which checkpoints are compared."""
    return f"eval_{train.metric_for_best_model.removeprefix('eval_')}"


def best_step(log_history: LogHistory, metric: str) -> int | None:
    """Return the first step with the best score; None without an evaluation."""
    scored = _scored(log_history, metric)
    if not scored:
        return None
    sign = -1 if is_higher_better(metric) else 1
    return min(scored, key=lambda step: sign * scored[step])


def evaluations_since_best(log_history: LogHistory, metric: str) -> int:
    """Return how many evaluations came after the one with the best score."""
    best = best_step(log_history, metric)
    return sum(best is not None and step > best for step in _scored(log_history, metric))


def _scored(log_history: LogHistory, metric: str) -> dict[int, float]:
    """Return the score of each step that was evaluated."""
    return {
        entry["step"]: entry[metric]
        for entry in log_history
        if metric in entry and math.isfinite(entry[metric])
    }


class LossWatch:
    """Follows the logged losses of a run, in nats a token.

    A run that diverges fails, unless it publishes the weights of an earlier step: `has_best` says
    whether there are some that were scored. Then `diverged` is the error, and training is to end.
    """

    def __init__(
        self,
        vocabulary: int,
        learning_rate: float,
        has_best: Callable[[], bool] = lambda: False,
    ):
        self.learning_rate = learning_rate
        self.has_best = has_best
        self.uniform = math.log(vocabulary)
        self.before = math.inf  # of the held-out rows, before training
        self.lowest = math.inf
        self.diverged: DivergedError | None = None
        self._since: int | None = None  # the first step of those that are as bad as a guess
        self._logs = 0
        self._last: list[float] = []

    def begin(self, loss: float) -> str | None:
        """Note the loss of the model before training; return a warning where it is a guess."""
        self.before = loss
        self.lowest = min(self.lowest, loss)
        if loss < self.uniform:
            return None
        return (
            f"loss={loss:.4g} before training is no better than a uniform guess over the "
            f"vocabulary ({self.uniform:.4g}): see that MODEL_NAME and its tokenizer belong "
            "together, or go on if the model is to be trained from random weights"
        )

    def see(self, step: int, loss: float) -> None:
        """Note the loss that is logged at a step. Raises: DivergedError."""
        self.lowest = min(self.lowest, loss)
        self._last = [*self._last, loss][-LOGS:]
        if not self._is_guess(loss):
            self._since, self._logs = None, 0
            return
        self._since = step if self._since is None else self._since
        self._logs += 1
        if self._logs >= LOGS and step - self._since >= STEPS:
            self.diverge(self._error(loss, f"since step {self._since}"))

    def conclude(self, step: int, after: float | None = None, is_best: bool = False) -> None:
        """Look at the losses that a run has ended with, and at that of the held-out rows `after`.

        `is_best` says that the best weights are those that were scored, and are published.
        Raises: DivergedError.
        """
        end = f"at the end, step {step}"
        if self._last and self._is_guess(median(self._last)):
            self.diverge(self._error(median(self._last), end))
        if self.diverged is not None and not is_best:
            raise self.diverged
        if after is not None and self._is_guess(after):
            raise self._error(after, end)
        if self.diverged is not None and after is not None and after > self.before:
            raise DivergedError(
                f"{self.diverged}; the best weights have loss={after:.4g} on the held-out rows, "
                f"where it was {self.before:.4g} before training, so they are not published either"
            )

    def diverge(self, error: DivergedError) -> None:
        """Note that the run has diverged. Raises: DivergedError where nothing else is published."""
        self.diverged = self.diverged or error
        if not self.has_best():
            raise self.diverged

    def _is_guess(self, loss: float) -> bool:
        return loss >= max(NEAR * self.uniform, self.lowest + RISE * self.uniform)

    def _error(self, loss: float, when: str) -> DivergedError:
        return DivergedError(
            f"loss={loss:.4g} {when}, and it was {self.lowest:.4g}: as bad as a uniform guess over "
            f"the vocabulary ({self.uniform:.4g}), so the run has diverged; try "
            f"TRAIN_LEARNING_RATE={self.learning_rate / 10:g} or more TRAIN_WARMUP_STEPS"
        )


class EarlyStopping(TrainerCallback):
    """Ends training after `patience` evaluations in a row without a better score."""

    def __init__(self, metric: str, patience: int, is_main: bool = True):
        self.metric = metric
        self.patience = patience
        self.is_main = is_main

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take no step more where the run had ended before it was resumed."""
        self._end_without_better(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End training after `patience` evaluations without a better score."""
        self._end_without_better(state, control)

    def _end_without_better(self, state: Any, control: Any) -> None:
        since = evaluations_since_best(state.log_history, self.metric)
        if since < self.patience:
            return
        control.should_training_stop = True
        if self.is_main and state.global_step < state.max_steps:
            logger.info(
                "early stopping at step %d of %d: %s was best at step %s, and %d evaluations "
                "were not better (train.early_stopping_patience=%d)",
                *(state.global_step, state.max_steps, self.metric),
                *(best_step(state.log_history, self.metric), since, self.patience),
            )


class EndDiverged(TrainerCallback):
    """Ends training once the loss has diverged, where the best checkpoint is published instead."""

    def __init__(self, watch: LossWatch, metric: str, is_main: bool = True):
        self.watch = watch
        self.metric = metric
        self.is_main = is_main
        self.has_ended = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch.diverged is not None:
            self.end(state, control)

    def end(self, state: Any, control: Any) -> None:
        """Say it, and let no step follow."""
        if self.is_main and not self.has_ended:
            logger.warning(
                "%s; training ends at step %d, and the weights of step %s are scored and published",
                *(self.watch.diverged, state.global_step),
                best_step(state.log_history, self.metric),
            )
        self.has_ended = True
        control.should_training_stop = True
        self._keep_nothing_more(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_ended:  # Trainer also ends the epoch that was cut short
            self._keep_nothing_more(control)

    def _keep_nothing_more(self, control: Any) -> None:
        control.should_evaluate = False
        control.should_save = False


def goes_on(trainer: "SftTrainer", look: Callable[[float], None]) -> bool:
    """Let the guard `look` at the steps so far; return whether training goes on.

    Raises: DivergedError, on every rank, unless the best weights are published instead.
    """
    try:
        look(trainer.args.learning_rate)
    except DivergedError as error:
        trainer.loss_watch.diverge(error)
        trainer.end_diverged.end(trainer.state, trainer.control)
    return trainer.end_diverged is None or not trainer.end_diverged.has_ended


def refuse_divided(train: TrainSection, model: torch.nn.Module) -> None:
    """Refuse to take the best weights where FSDP divides those that train.

    Raises: ConfigError.
    """
    if train.load_best_model_at_end and trains_divided(model):
        raise ConfigError(
            "train.load_best_model_at_end=true: FSDP divides the trained weights, which are read "
            "at the start alone; set it to false: the best checkpoint is kept, too"
        )


def warning_of(watch: LossWatch, best: Mapping[str, Any] | None) -> str | None:
    """Return what a run has to say that publishes its best weights though it has diverged."""
    if watch.diverged is None or best is None:
        return None
    return (
        f"{watch.diverged}; published are the weights of step {best['step']}, the best by "
        f"{best['metric']}={best['value']:.4g}"
    )


def take_best(trainer: "SftTrainer", train: TrainSection) -> dict[str, Any] | None:
    """Put the weights of the best checkpoint into the model, and return which one it is.

    None where that is not asked for, or no checkpoint was scored. Every rank must call it.
    """
    metric = metric_of(train)
    history = trainer.state.log_history
    step = best_step(history, metric)
    if not train.load_best_model_at_end or step is None:
        return None
    found = {"step": step, "metric": metric, "value": _scored(history, metric)[step]}
    if step == trainer.state.global_step:
        return found
    checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    damage = seal.find_damage(checkpoint) if trainer.process.local_rank == 0 else None
    if trainer.process.max(int(damage is not None)):
        if damage is not None:
            logger.warning(
                "%s: %s; the weights of the last step are saved, not the best", checkpoint, damage
            )
        return None
    if trainer.is_deepspeed_enabled:
        has_adapters = isinstance(trainer.model, PeftModel)
        deepspeed_load_checkpoint(
            trainer.model_wrapped, str(checkpoint), load_module_strict=not has_adapters
        )
    else:
        trainer._load_from_checkpoint(str(checkpoint))
    if trainer.process.is_main:
        logger.info(
            "best step=%d %s=%.4f: its weights are scored and saved, not those of step %d",
            *(step, metric, found["value"], trainer.state.global_step),
        )
    return found
