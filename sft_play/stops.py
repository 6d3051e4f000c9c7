"""What stops a command: signals, and the end of the process that started it. Loads no torch.

A first signal stops with whatever can be kept: KeyboardInterrupt, or what the owner of StopSignals
does instead. A second one, by the user, leaves at once.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from sft_play.errors import ExitClass, StoppedOnRequest

# HUP is a terminal or an ssh that was closed, USR1 what batch systems send before the time limit
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEFT_TO_OTHERS = (signal.SIGHUP, signal.SIGUSR1)  # where they are ignored already
BY_USER = (signal.SIGINT, signal.SIGTERM)  # whose repetition leaves at once
# The terminal signals every process, and launchers then pass the same signal on to the ranks: a
# repetition within this time does not count.
REPEAT_SECONDS = 2.0
PARENT_GONE = signal.SIGUSR1  # what a process gets when the one that started it was killed
POLL_SECONDS = 0.5
CHILD_SECONDS = 0.05  # between two looks for the first child
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
MAKE = ("make", "gmake")


def listened(is_rank: bool = False) -> list[signal.Signals]:
    """Return the signals that stop this process: not those that whoever started it has ignored.

    nohup ignores HUP, and a batch script USR1, which launchers would die of and ranks are to hear.
    """
    left = [number for number in LEFT_TO_OTHERS if signal.getsignal(number) == signal.SIG_IGN]
    if is_rank and signal.SIGUSR1 in left:
        left.remove(signal.SIGUSR1)
    return [number for number in STOPPING if number not in left]


class StopSignals:
    """Inside this context a first signal calls `on_first`, and a later one `at_once`.

    Only the main thread may open it. `requested` says whether a signal came.
    """

    def __init__(self, is_rank: bool = False) -> None:
        self.is_rank = is_rank
        self.on_first: Callable[[signal.Signals], None] = _interrupt
        self.at_once: Callable[[], None] = leave
        self._requested_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in listened(self.is_rank):
            self._before[number] = signal.signal(number, self._note)
        return self

    def release(self) -> None:
        """Get the signals that came since `hold`. What records them must be open."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.release()

    @property
    def requested(self) -> bool:
        """Return whether a signal came."""
        return self._requested_at is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
            self.on_first(signal.Signals(number))
        elif number in BY_USER and now - self._requested_at > REPEAT_SECONDS:
            self.at_once()


@contextlib.contextmanager
def stopped_with(text: str) -> Iterator[None]:
    """Raise StoppedOnRequest with a text after a signal inside this context."""
    try:
        with StopSignals():
            yield
    except KeyboardInterrupt:
        raise StoppedOnRequest(text) from None


def hold() -> None:
    """Keep signals waiting for `StopSignals.release`, also that of what this process becomes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, listened())


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep signals waiting inside this context, if an interrupt would lose track of a process.

    A process that is started inside never hears them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent(number: int = 0) -> None:
    """Leave signals to the parent, and end with it.

    A terminal and batch systems send them to every process. torch calls it in data loaders, with
    their number.
    """
    signal.set_wakeup_fd(-1)  # the parent's, which a fork has inherited
    ignore()
    end_with_parent()


def ignore() -> None:
    """Hear no stop signal any more."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def leave() -> None:
    """End this process at once."""
    os._exit(int(ExitClass.STOPPED))


def end_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Get a signal when the process that started this one ends, however that was.

    Linux sends it itself, also to what this process becomes by exec; elsewhere a thread looks. Its
    id is `parent`, which may have ended already, by default the parent's of now.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before it was asked for
            os.kill(os.getpid(), number)
    else:
        watch_parent(lambda: os.kill(os.getpid(), number), parent)


def outlive_parent() -> None:
    """Get no signal any more when the process that started this one ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def end_with_make() -> None:
    """End as on request when make was killed; a shell that ends leaves its programs running."""
    import psutil

    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if sys.platform == "linux" and parent.name() in MAKE:
            end_with_parent(PARENT_GONE)


def watch_parent(when_gone: Callable[[], None], parent: int | None = None) -> None:
    """Start a thread that calls `when_gone` once the process that started this one has ended."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        when_gone()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def pass_on(end: Callable[[], None]) -> Callable[[], object]:
    """Pass every signal on to the processes that this one starts. Return what to call before that.

    A signal before that call runs `end`, which must end this process. Later this process ends when
    its children do, and no signal interrupts it: they stay blocked, also in what it starts, and a
    thread waits for them.
    """
    numbers = listened()
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    starting = threading.Lock()  # whoever is first gets it, and keeps it

    def wait() -> None:
        """Pass on one signal after the other, for as long as this process lives."""
        import psutil

        while True:
            number = signal.sigwait(numbers)
            logging.disable(logging.ERROR)  # torchrun's, to which a rank that has stopped failed
            if number == signal.SIGHUP:
                _leave_terminal()
            if starting.acquire(blocking=False):
                end()
            while not (children := psutil.Process().children()):
                time.sleep(CHILD_SECONDS)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return starting.acquire


def _interrupt(number: signal.Signals) -> None:
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Write nowhere from now on: the terminal is gone, and every line would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
