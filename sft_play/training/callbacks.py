"""Callbacks of the loop: evaluation mode, evaluation time and progress."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from sft_kernels.process import Process
from sft_play.progress import Stage, say, watched_stage
from sft_play.runs.report import logged_losses, logged_scores
from sft_play.training.checks import modes_restored
from sft_play.training.state import Control, State

logger = logging.getLogger(__name__)


class EvalSpeedCallback:
    """Puts the model in evaluation mode for each evaluation, and counts the seconds.

    During an evaluation the key-value cache is on; activation checkpointing and dropout are off.
    All of it is restored afterwards, also after an error.
    """

    def __init__(self, process: Process | None = None) -> None:
        self.process = process or Process.alone(torch.device("cpu"))
        self.seconds = 0.0  # of all evaluations
        self._began: float | None = None  # time of the first training step
        self._trained_seconds = 0.0  # seconds of evaluations since then
        self._evaluations = 0

    @contextlib.contextmanager
    def evaluating(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep `model` in evaluation mode inside this context."""
        started = time.perf_counter()
        config = model.config.get_text_config()
        used_cache = config.use_cache
        checkpointed = [
            module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
        ]
        try:
            config.use_cache = True
            for module in checkpointed:
                module.gradient_checkpointing = False
            with modes_restored(model):
                model.eval()
                yield
        finally:
            for module in checkpointed:
                module.gradient_checkpointing = True
            config.use_cache = used_cache
            self.add(time.perf_counter() - started)

    def add(self, seconds: float) -> None:
        """Count an evaluation."""
        self.seconds += seconds
        if self._began is not None:
            self._trained_seconds += seconds
            self._evaluations += 1

    def on_step_begin(self, *_: Any) -> None:
        if self._began is None:
            self._began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        """Log how much of the training time the evaluations needed."""
        if self.process.is_main and self._evaluations:
            count, seconds = self._evaluations, self._trained_seconds
            share = seconds / max(time.perf_counter() - self._began, 1e-9)
            logger.info(
                "%d evaluations took %.1f s, %.1f%% of the time in training",
                count,
                seconds,
                100 * share,
            )
        self._began = None  # later evaluations do not belong to training


class Progress:
    """Says one line for each log, and how far training is; on a terminal, a bar shows it, too.

    Only the main rank does. From the first step until `close`, lines are at most some EVERY_SECONDS
    apart.
    """

    def __init__(self, process: Process):
        self.is_shown = process.is_main
        self.compiles = process.is_gpu
        self.bar: tqdm | None = None
        self.stage: Stage | None = None  # from the first step on
        self._watch = contextlib.ExitStack()

    def close(self) -> None:
        """Say nothing more."""
        self._watch.close()

    def on_train_begin(self, state: State, control: Control) -> None:
        """Draw the bar, on a terminal."""
        if self.is_shown and sys.stdout.isatty():
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,
            )

    def on_step_begin(self, state: State, control: Control) -> None:
        if self.stage is None:
            compiling = ", for which kernels may be compiled" if self.compiles else ""
            title = f"computing the first step{compiling}"
            self.stage = Stage(title, state.max_steps, "steps", done=state.global_step)
            self._watch.enter_context(watched_stage(self.stage, self.is_shown))

    def on_step_end(self, state: State, control: Control) -> None:
        self.stage.title = "training"
        self.stage.advance(1)
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, state: State, control: Control, logs: dict[str, float], **_: Any) -> None:
        """Say a log."""
        has_loss = "loss" in logs or "eval_loss" in logs
        if not self.is_shown or not has_loss:
            return
        names = ["loss", "grad_norm", "learning_rate", "eval_loss"]
        names += [f"eval_{name}_loss" for name in logged_losses(logs)]
        names += [f"eval_{name}" for name in logged_scores(logs, "eval")]
        facts = " ".join(f"{name}={logs[name]:.4g}" for name in names if name in logs)
        if "tokens_per_second" in logs:
            facts += f" tokens_per_second={logs['tokens_per_second']:.0f}"
        say(f"step {state.global_step}/{state.max_steps} {facts}")

    def on_train_end(self, *_: Any) -> None:
        self.close()
        if self.bar is not None:
            self.bar.close()
            self.bar = None
