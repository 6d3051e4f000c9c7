"""The state of the training loop, and what is requested of it. Must not import transformers.

The fields have the names of transformers' TrainerState and TrainerControl (training.events).
"""

from dataclasses import dataclass, field
from typing import Any

from sft_play.config.schema import TrainSection


@dataclass
class State:
    """How far training is."""

    global_step: int = 0  # optimizer steps so far
    max_steps: int = 0
    epoch: float = 0  # passes over the training rows so far
    num_train_epochs: int = 0
    logging_steps: int = 1  # between two logs
    log_history: list[dict[str, Any]] = field(default_factory=list)
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)  # what guards save, by name


@dataclass
class Control:
    """What callbacks and settings request."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def stop_training(self) -> None:
        """Request to end training after this step, without the actions at the end of an epoch."""
        self.should_training_stop = self.should_epoch_stop = True

    def request_scheduled(self, state: State, train: TrainSection) -> None:
        """Request what the settings schedule after a step. The last step does all of it."""
        step = state.global_step
        is_last = step >= state.max_steps
        logs_first = train.logging_steps == "auto" or state.max_steps < state.logging_steps
        self.should_training_stop |= is_last
        self.should_log |= is_last or step % state.logging_steps == 0 or (step == 1 and logs_first)
        evaluates, saves = train.eval_strategy == "steps", train.save_strategy == "steps"
        self.should_evaluate |= evaluates and (is_last or step % train.eval_steps == 0)
        self.should_save |= saves and (is_last or step % train.save_steps == 0)
