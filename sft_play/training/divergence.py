"""Divergence without NaN: a loss that rises to that of a uniform guess, and stays there. Pure."""

import math
from statistics import median

from sft_play.errors import DivergedError

NEAR = 0.95  # of ln(vocabulary): a model that has collapsed guesses a little better than evenly
RISE = 0.15  # of ln(vocabulary) above the lowest loss: a random model begins at ln(vocabulary)
LOGS = 3  # that a loss must stay there,
STEPS = 10  # and steps: a single bad batch is no divergence


class LossWatch:
    """Follows the logged losses of a run, in nats a token."""

    def __init__(self, vocabulary: int, learning_rate: float):
        self.learning_rate = learning_rate
        self.uniform = math.log(vocabulary)
        self.lowest = math.inf
        self._since: int | None = None  # the first step of those that are as bad as a guess
        self._logs = 0
        self._last: list[float] = []

    def begin(self, loss: float) -> None:
        """Note the loss of the model before training."""
        self.lowest = min(self.lowest, loss)

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
            raise DivergedError(self._cause(loss, f"since step {self._since}"))

    def conclude(self, step: int, after: float | None = None) -> None:
        """Look at the losses that a run has ended with, and at that of the held-out rows `after`.

        Raises: DivergedError.
        """
        ends = [median(self._last)] if self._last else []
        if after is not None:
            ends.append(after)
        for loss in ends:
            if self._is_guess(loss):
                raise DivergedError(self._cause(loss, f"at the end, step {step}"))

    def _is_guess(self, loss: float) -> bool:
        return loss >= max(NEAR * self.uniform, self.lowest + RISE * self.uniform)

    def _cause(self, loss: float, when: str) -> str:
        return (
            f"loss={loss:.4g} {when}, and it was {self.lowest:.4g}: as bad as a uniform guess over "
            f"the vocabulary ({self.uniform:.4g}), so the run has diverged; try "
            f"TRAIN_LEARNING_RATE={self.learning_rate / 10:g} or more TRAIN_WARMUP_STEPS"
        )
