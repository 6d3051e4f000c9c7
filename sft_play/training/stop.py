"""Stop a rank on request: when it stops, what it saves, and what happens if it cannot."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch

from sft_kernels.process import Process
from sft_play.evaluation.evaluator import Evaluator
from sft_play.stops import BY_USER, REPEAT_SECONDS, STOPPING, StopSignals
from sft_play.training import peers
from sft_play.training.recorder import RunRecorder
from sft_play.training.state import Control, State

logger = logging.getLogger(__name__)

# A main thread that has not handled a signal after this time is stuck in a collective.
STUCK_SECONDS = 20.0


class StopOnSignal:
    """Ends the run on a stop signal after the current step, or after `last_step_of`.

    Either way it saves a checkpoint.

    Before the first step has computed its gradients there is nothing to save, so a signal raises
    KeyboardInterrupt. Later the ranks agree at the end of each step, evaluation batch and
    save: a signal that reaches only one rank would leave the others in a collective. A second
    signal from the user ends the run at once. All of this applies inside this object's context.
    """

    def __init__(
        self,
        process: Process,
        signals: StopSignals,
        recorder: RunRecorder,
        last_step_of: Callable[[int], int],
    ):
        self.process = process
        self.signals = signals
        self.recorder = recorder
        self.has_begun = False
        self.is_ending = False  # the trained weights are saved
        self.stopped = False  # on request
        self.is_paused = False  # by train.stop_after
        self.last_step_of = last_step_of  # the last step of this launch, of all steps
        signals.on_first = self._obey
        signals.at_once = recorder.leave

    def __enter__(self) -> Self:
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # the pipe gets the number of each signal at once, even if the main thread is stuck
        self._fd_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._write_end = write_end
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        end_children()
        signal.set_wakeup_fd(self._fd_before)
        self._closed.set()
        os.write(self._write_end, b"\0")  # wakes the thread
        self._watcher.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def follow(self, *evaluators: Evaluator) -> None:
        """Allow evaluations to end early on a signal."""
        for evaluator in evaluators:
            evaluator.is_stopping = lambda: self.signals.requested

    def _obey(self, number: signal.Signals) -> None:
        """Stop now if nothing is lost, otherwise log when the run will stop."""
        if self.recorder.is_recording_error:  # it ends by itself
            return
        if not self.has_begun or peers.missing_ranks():
            self.recorder.interrupt()
        when = "stopping at the end of this step with a checkpoint"
        if self.is_ending:
            when = "the trained weights are being saved, and the run ends by itself"
        logger.warning(
            "%s: %s; once more after %.0f seconds leaves at once", number.name, when, REPEAT_SECONDS
        )

    def _watch(self) -> None:
        """Handle signals that the main thread cannot: it waits in C++ for another rank."""
        first_at = None
        while not self._closed.is_set():
            ready, _, _ = select.select([self._read_end], [], [], 1.0)
            number = os.read(self._read_end, 1)[0] if ready else None
            now = time.monotonic()
            if number in STOPPING and first_at is None:
                first_at = now
            elif number in BY_USER and now - first_at > REPEAT_SECONDS:
                time.sleep(1)  # gives the main thread time to handle it
                self.recorder.leave()
            if first_at is not None and not self.signals.requested:
                self._give_up_if_stuck(now - first_at)

    def _give_up_if_stuck(self, seconds: float) -> None:
        gone = peers.missing_ranks() if seconds > 1 else []
        if gone:
            self.recorder.abandon(peers.describe_missing_ranks(gone))
        elif seconds > STUCK_SECONDS:
            self.recorder.abandon()

    def _agreed(self) -> bool:
        """Return whether any rank got a signal. Every rank must call it."""
        self.stopped = self.process.max(int(self.signals.requested)) > 0
        return self.stopped

    def on_pre_optimizer_step(self, *_: Any) -> None:
        if not self.has_begun:
            self.recorder.is_interrupted = False  # what swallowed it has done no harm
        self.has_begun = True

    @property
    def reason(self) -> str | None:
        """Why the run stopped before its last step; None if it did not."""
        if self.stopped:
            return "on request"
        return "by train.stop_after" if self.is_paused else None

    def on_step_end(self, state: State, control: Control) -> None:
        """End training with a checkpoint if a rank got a signal, or by train.stop_after."""
        last_step = self.last_step_of(state.max_steps)
        self.is_paused = last_step <= state.global_step < state.max_steps
        if self.is_paused or self._agreed():
            control.stop_training()
            control.should_save = True
            control.should_log = True
        if self.stopped:
            control.should_evaluate = False  # the user is waiting

    def on_evaluate(self, state: State, control: Control, **_: Any) -> None:
        if self._agreed():
            control.stop_training()
            control.should_save = True

    def on_save(self, state: State, control: Control) -> None:
        if self._agreed():
            control.stop_training()


def end_children() -> None:
    """Kill a data loader's processes: they ignore other signals, and Python waits for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises an error for each killed process
    for child in torch.multiprocessing.active_children():
        if child.daemon:
            child.kill()
