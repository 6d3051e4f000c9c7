"""Keep run.json up to date from the start of a run, also when it fails."""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from sft_play import stops, timeline
from sft_play.errors import ExitClass, first_line, is_out_of_memory, of_os_error
from sft_play.masking import mask_secrets
from sft_play.plan.run_plan import PlannedRun
from sft_play.reporting.page import write_report_or_warn
from sft_play.reporting.verdict import resume_command
from sft_play.runs import stamp
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder, next_line
from sft_play.runs.report import (
    STARTED_AT,
    Check,
    LoggedStep,
    OutOfMemoryReport,
    PhasePeaks,
    ReportedPeaks,
    RunReport,
)
from sft_play.training import peers

logger = logging.getLogger(__name__)
file_only = logging.getLogger("traceback")  # the terminal shows only warnings of sft_play
file_only.addHandler(logging.NullHandler())  # before the log file is open they go nowhere


def log_thread_error(error: threading.ExceptHookArgs) -> None:
    """Log what ended a thread; the run itself reports a disk that refuses to be written."""
    if isinstance(error.exc_value, OSError) and of_os_error(error.exc_value):
        file_only.warning("ended a thread", exc_info=error.exc_value)
    else:
        threading.__excepthook__(error)


# torch is not imported here because that takes seconds: signals are recorded meanwhile
Explain = Callable[[BaseException], tuple[str, OutOfMemoryReport]]  # the cause in one line

STUCK = (
    "another rank is gone or hangs: this one was told to stop while it waited; "
    "logs/rank-*.log of the run say which"
)


def no_wait() -> None:
    """Return at once: no other thread ends this rank."""


