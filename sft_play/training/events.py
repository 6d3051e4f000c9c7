"""Report the events of a run to its callbacks in order.

They have transformers' API: a callback gets the arguments, state and control, and the model,
optimizer, schedule and data loader by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Details of a log besides the logged values: `details` of `on_log`."""

    by_rank: dict[str, float] = field(default_factory=dict)  # of a loss, by TensorBoard's names
    gpus: tuple[GpuSample, ...] = ()  # of all machines, of a loss
    answers: tuple[SampleAnswer, ...] = ()  # some of an evaluation, on the main rank
    rows: str = ""  # the split of these answers


NO_DETAILS = LogDetails()


SAMPLES = 3


def sample_answers(
    questions: Sequence[Question], scores: GenerationScores
) -> tuple[SampleAnswer, ...]:
    """Return up to three answers, spread over the set, each with its question."""
    count = len(scores.answers)
    chosen = sorted({i * count // SAMPLES for i in range(SAMPLES)})
    pairs = ((questions[index], scores.answers[index].text) for index in chosen)
    return tuple(SampleAnswer(row.plain_prompt, row.expected, answer) for row, answer in pairs)


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
        """Report an event; `control` contains what callbacks request."""
        report = getattr(self.handler, event)
        self.control = report(self.arguments, self.state, self.control, **values)


def stop_training(control: TrainerControl) -> None:
    """Request to end training after this step, without the actions at the end of an epoch."""
    control.should_training_stop = True
    control.should_epoch_stop = True
