"""Divergence without NaN: a loss that rises to that of a uniform guess, and stays there. Pure."""

import math
from collections.abc import Callable
from statistics import median

from sft_play.errors import DivergedError

NEAR = 0.95  # of ln(vocabulary): a model that has collapsed guesses a little better than evenly
RISE = 0.15  # of ln(vocabulary) above the lowest loss: a random model begins at ln(vocabulary)
LOGS = 3  # that a loss must stay there,
STEPS = 10  # and steps: a single bad batch is no divergence


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