class RunRecorder:
    """A context around a rank's work that records it in run.json.

    The first rank of each machine writes its machine's file, and so does the rank that fails first.
    An error is recorded with its exit class, logged once and not raised further; the process should
    exit with `exit_class`. With `announce`, an error also ends the other ranks, and this process
    at once. `explain_out_of_memory` adds to the cause of an out-of-memory error.
    """

    def __init__(self, folder: RunFolder, planned: PlannedRun, rank: int):
        self.folder = folder
        self.rank = rank
        ranks = planned.plan.ranks
        self._is_first_of_machine = rank == ranks.node_rank * ranks.per_node
        self.exit_class = ExitClass.UNEXPECTED
        # sends an error to the other ranks, and ends the process
        self.announce: Callable[[ExitClass, str], object] | None = None
        # waits for the thread that ends this rank
        self.await_follow: Callable[[], object] = no_wait
        self.gone: list[int] = []  # ranks of this machine that had ended when a signal arrived
        self.find_gone: Callable[[], list[int]] = list  # none; or from the watch over other ranks
        self.explain_out_of_memory: Explain | None = None
        self.state: Any = None  # transformers' state of the training loop, once it has started
        self._of_front_end = folder.read_report().timeline or []
        self.report = _first_report(folder, planned)
        self._is_following = False  # another rank failed first
        self._open_check: str | None = None  # its error ends the run
        self.is_recording_error = False
        self.is_interrupted = False  # by a signal, before a first step
        self._told: str | None = None  # the cause that was already logged
        self._has_told_launcher = False
        self._started = time.perf_counter()
        self.lap_began = time.time()  # start of the part that is being timed

    def __enter__(self) -> Self:
        if not self._has_ended_elsewhere():
            self.write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        self.is_recording_error = True
        if self._open_check is not None and isinstance(error, Exception):
            self.note_check(Check(self._open_check, passed=False, found=first_line(error)))
        if self._is_following:
            file_only.warning("raised while this rank followed another one", exc_info=error)
            # the broadcast's thread ends the process, unless the store was closed before the thread
            # could acknowledge
            self.await_follow()
            os._exit(self.exit_class)
        self.exit_class, cause = self._classified(error)
        if is_out_of_memory(error):  # errors of our own already say what to type
            cause = self._explain(error, cause)
        cause = mask_secrets(cause)
        self._log_failure(cause, error)
        try:
            self._record_failure(cause)
        except OSError as unwritable:  # a full disk must not hide the cause
            self._log_unwritable(unwritable)
        if self.announce is not None:
            self.announce(self.exit_class, cause)
        return isinstance(error, Exception | KeyboardInterrupt)  # SystemExit propagates

    def update(self, **changes: Any) -> None:
        """Set fields of the report and write it."""
        self.note(**changes)
        if not self._has_ended_elsewhere():
            self.write()

    def note(self, **changes: Any) -> None:
        """Set fields of the report without writing it."""
        self.report = replace(self.report, **changes)

    def note_seconds(self, seconds: Mapping[str, float]) -> None:
        """Set the seconds of parts of the run."""
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        self.note(seconds={**self.report.seconds, **rounded})

    def lap(self, name: str) -> None:
        """Record the seconds since the last lap as those of the part `name`."""
        timeline.note(name, self.lap_began)
        now = time.time()
        self.note_seconds({name: now - self.lap_began})
        self.lap_began = now

    @property
    def global_step(self) -> int:
        """The step that was reached."""
        return self.report.global_step if self.state is None else self.state.global_step

    def note_checkpoint(self, checkpoint: Path) -> None:
        """Record that a run which is killed from now on can resume from this checkpoint."""
        command = resume_command(self.folder, self.report)
        self.update(global_step=step_of(checkpoint), checkpoint=str(checkpoint), next=command)

    @contextlib.contextmanager
    def check(self, name: str, found: str | None = None) -> Iterator[None]:
        """Record a check that the code inside makes: it passes unless that raises an error."""
        self._open_check = name
        yield
        self._open_check = None
        self.note_check(Check(name, passed=True, found=found))

    def note_check(self, check: Check) -> None:
        """Record a check that was made, or why it was not."""
        self.note(checks=[*(self.report.checks or []), check])

    def finish(
        self, status: str, exit_class: ExitClass, cause: str | None = None, force: bool = False
    ) -> None:
        """Record how the run ended; the main rank writes its report, too; with `force` any does."""
        self.exit_class = exit_class
        if cause is not None:
            self._tell_launcher(cause)
        self.note_seconds({"total": time.perf_counter() - self._started})
        self.note(timeline=[*self._of_front_end, *timeline.spans])
        self.note(status=status, exit_class=int(exit_class), cause=cause)
        self.note(global_step=self.global_step)
        if self.state is not None:
            logged = map(LoggedStep.from_log, self.state.log_history)
            self.note(history=[step for step in logged if step is not None])
        self.write(force)
        if self.rank == 0 or force:
            write_report_or_warn(self.folder)

    def write(self, force: bool = False) -> None:
        """Write run.json on the first rank of a machine; with `force` on any."""
        if self._is_first_of_machine or force:
            self.folder.write_report(self.report)

    def abandon(self, cause: str = STUCK) -> NoReturn:
        """Record that this rank hangs waiting for another rank, and end the process.

        Called by another thread while the main thread is stuck.
        """
        self.exit_class = ExitClass.PEER_LOST
        self._log_failure(cause)
        self._record_failure(cause)
        os._exit(self.exit_class)

    def follow(self, rank: int, exit_class: ExitClass, cause: str) -> None:
        """Record that another rank's error ends this rank.

        Called by the broadcast's thread while the main thread is stuck.
        """
        self._is_following = True
        self.exit_class = exit_class
        self._tell_launcher(f"rank {rank} failed first: {cause}")
        logger.error(
            "rank %d failed first: %s\nexit class %d (%s), rank %d follows it",
            rank,
            cause,
            exit_class,
            exit_class.name.lower(),
            self.rank,
        )
        if self._has_ended_elsewhere():
            return
        try:  # on another machine this rank has a separate run folder
            self.finish(_status(exit_class), exit_class, cause, force=True)
        except OSError as unwritable:
            self._log_unwritable(unwritable)

    def interrupt(self, number: int | None = None) -> None:
        """Raise KeyboardInterrupt on a signal, and record whether ranks had ended when it came.

        Do nothing while an error is recorded, which ends this rank: its cause would be lost. If
        another rank ends, a launcher sends the signal just when this rank misses it.
        """
        if self.is_recording_error:
            return
        self.gone = peers.missing_ranks()
        self.is_interrupted = True
        raise KeyboardInterrupt

    def leave(self) -> NoReturn:
        """Record that the user left without a last checkpoint, and end the process."""
        self.exit_class = ExitClass.STOPPED
        cause = (
            f"stopped at once on a second signal, at step {self.global_step} and without a "
            f"checkpoint of it; {self._to_go_on()}"
        )
        if self.rank == 0:  # other ranks print it themselves
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, f"{cause}\n".encode())  # safe whatever the signal has interrupted
        self._record_failure(cause)
        stops.leave()

    def _classified(self, error: BaseException) -> tuple[ExitClass, str]:
        """Return the exit class of an error and the cause in words.

        An interrupted import may swallow the interrupt and fail, being incomplete. This error
        has no known class, unlike e.g. a full disk or a wrong setting.
        """
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted()
        from sft_play.training.classify import classify

        exit_class, cause = classify(error)
        if self.is_interrupted and exit_class in (ExitClass.UNEXPECTED, ExitClass.PEER_LOST):
            return self._interrupted()
        if exit_class is not ExitClass.PEER_LOST:
            return exit_class, cause
        self.gone = self.find_gone()
        return exit_class, peers.describe_missing_ranks(self.gone) if self.gone else cause

    def _interrupted(self) -> tuple[ExitClass, str]:
        """Return the exit class and the cause of a run that a signal has ended."""
        if self.gone:
            return ExitClass.PEER_LOST, peers.describe_missing_ranks(self.gone)
        cause = f"stopped on request before a first step; {self._to_go_on()}"
        return ExitClass.STOPPED, cause

    def _to_go_on(self) -> str:
        """Return in words what can be resumed."""
        if self.report.checkpoint is None:
            return "nothing is kept of its training"
        newest = f"its newest checkpoint is {self.report.checkpoint}"
        return f"{newest}: continue with {self.report.next}" if self.report.next else newest

    def _explain(self, error: BaseException, cause: str) -> str:
        """Return the explained cause of an out-of-memory error, and add the facts to the report."""
        if self.explain_out_of_memory is None:
            return cause
        try:
            cause, report = self.explain_out_of_memory(error)
        except RuntimeError as unknown:  # the device no longer responds
            logger.warning("the memory by component cannot be measured: %s", unknown)
            return cause
        self.note(out_of_memory=report)
        return cause

    def _log_failure(self, cause: str, error: BaseException | None = None) -> None:
        """Log the cause; the traceback of an error of a known class goes to the log file only."""
        if cause == self._told:  # another thread of this rank has logged it
            return
        self._told = cause
        self._tell_launcher(cause)
        is_known = self.exit_class is not ExitClass.UNEXPECTED
        name = self.exit_class.name.lower()
        logger.error(
            "%s\nexit class %d (%s), rank %d, %s%s",
            cause,
            self.exit_class,
            name,
            self.rank,
            self.folder.path,
            self._going_on(cause),
            exc_info=None if is_known else error,
        )
        if is_known and error is not None and not isinstance(error, KeyboardInterrupt):
            file_only.warning("raised here", exc_info=error)

    def _going_on(self, cause: str) -> str:
        return next_line(self.exit_class, cause, self.report.next)

    def _tell_launcher(self, cause: str) -> None:
        """Make torchrun print why this rank ends; it keeps the first cause."""
        if self._has_told_launcher:
            return
        self._has_told_launcher = True
        try:
            peers.print_in_torchrun(cause + self._going_on(cause))
        except OSError as unwritable:
            logger.warning("torchrun will not say why this rank ends: %s", unwritable)

    def _record_failure(self, cause: str) -> None:
        """Write the cause, unless another rank failed first: its cause is kept."""
        if self._has_ended_elsewhere():
            first = self.folder.read_report().cause
            if self.rank == 0 and first != cause:
                logger.error("first to fail: %s", first)
            return
        if self.rank != 0:  # its logger does not write to the terminal
            sys.stderr.write(f"rank {self.rank}: {cause}{self._going_on(cause)}\n")
        self.finish(_status(self.exit_class), self.exit_class, cause, force=True)

    def _log_unwritable(self, error: OSError) -> None:
        logger.error("%s cannot be written: %s", self.folder.path / "run.json", error)

    def _has_ended_elsewhere(self) -> bool:
        """Return whether another rank of this launch has recorded the end of the run."""
        if self.report.world_size == 1:
            return False
        written = self.folder.read_report()
        has_ended = written.status in ("failed", "stopped")
        return has_ended and written.launcher_pid == self.report.launcher_pid


def _status(exit_class: ExitClass) -> str:
    return "stopped" if exit_class is ExitClass.STOPPED else "failed"


def _first_report(folder: RunFolder, planned: PlannedRun) -> RunReport:
    """Return the report of a run that has just started."""
    tuning = planned.config.tuning
    plan = planned.plan
    planned_report = folder.read_report()
    return RunReport(
        run=folder.name,
        run_id=planned_report.run_id,
        status="running",
        world_size=plan.ranks.world_size,
        strategy=plan.ranks.strategy,
        device=plan.ranks.device,
        backend=tuning.backend,
        mode=tuning.mode,
        checkpointing=plan.checkpointing,
        global_step=0,
        pid=os.getpid(),
        host=socket.gethostname(),
        launcher_pid=os.getppid(),
        started_at=time.strftime(STARTED_AT),
        versions={"sft-play": stamp.own_version(), **stamp.versions()},
        seconds={},
        peak_bytes=ReportedPeaks(predicted=plan.memory.predicted_peak),
        memory=PhasePeaks(predicted=plan.memory.totals()),
        metrics=planned_report.metrics or {},
        checkpoint=planned_report.checkpoint,
        next=planned_report.next,
    )
