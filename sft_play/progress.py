"""Lines about a stage that takes long: how much is done, how fast, how long it still takes.

Knows nothing of runs. Lines rather than a bar, so that a log file can be read.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from sft_play import timeline
from sft_play.masking import mask_secrets

logger = logging.getLogger(__name__)

# What a terminal obeys instead of showing it, what turns the direction of the text around it, and
# bytes that are not UTF-8
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # a bar returns by \r
EVERY_SECONDS = 8.0  # between two lines of a stage; a shorter stage says nothing


@dataclass(eq=False)
class Stage:
    """A stage of a run, and what is done of it.

    `measure` describes the stage while nothing can be counted, such as the memory in use.
    """

    title: str
    total: int | None = None  # None: nothing is counted
    unit: str = "rows"
    measure: Callable[[], str] | None = None
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self._done_before = self.done

    def advance(self, count: int) -> None:
        """Count what has been done since the last call."""
        self.done += count

    def line(self) -> str:
        """Return `generating answers: 96/128 rows, 3.2 rows/s, 10 s left`."""
        seconds = self.clock() - self.started_at
        # rows of a compressed file are still read after all of its bytes
        has_rate = self.total is not None and self.done not in (self._done_before, self.total)
        parts = []
        if self.total is not None:
            parts.append(f"{short_number(self.done)}/{short_number(self.total)} {self.unit}")
        if has_rate:
            rate = (self.done - self._done_before) / max(seconds, 1e-9)
            parts.append(f"{short_number(rate)} {self.unit}/s")
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{duration(seconds)} so far")
        if self.measure is not None:
            parts.append(self.measure())
        return f"{self.title}: {', '.join(parts)}"


_open_stages: list[Stage] = []  # the innermost is the last
_said_at = 0.0  # when the last line was said, by time.monotonic


class Output:
    """A standard stream that says its name if it refuses what is printed.

    Control characters, which names may have, are written as escapes, unless it is `drawing`.
    Once a run continues without it (`go_on_without_output`), what follows goes nowhere: the run
    has its log files.
    """

    goes_on = False
    draws = False

    def __init__(self, stream: TextIO, name: str, shown: Callable[[str], str] | None) -> None:
        self._stream = stream
        self._name = name
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        shown = self._shown(text) if self._shown else text
        with self._refusals():
            self._stream.write(shown if Output.draws else CONTROLS.sub(_escape, shown))
        return len(text)

    def flush(self) -> None:
        with self._refusals():
            self._stream.flush()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            if not Output.goes_on:
                raise
            _open_null(self._stream.fileno())


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Write control characters as they are inside this context."""
    Output.draws = True
    try:
        yield
    finally:
        Output.draws = False


def _open_null(number: int) -> None:
    """Make the null device of a descriptor, also of the processes that this one starts."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def guard_output(shown: Callable[[str], str] | None = None) -> None:
    """Open standard streams that are closed, and name those that refuse what is printed.

    `shown` returns what is written in place of a text, None for the text itself.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # a file of the run would get its number
            _open_null(number)
            setattr(sys, name, os.fdopen(number, mode))
    if not isinstance(sys.stdout, Output):
        sys.stdout = Output(sys.stdout, "standard output", shown)
        sys.stderr = Output(sys.stderr, "standard error", shown)


def drop_unwritten_output() -> None:
    """Leave nothing for Python to write when it exits, which would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _open_null(stream.fileno())


def go_on_without_output() -> None:
    """Let this process continue if its standard output is full or closed."""
    Output.goes_on = True


def say(line: str) -> None:
    """Log a line, above a bar if there is one."""
    global _said_at
    _said_at = time.monotonic()
    from tqdm import tqdm  # 20 ms, and few commands take long enough to say something

    with tqdm.external_write_mode(file=sys.stdout):
        logger.info("%s", line)


def visible(text: str) -> str:
    """Return a text with escapes for what a file's name may have: control characters, other bytes.

    >>> print(visible("a\x1b[31m.yaml"))
    a\\x1b[31m.yaml
    """
    return UNSEEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return ascii(found.group())[1:-1].replace("\\udc", "\\x")


OWN_LOGGERS = ("sft_play", "sft_kernels")  # the beginnings of their names


class VisibleFormatter(logging.Formatter):
    """Formats lines without control characters, which names may have, and without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(mask_secrets(super().format(record)))


def log_to_stderr() -> None:
    """Show the lines of a command that prints its result to stdout."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def watched_stage(stage: Stage, is_shown: bool = True) -> Iterator[Stage]:
    """Say a line of the stage if nothing was said for EVERY_SECONDS, while the context is open.

    A stage inside another speaks in its place.
    `is_shown` is False if another rank speaks. The lines come from a thread, so they also come
    while one call takes long; start no processes by fork inside the context.
    """
    if not is_shown:
        yield stage
        return
    ended = threading.Event()

    def speak() -> None:
        quiet = _seconds_to_first_line()
        while not ended.wait(quiet):
            quiet = _said_at + EVERY_SECONDS - time.monotonic()
            if quiet <= 0 and _open_stages and _open_stages[-1] is stage:
                say(stage.line())
                quiet = EVERY_SECONDS
            quiet = max(quiet, EVERY_SECONDS / 8)  # a stage inside this one may end any time

    speaker = threading.Thread(target=speak, name=f"progress of {stage.title}", daemon=True)
    _open_stages.append(stage)
    speaker.start()
    try:
        with timeline.span(stage.title):
            yield stage
    finally:
        _open_stages.remove(stage)
        ended.set()
        speaker.join()


def _seconds_to_first_line() -> float:
    """Return how long a new stage is silent: EVERY_SECONDS since the last line, if there is one."""
    since_last_line = time.monotonic() - _said_at
    if since_last_line > 2 * EVERY_SECONDS:  # nothing has been said yet, or stages were short
        return EVERY_SECONDS
    return max(EVERY_SECONDS - since_last_line, EVERY_SECONDS / 8)


@contextlib.contextmanager
def counted(title: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, else lines; yield what counts how many more are done."""
    if not sys.stderr.isatty():
        with watched_stage(Stage(title, total, unit, done=done)) as stage:
            yield stage.advance
        return
    from tqdm import tqdm

    with tqdm(total=total, initial=done, desc=title, unit=f" {unit}", dynamic_ncols=True) as bar:
        yield bar.update


class Pace:
    """Says a line of a stage when something is done and EVERY_SECONDS are over.

    It has no thread, so processes may be started by fork.
    """

    def __init__(self, stage: Stage):
        self.stage = stage
        self._said_at = stage.started_at

    def advance(self, count: int) -> None:
        """Count what has been done since the last call, and say a line if one is due."""
        self.stage.advance(count)
        now = self.stage.clock()
        if now - self._said_at >= EVERY_SECONDS:
            self._said_at = now
            say(self.stage.line())


def short_number(number: float) -> str:
    """Return a number with three digits or so.

    >>> [short_number(each) for each in (0.5, 96, 2904.6, 12345, 2_500_000_000)]
    ['0.5', '96', '2905', '12.3k', '2.5G']
    """
    if number >= 1e9:
        return f"{number / 1e9:.1f}G"
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    if number >= 1e4:
        return f"{number / 1e3:.1f}k"
    if isinstance(number, int) or number >= 1e3:
        return f"{number:.0f}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return a duration with its two largest units.

    >>> duration(9.4), duration(200), duration(7260)
    ('9 s', '3 min 20 s', '2 h 1 min')
    """
    whole = int(seconds)
    minutes = whole // 60
    if minutes == 0:
        return f"{whole} s"
    if minutes < 60:
        return f"{minutes} min {whole % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"
