"""Report the events of a run to its callbacks in order: ours, trackers and users' callbacks.

Trackers and users' callbacks are transformers' TrainerCallbacks. Only this module converts the
state of the loop for them, and for trainer_state.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.data.order import StepSampler
from sft_play.evaluation.scores import GenerationScores, Question
from sft_play.runs.metrics import GpuSample, SampleAnswer
from sft_play.training.engine import Engine
from sft_play.training.state import Control, State


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
    """The callbacks of a run, with the state that they read and the control that they set.

    A callback has methods with the names of transformers' events, such as
    `on_step_end(state, control)`; `on_log` also gets `logs` and `details`, and `on_evaluate` gets
    `metrics`. A TrainerCallback gets what transformers' Trainer would pass.
    """

    def __init__(self, engine: Engine, order: StepSampler):
        self.engine = engine
        self.order = order
        self.callbacks: list[Any] = []
        self.state = State()
        self.control = Control()
        self.loader: DataLoader | None = None  # of the training rows
        # one of each: a TrainerCallback may keep them
        self._trainer_state = TrainerState(total_flos=0.0)
        self._trainer_control = TrainerControl()

    def start(self, state: State, loader: DataLoader) -> None:
        """Report this state and this loader from now on."""
        state.stateful_callbacks.setdefault(TrainerControl.__name__, self._trainer_control.state())
        self.state = state
        self.loader = loader

    def add(self, *callbacks: Any) -> None:
        """Report to these callbacks, after those that were added before."""
        self.callbacks += callbacks

    def call(self, event: str, **values: Any) -> None:
        """Report an event; `control` contains what callbacks request."""
        for callback in self.callbacks:
            if isinstance(callback, TrainerCallback):
                self._call_as_trainer(getattr(callback, event), values)
            elif hasattr(callback, event):
                getattr(callback, event)(self.state, self.control, **values)

    def write_state(self, path: Path) -> None:
        """Write trainer_state.json, which transformers' Trainer can read, too."""
        self._convert_state()
        requests = self._trainer_control.state()
        self.state.stateful_callbacks[TrainerControl.__name__] = requests
        self._trainer_state.save_to_json(str(path))

    def _call_as_trainer(self, report: Callable[..., Any], values: dict[str, Any]) -> None:
        """Call a method of a TrainerCallback as transformers' Trainer does."""
        engine, control = self.engine, self._trainer_control
        self._convert_state()
        returned = report(
            engine.args,
            self._trainer_state,
            control,
            model=engine.model,
            processing_class=engine.tokenizer,
            optimizer=engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            train_dataloader=self.loader,
            eval_dataloader=None,
            **values,
        )
        vars(self.control).update(vars(returned or control))

    def _convert_state(self) -> None:
        """Copy layout, state and control to transformers' objects."""
        args, process, layout = self.engine.args, self.engine.process, self.order.layout
        args.gradient_accumulation_steps = layout.micro_batches
        args.per_device_train_batch_size = layout.batch_size
        vars(self._trainer_control).update(vars(self.control))
        vars(self._trainer_state).update(
            vars(self.state),
            eval_steps=args.eval_steps or TrainerState.eval_steps,
            save_steps=args.save_steps,
            train_batch_size=layout.batch_size,
            is_local_process_zero=process.local_rank == 0,
            is_world_process_zero=process.is_main,
        )
