"""The training loop: the actions of a run, in their order.

`TrainingLoop` combines an engine, a loss, the order of the rows, guards and a log. It reports
events to callbacks through `events`.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import skip_first_batches
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer import align_special_tokens
from transformers.trainer_utils import speed_metrics

from sft_play import stops
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.order import StepSampler
from sft_play.errors import CheckpointError, DivergedError
from sft_play.evaluation.evaluator import EvaluationStopped, Evaluator, Scores
from sft_play.runs import stamp
from sft_play.runs.checkpoints import TRAINER_STATE
from sft_play.runs.files import read_json
from sft_play.training.arguments import LOGGING_STEPS
from sft_play.training.batches import StepLoss, collate_for_step
from sft_play.training.best import LossWatch
from sft_play.training.checkpoints import (
    checkpoint_folder,
    dtypes_of,
    load_optimizer,
    load_random_state,
    load_trained_weights,
    save_checkpoint,
)
from sft_play.training.engine import Engine
from sft_play.training.events import NO_DETAILS, Events, LogDetails, sample_answers
from sft_play.training.experts import ExpertUse
from sft_play.training.guards import GUARDS, GradientWatch, StepGuard, WeightChangeCheck
from sft_play.training.state import Control, State
from sft_play.training.step_log import StepLog

LEAST_LOGS = 20  # of a run, unless it has fewer steps


def report_nothing(folder: Path) -> None:
    """Ignore a checkpoint."""


@dataclass
class TrainingLoop:
    """A loop whose steps train the same rows on any number of ranks. NaN raises an error."""

    engine: Engine
    loss: StepLoss
    rows: TrainRows
    collator: PackCollator | PadCollator
    order: StepSampler
    evaluator: Evaluator
    step_log: StepLog
    guard: StepGuard
    gradients: GradientWatch
    loss_watch: LossWatch
    events: Events
    stamp: stamp.Stamp
    best_metric: str = "eval_loss"  # the checkpoint with the best value is never removed
    expert_use: ExpertUse | None = None  # counts from the first step on
    movement: WeightChangeCheck | None = None  # from the start of training on
    report_saved: Callable[[Path], None] = report_nothing  # called with each checkpoint
    checkpoint: Path | None = None  # the first epoch resumes from it

    def __post_init__(self) -> None:
        # the types as loaded: DeepSpeed casts the trained weights
        self.stamp = replace(self.stamp, dtypes=dtypes_of(self.engine.model))
        self.settings = self.engine.config.train
        self.process = self.engine.process
        self.memory = self.step_log.memory
        self.speed = self.step_log.evaluations

    @property
    def state(self) -> State:
        return self.events.state

    @property
    def control(self) -> Control:
        return self.events.control

    def start(self, checkpoint: Path | None = None) -> None:
        """Prepare the engine and the state of the run, or load those of a checkpoint.

        Raises: CheckpointError if the checkpoint is after the schedule's last step; DivergedError.
        """
        engine = self.engine
        self.checkpoint = checkpoint
        self.loader = self.create_loader()
        self.steps_per_epoch = len(self.loader) // self.order.layout.micro_batches
        self.start_state()
        if engine.tokenizer is not None:
            align_special_tokens(engine.model, engine.tokenizer)
        engine.prepare(self.state.max_steps)
        if checkpoint is not None:
            load_trained_weights(engine, checkpoint)
            load_optimizer(engine, checkpoint)
        engine.wrapped.zero_grad()
        self.step_log.reset(self.state.global_step)
        has_moved = self.state.stateful_callbacks.get(GUARDS, {}).get("has_moved", False)
        self.movement = WeightChangeCheck(engine.model, self.process, has_moved)

    def train(self) -> None:
        """Train to the last step of the schedule, after `start`."""
        state, steps_per_epoch = self.state, self.steps_per_epoch
        started = time.time()
        first_step = state.global_step
        self.control.should_training_stop = False
        self.events.call("on_train_begin")
        for epoch in range(first_step // steps_per_epoch, state.num_train_epochs):
            self.control.should_epoch_stop = False
            self.events.call("on_epoch_begin")
            if state.global_step >= state.max_steps or self.control.should_training_stop:
                break  # resumed after the last step
            self.train_epoch(epoch)
            if self.control.should_training_stop:
                break
        if state.global_step >= state.max_steps > first_step:
            steps = state.max_steps - first_step
            self.movement.raise_if_unmoved(steps, self.settings.learning_rate)
        samples = math.ceil(len(self.rows) * state.max_steps / steps_per_epoch)
        logs = speed_metrics("train", started, num_samples=samples, num_steps=state.max_steps)
        logs["total_flos"] = 0.0  # as in trainer_state.json: not counted
        logs["train_loss"] = self.step_log.total_loss() / max(state.global_step, 0.001)
        self.log(logs)
        self.events.call("on_train_end")

    def start_state(self) -> None:
        """Initialize the state of the run, or read a checkpoint's, including that of the guards."""
        train, checkpoint = self.settings, self.checkpoint
        steps = train.max_steps or math.ceil(train.epochs * self.steps_per_epoch)
        state = State()
        if checkpoint is not None:
            saved = read_json(checkpoint / TRAINER_STATE)
            state = State(**{name: saved[name] for name in vars(state)})
            if state.global_step > steps:
                raise CheckpointError(
                    f"the checkpoint has taken {state.global_step} steps, and this schedule ends "
                    f"at {steps}: nothing is left to train; set more TRAIN_EPOCHS or "
                    "TRAIN_MAX_STEPS"
                )
            guards = state.stateful_callbacks.get(GUARDS, {})
            self.guard.skipped += guards.get("skipped_steps", [])
            self.loss_watch.replay(state.log_history)
        state.max_steps = steps
        state.num_train_epochs = math.ceil(steps / self.steps_per_epoch)
        state.logging_steps = train.logging_steps
        if train.logging_steps == "auto":
            state.logging_steps = min(LOGGING_STEPS, max(1, steps // LEAST_LOGS))
        self.events.start(state, self.loader)

    def create_loader(self) -> DataLoader:
        """Return the loader of this rank's micro-batches: accelerate shards `order`."""
        train, part = self.settings, self.loss.context and self.loss.context.part
        loader = DataLoader(
            self.rows,
            batch_sampler=self.order,
            collate_fn=functools.partial(collate_for_step, self.collator, part=part),
            num_workers=train.loader_processes,
            pin_memory=train.dataloader_pin_memory,
            persistent_workers=train.loader_processes > 0,
            worker_init_fn=stops.leave_to_parent,
        )
        return self.engine.accelerator.prepare(loader)

    def train_epoch(self, epoch: int) -> None:
        """Run the steps of an epoch; if it is resumed, the remaining steps."""
        control, steps = self.control, self.steps_per_epoch
        first = self.state.global_step - epoch * steps
        loader, checkpoint = self.loader, self.checkpoint
        self.checkpoint = None  # it is read once
        self.order.set_epoch(epoch)
        if first > 0:
            loader = skip_first_batches(loader, first * self.order.layout.micro_batches)
        elif checkpoint is not None:
            load_random_state(self.process, checkpoint)
        loader.set_epoch(epoch)
        batches = iter(loader)
        self.engine.start_epoch()
        for step in range(first, steps):
            control.should_log = control.should_evaluate = control.should_save = False
            self.events.call("on_step_begin")
            micro_batches = self.fetch(batches)
            if step == first > 0 and checkpoint is not None:
                load_random_state(self.process, checkpoint)  # after the skipped rows were read
            self.train_step(micro_batches, epoch + (step + 1) / steps)
            if control.should_training_stop:
                break
        if not control.should_epoch_stop:  # otherwise the schedule decides when the run ends
            control.should_evaluate |= self.settings.eval_strategy == "epoch"
            control.should_save |= self.settings.save_strategy == "epoch"
            self.events.call("on_epoch_end")
            self.evaluate_and_save()

    def fetch(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the micro-batches of one step. Adds this rank's work to the log."""
        started = time.perf_counter()
        fetched = list(itertools.islice(batches, self.order.layout.micro_batches))
        self.step_log.times.add("data", time.perf_counter() - started)
        branches = [branch for batch in fetched for branch in batch.branches]
        shared = [branch.shared for branch in branches if branch.shared]
        labelled = sum(len(batch.loss.targets) for batch in fetched)
        self.step_log.add_rows(list(map(sum, branches)), labelled, shared)
        return fetched

    def train_step(self, micro_batches: Sequence[Batch], epochs: float) -> None:
        """Run an optimizer step, after which `epochs` are trained; log, evaluate and save."""
        engine, state = self.engine, self.state
        # the total weight of labeled tokens on all ranks: their number if each weighs 1
        own_weight = sum(batch.loss.total_weight for batch in micro_batches)
        labelled_tokens = self.process.sum(own_weight)
        self.step_log.start_step()
        losses = []
        for number, batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            losses.append(self.compute_gradients(batch, labelled_tokens, is_last))
            if not is_last:
                self.events.call("on_substep_end")
        norm = engine.clip_gradients()
        step = state.global_step + 1
        self.gradients.record(engine, step, state.max_steps)
        is_finite = self.guard.record(engine, step, norm, losses)
        if self.guard.skips:
            self.step_log.drop_step_unless(is_finite)
        self.events.call("on_pre_optimizer_step")
        engine.optimizer.step()
        self.events.call("on_optimizer_step")
        rate = engine.learning_rate
        engine.end_step()
        state.global_step = step
        state.epoch = epochs
        self.control.request_scheduled(state, self.settings)
        self.events.call("on_step_end")
        if not self.stop_if_diverged() and self.control.should_log:
            self.log_steps(norm, rate)
        self.evaluate_and_save()

    def compute_gradients(self, batch: Batch, labelled_tokens: float, is_last: bool) -> Tensor:
        """Run the forward and backward pass of a micro-batch; return its loss, detached.

        Gradients are summed over the ranks in the last micro-batch of a step.
        """
        engine = self.engine
        engine.accelerator.sync_gradients = is_last
        waiting: Any = nullcontext()
        if not (is_last or engine.is_deepspeed):
            waiting = engine.accelerator.no_sync(engine.wrapped)
        if not engine.wrapped.training:
            engine.wrapped.train()  # visits every module: some 3,600 of 48 layers with adapters
        self.memory.enter("forward")
        with waiting:
            batch = batch.to(self.process.device, non_blocking=True)
            loss = self.compute_loss(batch, labelled_tokens)
            self.step_log.add_loss(loss.detach(), batch.loss.total_weight / labelled_tokens)
            del batch
            self.memory.enter("backward")
            engine.backward(loss)
        return loss.detach()

    def compute_loss(self, batch: Batch, labelled_tokens: float) -> Tensor:
        """Return a micro-batch's share of the step's mean loss, times the number of ranks."""
        loss = self.loss.compute(self.engine.wrapped, batch, labelled_tokens)
        # for a model placed on several GPUs, it is on the GPU of the output head
        return (loss * self.process.world_size).to(self.process.device)

    def stop_if_diverged(self, keeps_last: bool = True) -> bool:
        """End training if a step so far has diverged; return whether one has.

        See `StepGuard.flush` for `keeps_last`.

        Raises: DivergedError, on every rank, unless the best weights are published instead.
        """
        try:
            self.guard.flush(self.settings.learning_rate, keeps_last)
        except DivergedError as error:
            self.loss_watch.diverge(error, self.state.global_step)
        has_diverged = self.loss_watch.diverged is not None
        if has_diverged:
            self.control.stop_training()
        return has_diverged

    def log_steps(self, norm: Tensor | float, rate: float) -> None:
        """Log the mean loss of the steps since the last log, if there are any."""
        step = self.state.global_step
        steps = step - self.step_log.logged_step
        if steps == 0:
            return
        found = self.step_log.collect(step, self.engine.wrapped)
        logs = {"loss": found.loss, "grad_norm": float(norm), "learning_rate": rate}
        logs = self.without_diverged(logs)
        if "loss" in logs:
            self.guard.correct_log(logs, step, steps)
            logs |= found.speed
            router_loss = self.loss.router_loss
            balance = router_loss and router_loss.mean_since_log(self.process)
            if balance is not None:
                logs["router_aux_loss"] = balance
        if "loss" in logs:  # some step was trained
            self.loss_watch.record(step, logs["loss"])
        self.log(logs, found.details if "loss" in logs else NO_DETAILS)

    def log(self, logs: dict[str, float], details: LogDetails = NO_DETAILS) -> None:
        """Log. Raises: DivergedError, on every rank, if the run has diverged."""
        logs = self.without_diverged(logs)
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control.should_log = False
        self.events.call("on_log", logs=logs, details=details)

    def without_diverged(self, logs: dict[str, float]) -> dict[str, float]:
        """Return the log; if the run has diverged, only its finite numbers."""
        if self.stop_if_diverged(keeps_last=False):
            return {name: value for name, value in logs.items() if math.isfinite(value)}
        return logs

    def evaluate_and_save(self) -> None:
        """Evaluate, and save a checkpoint, if the callbacks have asked for it."""
        if self.stop_if_diverged():
            return
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self.save_checkpoint()
            self.control.should_save = False
            self.events.call("on_save")

    def score(self, evaluator: Evaluator) -> Scores:
        """Return the scores of the model, which is then restored to its previous mode."""
        with self.memory.phase("evaluation"), self.speed.evaluating(self.engine.model):
            return evaluator.score(self.engine.model)

    def log_scores(
        self, rows: str, evaluator: Evaluator, scores: Scores, metrics: dict[str, float]
    ) -> None:
        """Log the metrics of an evaluation, with some answers; `rows` names its split."""
        details = NO_DETAILS
        if self.process.is_main and scores.generation is not None:
            answers = sample_answers(evaluator.questions, scores.generation)
            details = LogDetails(answers=answers, rows=rows)
        self.log(metrics, details)

    def evaluate(self) -> None:
        """Evaluate on the validation rows, and log `eval_…` metrics."""
        metrics: dict[str, float] = {}
        with suppress(EvaluationStopped):  # the callback below ends the run
            scores = self.score(self.evaluator)
            for name, value in scores.as_metrics().items():
                metrics[f"eval_{name.removeprefix('eval_')}"] = value
            self.log_scores("validation", self.evaluator, scores, metrics)
        self.control.should_evaluate = False
        self.events.call("on_evaluate", metrics=metrics)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this step, unless the run has diverged. Every rank must call it."""
        if self.stop_if_diverged(keeps_last=False):
            return
        started = time.perf_counter()
        with self.memory.phase("save"):
            self.state.stateful_callbacks[GUARDS] = {
                "skipped_steps": self.guard.skipped,
                "has_moved": self.movement.has_moved(),
            }
            folder = save_checkpoint(self.engine, self.events, self.stamp, self.best_metric)
        self.step_log.save_seconds += time.perf_counter() - started
        self.report_saved(folder)

    def save_now(self) -> None:
        """Save a checkpoint of this step, unless there is one. Every rank must call it."""
        folder = checkpoint_folder(self.engine, self.state.global_step)
        if self.process.min(int(folder.is_dir())) == 0:
            self.save_checkpoint()
