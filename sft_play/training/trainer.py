"""The training loop: what happens in a run, in the order in which it happens.

transformers' Trainer makes the optimizer, the schedule and accelerate's Accelerator from the
arguments, and holds state and callbacks. The loop, the loss, evaluation and saving are here.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import speed_metrics

from sft_play import stops
from sft_play.data.collate import Batch
from sft_play.data.order import StepSampler
from sft_play.errors import DivergedError
from sft_play.evaluation.evaluator import EvaluationStopped, Evaluator, Scores
from sft_play.models.experts import ranks_of_experts
from sft_play.models.fast.attention.ulysses import ContextGroup
from sft_play.models.fast.documents import CONTEXT
from sft_play.models.fast.graphs.decoder import GraphedDecoder
from sft_play.models.images import trained_tower_weights
from sft_play.models.sharding import trains_divided
from sft_play.runs import stamp
from sft_play.runs.metrics import SampleAnswer
from sft_play.training.batches import (
    LOSS_TARGETS,
    REAL_LENGTHS,
    collate_for_step,
    take_nll,
    total_weight,
)
from sft_play.training.best import LossWatch
from sft_play.training.checkpoints import (
    dtypes_of,
    load_random_state,
    save_checkpoint,
    write_weights,
)
from sft_play.training.engine import begin_state, clip_gradients, prepare, set_rates
from sft_play.training.experts import ExpertUse, RouterLoss
from sft_play.training.guards import GUARDS, GradientWatch, Movement, StepGuard, spread
from sft_play.training.held_out import sample_answers
from sft_play.training.step_log import StepLog


class SftTrainer(Trainer):
    """A loop whose steps train the same rows on any number of ranks. NaN raises an error."""

    def __init__(
        self,
        *,
        order: StepSampler,
        evaluator: Evaluator,
        stamp: stamp.Stamp,
        step_log: StepLog,
        guard: StepGuard,
        gradients: GradientWatch,
        router_loss: RouterLoss | None = None,
        loraplus_lr_ratio: float | None = None,
        towers_learning_rate: float | None = None,
        context: ContextGroup | None = None,
        **kwargs: Any,
    ):
        self.text_config = kwargs["model"].config.get_text_config()
        self.base_use_cache = getattr(self.text_config, "use_cache", None)  # saved with the weights
        super().__init__(**kwargs)
        self.text_config.use_cache = False
        # saves one copy of the gradients; TrainingArguments have no argument for it
        self.accelerator.ddp_handler.gradient_as_bucket_view = True
        self.order = order
        self.evaluator = evaluator
        self.step_log = step_log
        self.memory = step_log.memory
        self.throughput = step_log.throughput
        self.speed = self.throughput.evaluations
        self.process = step_log.process
        # the types as loaded: DeepSpeed casts what it trains
        self.stamp = {**stamp, "dtypes": dtypes_of(self.model)}
        self.trains_divided = trains_divided(self.model)
        self.shares_experts = ranks_of_experts(self.model) > 1
        self.loraplus_lr_ratio = loraplus_lr_ratio
        self.towers_learning_rate = towers_learning_rate
        self.tower_weights = trained_tower_weights(self.model)
        self.router_loss = router_loss
        self.context = context  # of ranks that share each row
        self.guard = guard
        self.gradients = gradients
        self.loss_watch = LossWatch(self.text_config.vocab_size, self.args.learning_rate)
        self.expert_use: ExpertUse | None = None  # counts from the first step on
        self.graphs: GraphedDecoder | None = None  # replays the layers from the first step on
        self.best_metric = "eval_loss"  # of the checkpoint that is never removed
        self.note_saved: Callable[[Path], None] | None = None  # called with each checkpoint
        self.note_fetch: list[Callable[[], None]] = []  # called before the rows of each step
        # called on the main rank with the rows' name, some answers to them, and the step
        self.note_answers: list[Callable[[str, Sequence[SampleAnswer], int], None]] = []
        self.summed_loss = torch.tensor(0.0, device=self.args.device)  # of steps since the last log
        self.logged_loss = 0.0  # summed over the steps that were logged
        self.parameters: list[torch.nn.Parameter] | None = None  # of an epoch, listed once

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Train to the last step of the schedule, from a checkpoint if one is given."""
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        loader = self.get_train_dataloader()
        numbers = self.set_initial_training_values(self.args, loader)
        epochs, steps_per_epoch, _, samples, _, _, max_steps = numbers
        begin_state(self, checkpoint, max_steps, epochs)
        prepare(self, checkpoint, loader)
        self.step_log.reset(self.state.global_step)
        started = time.time()
        first_step = self.state.global_step
        guards = self.state.stateful_callbacks.get(GUARDS, {})
        self.movement = Movement(self.model, guards.get("has_moved", False))
        self.call("on_train_begin")
        for epoch in range(self.state.global_step // steps_per_epoch, epochs):
            self.call("on_epoch_begin")
            if self.state.global_step >= max_steps or self.control.should_training_stop:
                break  # resumed after the last step
            self.train_epoch(epoch, steps_per_epoch, loader, checkpoint)
            checkpoint = None
            if self.control.should_training_stop:
                break
        if self.state.global_step >= max_steps > first_step:
            self.movement.check(self.process, max_steps - first_step, self.args.learning_rate)
        logs = speed_metrics("train", started, num_samples=samples, num_steps=max_steps)
        logs["total_flos"] = self.state.total_flos
        loss = self.logged_loss + self.summed_loss.item()
        logs["train_loss"] = loss / max(self.state.global_step, 0.001)
        self.log(logs)
        self.call("on_train_end")

    def train_epoch(
        self, epoch: int, steps: int, loader: DataLoader, checkpoint: Path | None
    ) -> None:
        """Take the steps of an epoch: of a resumed one those that are left."""
        first = self.state.global_step - epoch * steps
        self.order.set_epoch(epoch)
        if first > 0:
            loader = skip_first_batches(loader, first * self.order.layout.micro_batches)
        elif checkpoint is not None:
            load_random_state(self, checkpoint)
        loader.set_epoch(epoch)
        batches = iter(loader)
        self.model_wrapped.train()  # a model that was just loaded is partly in evaluation mode
        self.parameters = None if self.trains_divided else list(self.model_wrapped.parameters())
        for step in range(first, steps):
            for note in self.note_fetch:
                note()
            micro_batches, labelled_tokens = self.get_batch_samples(
                batches, self.order.layout.micro_batches
            )
            if step == first > 0 and checkpoint is not None:
                load_random_state(self, checkpoint)  # reading the skipped rows has used it
            self.train_step(micro_batches, labelled_tokens, epoch + (step + 1) / steps)
            if self.control.should_training_stop:
                break
        if not self.control.should_epoch_stop:  # the run ends, and not by its schedule
            self.call("on_epoch_end")
            self.evaluate_and_save()

    def train_step(
        self, micro_batches: Sequence[Batch], labelled_tokens: int, epochs: float
    ) -> None:
        """Take an optimizer step, after which `epochs` are trained; log, evaluate and save."""
        model = self.model_wrapped
        self.call("on_step_begin")
        for number, inputs in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            self.accelerator.sync_gradients = is_last
            waiting: Any = contextlib.nullcontext()
            if not (is_last or self.is_deepspeed_enabled):
                waiting = self.accelerator.no_sync(model)
            with waiting:
                self.summed_loss += self.training_step(model, inputs, labelled_tokens)
            if not is_last:
                self.call("on_substep_end")
        norm = self.clip_gradients()
        self.gradients.look(self)
        self.guard.judge(self, norm)
        self.call("on_pre_optimizer_step")
        self.optimizer.step()
        self.call("on_optimizer_step")
        rate = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        # FSDP has other parameters around each pass if it divides those that train
        for parameter in self.parameters or model.parameters():
            parameter.grad = None
        self.state.global_step += 1
        self.state.epoch = epochs
        self.call("on_step_end")
        step, steps = self.state.global_step, self.state.max_steps
        if step == steps or (step == 1 and steps < self.state.logging_steps):
            self.control.should_log = True
        if self.continues(self.guard.end_step):
            self.log_step(norm, rate)
        self.evaluate_and_save()

    def continues(self, check: Callable[[float], None]) -> bool:
        """Return whether the run has not diverged, after the guard's `check` of the steps so far.

        Raises: DivergedError, on every rank, unless the best weights are published instead.
        """
        try:
            check(self.args.learning_rate)
        except DivergedError as error:
            self.loss_watch.diverge(error, self.state.global_step)
        if self.loss_watch.diverged is None:
            return True
        self.control.should_training_stop = True
        self.control.should_epoch_stop = True
        return False

    def call(self, event: str) -> None:
        """Call all callbacks at an event; what they ask for is in `control`."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model where it was loaded: a part of it may be meant to be in host memory."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return Trainer's optimizer; B of LoRA+ and towers have groups if they have rates."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            set_rates(self, optimizer, model or self.model)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return what decays; Trainer knows norms by their names, and not Mamba's norm_f."""
        decayed = super().get_decay_parameter_names(model)
        modules = model.named_modules(remove_duplicate=False)  # rows of tokens are on both matrices
        kinds = {name: type(module).__name__ for name, module in modules}
        return [name for name in decayed if not kinds[name.rpartition(".")[0]].endswith("Norm")]

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of this rank's micro-batches: accelerate shards `order`."""
        args, part = self.args, self.context and self.context.part
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self.order,
            collate_fn=functools.partial(collate_for_step, self.data_collator, part=part),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_num_workers > 0,
            worker_init_fn=stops.leave_to_parent,
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, batches: Iterator[Batch], count: int) -> tuple[list[Batch], float]:
        """Return the micro-batches of one step, and the weight of labeled tokens on all ranks.

        That is their number if each weighs 1. Adds the work of this rank to the throughput.
        """
        self.guard.begin(self.summed_loss)
        started = time.perf_counter()
        fetched = list(itertools.islice(batches, count))
        self.step_log.times.add("data", time.perf_counter() - started)
        lengths = [length for batch in fetched for length in batch.pop(REAL_LENGTHS)]
        self.throughput.add(lengths, sum(len(batch[LOSS_TARGETS]) for batch in fetched))
        return fetched, self.process.sum(sum(map(total_weight, fetched)))

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: float) -> Tensor:
        """Run the forward and backward pass of a micro-batch; return its loss."""
        self.memory.enter("forward")
        if not model.training:
            model.train()  # visits every module: some 3,600 of 48 layers with adapters
        averaging: Any = contextlib.nullcontext()
        if self.graphs is not None:
            is_last = self.accelerator.sync_gradients
            averaging = self.graphs.in_place_of_ddp(self.model_wrapped, is_last)
        with averaging:
            inputs = send_to_device(inputs, self.args.device, non_blocking=True)
            loss = self.compute_loss(model, inputs, num_items_in_batch)
            del inputs
            self.backward(loss)
        loss = loss.detach()
        self.guard.add_loss(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss that is already a share of its step's."""
        options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        self.accelerator.backward(loss, **options)

    def compute_loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: float) -> Tensor:
        """Return a micro-batch's share of the step's mean loss, times the number of ranks.

        Gradients become the mean over ranks, which undoes the factor.
        """
        inputs = dict(inputs)
        share = total_weight(inputs) / num_items_in_batch
        if self.router_loss is not None:
            inputs |= self.router_loss.inputs()
        has_images = "pixel_values" in inputs
        if self.context is not None:
            inputs[CONTEXT] = self.context
        loss = take_nll(self.model, model, inputs) / num_items_in_batch
        if self.tower_weights and not has_images:
            # every rank has a gradient of every weight, and it is zero
            loss = loss + 0.0 * sum(weight.sum() for weight in self.tower_weights)
        if self.router_loss is not None:
            loss = loss + self.router_loss.of_micro_batch(share).to(loss.device)
        loss = spread(loss)
        self.step_log.add_loss(loss.detach(), share)
        self.memory.enter("backward")
        # of a placed model it is on the GPU of the output head, and Trainer sums it on the first
        return (loss * self.accelerator.num_processes).to(self.args.device)

    def clip_gradients(self) -> Tensor | float:
        """Clip the gradients to train.max_grad_norm; return their norm before that."""
        return clip_gradients(self, self.parameters or self.model_wrapped.parameters())

    def log_step(self, norm: Tensor | float, rate: float) -> None:
        """Log the mean loss of the steps since the last log, if a log is due."""
        steps = self.state.global_step - self.step_log.logged_step
        if not self.control.should_log or steps == 0:
            return
        loss = self.accelerator.gather(self.summed_loss).mean().item()
        self.summed_loss -= self.summed_loss  # NaN stays
        self.logged_loss += loss
        self.log({"loss": loss / steps, "grad_norm": float(norm), "learning_rate": rate})

    def evaluate_and_save(self) -> None:
        """Evaluate, and save a checkpoint, if the callbacks have asked for it."""
        if not self.continues(self.guard.end_step):
            return
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self.save_checkpoint()
            self.call("on_save")

    def score(self, evaluator: Evaluator, rows: str) -> Scores:
        """Return the scores of the model, which is then put back into its former mode.

        `rows` names the split for `note_answers`.
        """
        with self.memory.phase("evaluation"), self.speed.evaluating(self.model):
            scores = evaluator.score(self.model)
        if self.process.is_main and scores.generation is not None:
            answers = sample_answers(evaluator.questions, scores.generation)
            for note in self.note_answers:
                note(rows, answers, self.state.global_step)
        return scores

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the validation rows, log and return `eval_…` metrics."""
        metrics: dict[str, float] = {}
        try:
            scores = self.score(self.evaluator, "validation").as_metrics()
            metrics = {f"eval_{name.removeprefix('eval_')}": scores[name] for name in scores}
            self.log(metrics)
        except EvaluationStopped:
            pass  # the callback below ends the run
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log. Raises: DivergedError, on every rank, if the run has diverged."""
        step = self.state.global_step
        if not self.continues(self.guard.settle):
            logs = {name: value for name, value in logs.items() if math.isfinite(value)}
        if "loss" in logs:
            self.guard.correct_log(logs, step, step - self.step_log.logged_step)
            logs |= self.step_log.collect(step, self.model_wrapped)
            balance = self.router_loss and self.router_loss.mean_since_log(self.process)
            if balance is not None:
                logs["router_aux_loss"] = balance
        if "loss" in logs:  # some step was trained
            self.loss_watch.see(step, logs["loss"])
        super().log(logs, start_time)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this step, unless the run has diverged. Every rank must call it."""
        if not self.continues(self.guard.settle):
            return
        started = time.perf_counter()
        with self.memory.phase("save"):
            folder = save_checkpoint(self)
        self.throughput.save_seconds += time.perf_counter() - started
        if self.note_saved is not None:
            self.note_saved(folder)

    def save_model(self, output_dir: str) -> None:
        """Save the trained weights, their config and the tokenizer. Every rank must call it."""
        write_weights(self, output_dir)
