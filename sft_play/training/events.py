"""Report the events of a run to its callbacks in order.

Events of transformers have its API: a callback gets the arguments, state and control, and the
model, optimizer, schedule and data loader by name. `Observer` has the events that it lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from sft_play.evaluation.scores import GenerationScores, Question
from sft_play.runs.metrics import GpuSample, SampleAnswer


@dataclass(frozen=True)
class LogDetails:
    """Details of a logged loss besides the logged values: `details` of `on_log`."""

    by_rank: dict[str, float]  # by the names of TensorBoard
    gpus: tuple[GpuSample, ...]  # of all machines


SAMPLES = 3


def sample_answers(questions: Sequence[Question], scores: GenerationScores) -> list[SampleAnswer]:
    """Return up to three answers, spread over the set, each with its question."""
    count = len(scores.answers)
    chosen = sorted({i * count // SAMPLES for i in range(SAMPLES)})
    pairs = ((questions[index], scores.answers[index].text) for index in chosen)
    return [SampleAnswer(row.plain_prompt, row.expected, answer) for row, answer in pairs]


class Observer(TrainerCallback):
    """A callback that also gets the events that transformers lacks."""

    def on_fetch(self) -> None:
        """Called before the rows of each step are read."""

    def on_answers(self, rows: str, answers: Sequence[SampleAnswer], step: int) -> None:
        """Called on the main rank after an evaluation; `rows` names the split."""


class Events:
    """The callbacks of a run, with the state that they read and the control that they set."""

    def __init__(
        self,
        arguments: TrainingArguments,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.arguments = arguments
        self.control = TrainerControl()
        self.state = TrainerState()
        self.handler = CallbackHandler([DefaultFlowCallback()], model, tokenizer, None, None)

    def add(self, *callbacks: TrainerCallback) -> None:
        """Report to these callbacks, after those that were added before."""
        self.handler.callbacks += callbacks

    def call(self, event: str, **values: Any) -> None:
        """Report an event of transformers' API; `control` contains what callbacks request."""
        report = getattr(self.handler, event)
        self.control = report(self.arguments, self.state, self.control, **values)

    def tell(self, event: str, *values: Any) -> None:
        """Report an event of `Observer`."""
        for callback in self.handler.callbacks:
            if isinstance(callback, Observer):
                getattr(callback, event)(*values)


def stop_training(control: TrainerControl) -> None:
    """Request to end training after this step, without the actions at the end of an epoch."""
    control.should_training_stop = True
    control.should_epoch_stop = True
