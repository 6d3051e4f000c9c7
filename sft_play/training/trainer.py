"""transformers.Trainer with our order of rows, loss, evaluation and checkpoints."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled

from sft_play import stops
from sft_play.data.collate import Batch, TokenSequence, labelled
from sft_play.data.order import StepSampler
from sft_play.evaluation.evaluator import EvaluationStopped, Evaluator, Scores
from sft_play.models.fast.graphs.decoder import GraphedDecoder
from sft_play.models.fast.loss.head import fused_nll, is_loss_fused
from sft_play.models.load import load_trained
from sft_play.models.losses import summed_nll
from sft_play.models.sharding import is_divided, trains_divided, whole_state_dict
from sft_play.plan.step import Layout
from sft_play.runs import stamp
from sft_play.runs.checkpoints import STAGING
from sft_play.runs.metrics import SampleAnswer
from sft_play.training import sharded
from sft_play.training.best import EndDiverged, goes_on
from sft_play.training.callbacks import EvalSpeedCallback, Throughput
from sft_play.training.divergence import LossWatch
from sft_play.training.expert_use import ExpertUse
from sft_play.training.loraplus import raise_learning_rate_of_b
from sft_play.training.memory import MemoryMeter
from sft_play.training.nonfinite import StepGuard, spread
from sft_play.training.rates import set_rates
from sft_play.training.router_loss import RouterLoss
from sft_play.training.samples import sample_answers
from sft_play.training.sealed_save import dtypes_of, save_sealed
from sft_play.training.step_log import StepLog
from sft_play.training.untrained import GradientWatch
from sft_play.training.visits import visited_once

# Keys of a micro-batch that are not inputs of the model; N labelled tokens
REAL_LENGTHS = "real_lengths"  # list of int: tokens of each document that is no filler
LOSS_POSITIONS = "loss_positions"  # (N,), see `collate.labelled`
LOSS_TARGETS = "loss_targets"  # (N,)
RANDOM_STATES = "gpu_random_states.pt"  # of the GPUs of a model that is placed on several


def token_mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
    """Return this micro-batch's share of the step's mean loss: nats / labelled tokens of the step.

    `num_items_in_batch` counts the labelled tokens of all micro-batches of all ranks. So every
    token has the same weight, however the step is split.
    """
    return summed_nll(outputs.logits, labels) / num_items_in_batch


def collate_for_step(
    collate: Callable[[Sequence[TokenSequence]], Batch], sequences: Sequence[TokenSequence]
) -> Batch:
    """Return the collated batch with its labelled tokens and the lengths of its real documents.

    They are found on the CPU: on a GPU the count would force a synchronization.
    """
    batch = collate(sequences)
    positions, targets = labelled(batch["labels"])
    return {
        **batch,
        LOSS_POSITIONS: positions,
        LOSS_TARGETS: targets,
        REAL_LENGTHS: [length for sequence in sequences for length in sequence.real_lengths],
    }


class SftTrainer(Trainer):
    """A Trainer whose steps train the same rows on any number of ranks. NaN raises an error."""

    def __init__(
        self,
        *,
        order: StepSampler,
        evaluator: Evaluator,
        speed: EvalSpeedCallback,
        throughput: Throughput,
        stamp: stamp.Stamp,
        memory: MemoryMeter | None = None,
        step_log: StepLog | None = None,
        router_loss: RouterLoss | None = None,
        loraplus_lr_ratio: float | None = None,
        guard: StepGuard | None = None,
        gradients: GradientWatch | None = None,
        **kwargs: Any,
    ):
        self.text_config = kwargs["model"].config.get_text_config()
        self.base_use_cache = getattr(self.text_config, "use_cache", None)  # saved with the weights
        super().__init__(compute_loss_func=token_mean_loss, **kwargs)
        self.text_config.use_cache = False
        self.order = order
        self.evaluator = evaluator
        self.speed = speed
        self.throughput = throughput
        # the types as loaded: DeepSpeed casts what it trains
        self.stamp = {**stamp, "dtypes": dtypes_of(self.model)}
        self.loraplus_lr_ratio = loraplus_lr_ratio
        self.process = throughput.process
        self.memory = memory or MemoryMeter(self.process)
        self.step_log = step_log or StepLog(throughput, self.memory)
        self.router_loss = router_loss
        self.guard = guard or StepGuard(self.process)
        self.gradients = gradients or GradientWatch(self.process)
        self.loss_watch = LossWatch(self.text_config.vocab_size, self.args.learning_rate)
        self.end_diverged: EndDiverged | None = None  # where the best weights are published then
        self.expert_use: ExpertUse | None = None  # counts from the first step on
        self.graphs: GraphedDecoder | None = None  # replays the layers from the first step on
        self.best_metric = "eval_loss"  # of the checkpoint that is never removed
        self.note_saved: Callable[[Path], None] | None = None  # called with each checkpoint
        # called on the main rank with the rows' name, some answers to them, and the step
        self.note_answers: list[Callable[[str, Sequence[SampleAnswer], int], None]] = []

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave a model where it was loaded: a part of it may be meant to be in host memory."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Return Trainer's optimizer; with a `loraplus_lr_ratio` B has groups of its own."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.loraplus_lr_ratio is not None:
            raise_learning_rate_of_b(optimizer, model or self.model, self.loraplus_lr_ratio)
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of this rank's micro-batches.

        Accelerate shards `order`: rank r gets every world_size-th micro-batch.
        """
        args = self.args
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self.order,
            collate_fn=functools.partial(collate_for_step, self.data_collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_num_workers > 0,
            worker_init_fn=stops.ignore,
        )
        return self.accelerator.prepare(loader)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        # a resumed state has the logging and saving intervals of the run that wrote it; use ours
        begun = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        return begun

    def _run_epoch(self, **kwargs: Any) -> None:
        has_last_step = self.state.global_step >= self.state.max_steps
        if has_last_step or self.control.should_training_stop:  # resumed behind the last step
            self.control.should_training_stop = True  # Trainer looks only once it took another one
            return
        # Trainer's own call goes through a wrapper that an epoch resumed in its middle lacks
        self.order.set_epoch(kwargs["epoch"])
        # Trainer counted the micro-batches before `set_micro_batch`
        kwargs["steps_in_epoch"] = len(kwargs["train_dataloader"])
        visiting: Any = visited_once(kwargs["model"])
        if trains_divided(self.model):
            # FSDP has other parameters around each pass: their gradients would never be zeroed
            visiting = contextlib.nullcontext()
        with visiting:
            super()._run_epoch(**kwargs)

    def set_micro_batch(self, layout: Layout) -> None:
        """Split the same steps into the micro-batches of `layout`.

        Call it before the first step, and not under DeepSpeed. The number of steps, and so the
        learning rate schedule, stays the same.
        """
        assert self.state.global_step == 0, "steps were taken already"
        assert not self.is_deepspeed_enabled, "DeepSpeed's engine has its batch built in"
        assert layout.rows_per_step == self.order.layout.rows_per_step, "the steps would differ"
        self.order.layout = layout
        self.args.gradient_accumulation_steps = layout.micro_batches
        self.args.per_device_train_batch_size = layout.batch_size
        self._train_batch_size = layout.batch_size
        self.state.train_batch_size = layout.batch_size  # saved in checkpoints

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int]:
        """Return the micro-batches of one step, and the number of labelled tokens on all ranks.

        Adds the work of this rank to the throughput.
        """
        self.guard.begin(self._tr_loss)
        started = time.perf_counter()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self.step_log.times.add("data", time.perf_counter() - started)
        labelled_tokens = sum(len(batch[LOSS_TARGETS]) for batch in batches)
        lengths = [length for batch in batches for length in batch.pop(REAL_LENGTHS)]
        self.throughput.add(lengths, labelled_tokens)
        return batches, self.process.sum(labelled_tokens)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the forward and backward pass of a micro-batch; return its loss."""
        self.memory.enter("forward")
        averaging: Any = contextlib.nullcontext()
        if self.graphs is not None:
            is_last = self.accelerator.sync_gradients
            averaging = self.graphs.in_place_of_ddp(self.model_wrapped, is_last)
        with averaging:
            loss = super().training_step(*args, **kwargs)
        self.guard.add_loss(loss)
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int = 1,
    ) -> torch.Tensor:
        """Return a micro-batch's share of the step's mean loss, times the number of ranks.

        Gradients become the mean over ranks, which undoes the factor.
        """
        assert not return_outputs, "evaluations have an evaluator"
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        positions = inputs.pop(LOSS_POSITIONS)
        targets = inputs.pop(LOSS_TARGETS)
        if self.router_loss is not None:
            inputs |= self.router_loss.inputs()
        if is_loss_fused(self.model):
            loss = fused_nll(self.model, model, inputs, positions, targets) / num_items_in_batch
        else:
            loss = token_mean_loss(model(**inputs), labels, num_items_in_batch)
        if self.router_loss is not None:
            share = len(targets) / num_items_in_batch
            loss = loss + self.router_loss.of_micro_batch(share).to(loss.device)
        loss = spread(loss)
        self.step_log.add_loss(loss.detach(), len(targets) / num_items_in_batch)
        self.memory.enter("backward")
        # of a placed model it is on the GPU of the output head, and Trainer sums it on the first
        return (loss * self.accelerator.num_processes).to(self.args.device)

    def _wrap_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if is_divided(model):
            return sharded.wrapped(model, self.accelerator)
        return super()._wrap_model(model, *args, **kwargs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return sharded.whole(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = sharded.whole(super()._get_grad_norm(model, grad_norm))
        self.gradients.look(self)
        self.guard.judge(self, norm)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0. Trainer's own estimate visits all parameters in each micro-step, unused."""
        return 0

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                # saves one copy of the gradients; Trainer has no argument for it
                handler.gradient_as_bucket_view = True
        return arguments

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

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if goes_on(self, self.guard.end_step):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log. Raises: DivergedError, on every rank, if the run has diverged."""
        step = self.state.global_step
        if not goes_on(self, self.guard.settle):
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

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if not goes_on(self, self.guard.settle):
            return
        started = time.perf_counter()
        with self.memory.phase("save"):
            save_sealed(self, functools.partial(super()._save_checkpoint, model, trial))
        self.throughput.save_seconds += time.perf_counter() - started
        if self.note_saved is not None:
            self.note_saved(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def _get_output_dir(self, trial: Any) -> str:
        # what Trainer saves goes to the staging folder, and is published from there
        return str(Path(super()._get_output_dir(trial)) / STAGING)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; where its trained weights are divided, every rank must call it."""
        if not trains_divided(self.model):
            super().save_model(output_dir, _internal_call)
            return
        state_dict = whole_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not trains_divided(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded.save_optimizer(Path(output_dir), self)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not trains_divided(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            sharded.load_optimizer(Path(checkpoint), self)
        if checkpoint is not None:
            set_rates(self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if len(self.process.devices) > 1:  # Trainer's has that of the first GPU
            states = list(map(torch.cuda.get_rng_state, self.process.devices))
            torch.save(states, Path(output_dir) / RANDOM_STATES)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = Path(checkpoint or "") / RANDOM_STATES
        if checkpoint is not None and len(self.process.devices) > 1 and path.is_file():
            states = torch.load(path, weights_only=True)
            for state, device in zip(states, self.process.devices, strict=False):
                torch.cuda.set_rng_state(state, device)

    def _load_from_checkpoint(self, checkpoint: str, *args: Any) -> None:
        if isinstance(self.model, PeftModel):
            super()._load_from_checkpoint(checkpoint, *args)
        elif not trains_divided(self.model):  # else its weights were loaded from there
            load_trained(self.model, checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # unlike Trainer's, without training_args.bin, which contains the hub token in plain text
        target = output_dir or self.args.output_dir
        if not (is_deepspeed_zero3_enabled() or trains_divided(self.model)):
            # the model has all weights; below stage 3 DeepSpeed's copy has tied weights twice
            state_dict = None
        # by default PEFT would ask the hub whether the vocabulary was resized
        options = {"save_embedding_layers": False} if isinstance(self.model, PeftModel) else {}
        used_cache = self.text_config.use_cache
        self.text_config.use_cache = self.base_use_cache
        try:
            self.model.save_pretrained(target, state_dict=state_dict, **options)
        finally:
            self.text_config.use_cache = used_cache
        self.processing_class.save_pretrained(target)
