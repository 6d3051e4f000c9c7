"""Limit time and memory of a model's own files: templates, patterns, tokenizers.

A call of C code cannot be interrupted, so the kernel ends a process that exceeds a limit. A worker
that tokenizes rows has limits for each chunk. Other processes try risky calls in a fork. Loads no
torch.
"""

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play import stops
from sft_play.errors import DataError, first_line
from sft_play.progress import Stage, watched_stage

# A template writes a long conversation in a few milliseconds
CPU_SECONDS = 3
GROWN_BYTES = 512 << 20
# Per character of a chunk, in addition: ten times what any tokenizer needs
CHARACTER_SECONDS = 1e-5
CHARACTER_BYTES = 512
# For loading a tokenizer; the largest take some seconds, a conversion takes a minute
LOAD_SECONDS = 300
LOAD_BYTES = 8 << 30
STATM = Path("/proc/self/statm")  # in pages; the sixth number is what RLIMIT_DATA limits
TEMPLATE_REMEDY = "correct its loops, or choose another with MODEL_CHAT_TEMPLATE"
TOKENIZER_REMEDY = "correct tokenizer.json, or get the model again"


@contextlib.contextmanager
def limited_resources(seconds: float, grown_bytes: int) -> Iterator[None]:
    """Make the kernel end this process after `seconds` of computing inside, and refuse memory.

    In that case Python raises MemoryError; C and Rust abort.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = {resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime + seconds) + 1}
    if STATM.exists():  # macOS also lacks such a limit
        pages = int(STATM.read_text().split()[5])
        most[resource.RLIMIT_DATA] = pages * resource.getpagesize() + grown_bytes
    before = {kind: resource.getrlimit(kind) for kind in most}
    for kind, (soft, hard) in before.items():
        is_lower = soft == resource.RLIM_INFINITY or most[kind] < soft
        resource.setrlimit(kind, (most[kind] if is_lower else soft, hard))
    try:
        yield
    finally:
        for kind, allowed in before.items():
            resource.setrlimit(kind, allowed)


def find_excess(
    call: Callable[[], object], seconds: float, grown_bytes: int, title: str = ""
) -> str | None:
    """Return the limit that a call exceeds in a fork of this process, None if it exceeds none.

    Lines with a title are logged meanwhile.
    """
    with stops.held():
        child = os.fork()
    if child == 0:
        is_short = False
        try:
            stops.leave_to_parent()
            faulthandler.disable()
            for stream in (1, 2):  # the parent reports it again
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os.putenv("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
            with limited_resources(seconds, grown_bytes):
                call()
        except MemoryError:
            is_short = True
        finally:
            os._exit(is_short)  # the parent gets any other error again
    with watched_stage(Stage(title), is_shown=title != ""):  # not before the fork: it has a thread
        _, status = os.waitpid(child, 0)
    end = os.waitstatus_to_exitcode(status)
    if end == -signal.SIGXCPU:
        return f"has not ended after {seconds:.0f} s"
    if end < 0 and end != -signal.SIGABRT:
        return f"is ended by {signal.Signals(-end).name}"
    # a MemoryError in Python; C and Rust abort
    return f"asks for {grown_bytes >> 20} MiB of memory or more" if end else None


def refuse_endless(
    call: Callable[[], object],
    what: str,
    remedy: str,
    seconds: float = CPU_SECONDS,
    grown_bytes: int = GROWN_BYTES,
) -> None:
    """Raise DataError if the call exceeds a limit; the message names the call `what`."""
    if excess := find_excess(call, seconds, grown_bytes):
        raise DataError(f"{what} {excess}; {remedy}")


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for errors of `tokenizers`: a plain Exception, or a panic of Rust."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ not in ("Exception", "PanicException"):
            raise
        raise RuntimeError(first_line(error)) from error
