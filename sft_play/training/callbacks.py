"""Callbacks of the trainer: evaluation mode, throughput, stopping on a signal, progress."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback

from sft_play.process import Process

logger = logging.getLogger(__name__)

# USR1 is what batch systems send before the time limit of a job
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A main thread that has not handled a signal after this time is stuck in a collective. Launchers
# kill after 30 seconds.
STUCK_SECONDS = 20.0
# The terminal signals every rank, and the launcher then passes the same signal on to them: a repeat
# within this time does not count.
GRACE_SECONDS = 5.0


class EvalSpeedCallback(TrainerCallback):
    """Puts the model in evaluation mode for each evaluation, and counts the seconds.

    During an evaluation the key-value cache is on; activation checkpointing and dropout are off.
    All of it is restored afterwards, also after an error. transformers has no event before an
    evaluation, hence a context manager.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def evaluating(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep `model` in evaluation mode inside this context."""
        started = time.perf_counter()
        used_cache = model.config.use_cache
        was_training = {module: module.training for module in model.modules()}
        checkpointed = [
            module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
        ]
        try:
            model.eval()
            model.config.use_cache = True
            for module in checkpointed:
                module.gradient_checkpointing = False
            yield
        finally:
            for module in checkpointed:
                module.gradient_checkpointing = True
            model.config.use_cache = used_cache
            for module, mode in was_training.items():
                module.training = mode
            self.seconds += time.perf_counter() - started


class Work(NamedTuple):
    """What a rank has trained up to a moment, or between two."""

    seconds: float  # of training steps alone
    steps: int
    tokens: int  # without padding and fillers
    rows: int
    flops: float  # that the rows cannot do without; 0 where nothing counts them

    def since(self, before: "Work") -> "Work":
        """Return the work between two moments."""
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


class Throughput(TrainerCallback):
    """Measures tokens per second after the first step, which compiles and allocates.

    `tokens` is the number of real tokens that this rank has trained, counted on the CPU, as are
    `rows` and `flops`. `flops_of(lengths, labelled)` counts the operations of documents.
    """

    def __init__(
        self,
        process: Process,
        evaluations: EvalSpeedCallback,
        flops_of: Callable[[Sequence[int], int], float] | None = None,
    ):
        self.process = process
        self.evaluations = evaluations
        self.flops_of = flops_of
        self.tokens = 0
        self.rows = 0
        self.flops = 0.0
        self.steps = 0
        self.save_seconds = 0.0
        self.first_step_seconds = 0.0
        self._started_at = 0.0  # in seconds of `clock`, as the two below
        self._first_step: Work | None = None
        self._last_step: Work | None = None
        self._last_log: Work | None = None

    def add(self, lengths: Sequence[int], labelled: int) -> None:
        """Count the documents of a step of this rank, by their tokens; `labelled` have a label."""
        self.steps += 1
        self.tokens += sum(lengths)
        self.rows += len(lengths)
        if self.flops_of is not None:
            self.flops += self.flops_of(lengths, labelled)

    def clock(self) -> float:
        """Return the time in seconds without that of evaluations and saves."""
        return time.perf_counter() - self.evaluations.seconds - self.save_seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started_at = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._first_step is None:
            self._first_step = self._mark()
            self.first_step_seconds = self._first_step.seconds - self._started_at

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_step = self._mark()

    def since_log(self) -> Work | None:
        """Return the work of this rank since this was last called; None for the first step.

        The first step compiles and allocates. Call it with the loss of the last step at hand: then
        the GPU has nothing left to do.
        """
        now = self._now()
        before = self._last_log or self._first_step
        self._last_log = now
        if before is None or now.seconds <= before.seconds:
            return None
        return now.since(before)

    def _mark(self) -> Work:
        if self.process.device.type == "cuda":
            torch.cuda.synchronize(self.process.device)
        return self._now()

    def _now(self) -> Work:
        return Work(self.clock(), self.steps, self.tokens, self.rows, self.flops)

    @property
    def train_seconds(self) -> float:
        return self._last_step.seconds - self._started_at if self._last_step else 0.0

    def tokens_per_second(self) -> float | None:
        """Return real tokens per second over all ranks, None for a run of one step.

        Every rank must call it.
        """
        if self._first_step is None or self._last_step is None:
            return None
        tokens = self.process.sum(self._last_step.tokens - self._first_step.tokens)
        seconds = self._last_step.seconds - self._first_step.seconds
        if tokens <= 0 or seconds <= 0:
            return None
        return tokens / seconds


class StopOnSignal(TrainerCallback):
    """Ends the run on SIGINT or SIGTERM after the current step, with a checkpoint.

    A second signal, more than GRACE_SECONDS later, ends the process at once. Before the first step
    there is nothing to save, so the first signal raises KeyboardInterrupt. Later the ranks agree at
    the end of each step whether to stop: a signal that reaches one rank alone would leave the
    others in a collective. Python handles no signal while a rank waits in C++ for a rank that is
    gone; a thread then calls `when_stuck`.
    """

    def __init__(self, process: Process, when_stuck: Callable[[], None] | None = None):
        self.process = process
        self.has_begun = False
        self.stopped = False
        self._requested_at: float | None = None
        for number in STOPPING:
            signal.signal(number, self._note)
        if process.world_size > 1 and when_stuck is not None:
            self._watch(when_stuck)

    def _watch(self, when_stuck: Callable[[], None]) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # the pipe gets the number of each signal at once, even if the main thread is stuck
        signal.set_wakeup_fd(write_end)

        def watch() -> None:
            while os.read(read_end, 1)[0] not in STOPPING:
                pass
            time.sleep(STUCK_SECONDS)
            if not self.requested:
                when_stuck()

        threading.Thread(target=watch, name="signals", daemon=True).start()

    @property
    def requested(self) -> bool:
        """Return whether this rank got a signal."""
        return self._requested_at is not None

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
            if not self.has_begun:
                raise KeyboardInterrupt
            name = signal.Signals(number).name
            logger.warning(
                "%s: stopping at the end of this step with a checkpoint; once more after %.0f "
                "seconds stops at once",
                name,
                GRACE_SECONDS,
            )
        elif now - self._requested_at > GRACE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.has_begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        requested = self.process.sum(int(self.requested)) > 0
        if requested and state.global_step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True
            control.should_log = True
            control.should_evaluate = False  # the user waits, and launchers kill after 30 seconds

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Trainer also ends the epoch that was cut short, and would evaluate and save once more
        if self.stopped:
            control.should_save = False
            control.should_evaluate = False


class StopAfter(TrainerCallback):
    """Ends the run with a checkpoint after the step that `stop_step` returns of all its steps."""

    def __init__(self, stop_step: Callable[[int], int]):
        self.stop_step = stop_step
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop_step(state.max_steps) <= state.global_step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True
            control.should_log = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # as for a signal: Trainer also ends the epoch that was cut short
        if self.stopped:
            control.should_save = False
            control.should_evaluate = False


class Progress(TrainerCallback):
    """Shows a progress bar on the main rank's terminal, and one line for each log."""

    def __init__(self, process: Process):
        self.is_shown = process.is_main
        self.bar: tqdm | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_shown and sys.stdout.isatty():
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        has_loss = "loss" in logs or "eval_loss" in logs
        if not self.is_shown or not has_loss:
            return
        names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_rougeL")
        facts = " ".join(f"{name}={logs[name]:.4g}" for name in names if name in logs)
        if "tokens_per_second" in logs:
            facts += f" tokens_per_second={logs['tokens_per_second']:.0f}"
        pause = contextlib.nullcontext()
        if self.bar is not None:
            pause = tqdm.external_write_mode(file=sys.stdout)
        with pause:
            logger.info("step %d/%d %s", state.global_step, state.max_steps, facts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class BeforeFirstStep(TrainerCallback):
    """Calls `action` once the model is wrapped (DDP, ZeRO) and before the first step."""

    def __init__(self, action: Callable[[], None]):
        self.action = action

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.action()
