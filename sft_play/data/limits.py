"""Limits of time and memory on what a model's files make run: templates, patterns, tokenizers.

Loads no torch.
"""

import contextlib
import functools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

from sft_play.data.rows import shorten
from sft_play.errors import DataError, first_line

# A template writes a long conversation in some milliseconds
MAX_CPU_SECONDS = 3.0
MAX_GROWN_BYTES = 512 << 20
TICK_SECONDS = 0.05  # of CPU time between two checks
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
REMEDY = "correct its loops, or choose another with MODEL_CHAT_TEMPLATE"
# Of an encoding, beside those above, for each character: ten times what any tokenizer takes
CHARACTER_SECONDS = 1e-5
CHARACTER_BYTES = 512
# Of loading a tokenizer; the largest take some seconds, a conversion a minute
LOAD_SECONDS = 300.0
LOAD_BYTES = 8 << 30
MAX_TOKEN_CHARACTERS = 4096  # of an added token; every text is searched for it
STATM = "/proc/self/statm"  # in pages; the sixth number is what RLIMIT_DATA counts
Result = TypeVar("Result")
_began = (0.0, 0)  # CPU seconds and peak of memory before what is rendered
_is_held = False
_stopping = ("", "")  # what is rendered, and what to do where it is stopped


class _Stopped(BaseException):
    """Raised inside a template: no error of a row, which whoever renders it would catch."""


@contextlib.contextmanager
def limited(what: str = "the chat template", remedy: str = REMEDY) -> Iterator[None]:
    """Stop what runs inside after MAX_CPU_SECONDS, or MAX_GROWN_BYTES more memory.

    It is not one row's error: the next row would take as long. Only the main thread is watched,
    as signals reach no other. What one call of C allocates is refused by the system. Raises:
    DataError.
    """
    global _began, _stopping
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch_timer()
    _stopping = what, remedy
    _began = time.process_time(), _peak_bytes()
    signal.setitimer(signal.ITIMER_VIRTUAL, TICK_SECONDS, TICK_SECONDS)
    try:
        with allocating_little():
            yield
    except _Stopped as error:
        raise DataError(str(error)) from None
    except MemoryError:
        raise DataError(
            f"{what} asks for {MAX_GROWN_BYTES >> 20} MiB of memory or more; {remedy}"
        ) from None
    except (RecursionError, SyntaxError) as error:  # Python compiles no blocks that deep
        raise DataError(
            f"{what} is nested too deeply, or calls itself ({error}); {remedy}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextlib.contextmanager
def allocating_little() -> Iterator[None]:
    """Let the system refuse MAX_GROWN_BYTES more inside: for many renderings, as it takes 20 µs."""
    global _is_held
    # other threads would undo each other's
    if _is_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    allowed = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_most_data(allowed[0]), allowed[1]))
    _is_held = True
    try:
        yield
    finally:
        _is_held = False
        resource.setrlimit(resource.RLIMIT_DATA, allowed)


def _most_data(allowed: int) -> int:
    """Return the most that this process may allocate."""
    if not os.path.exists(STATM):  # macOS, which has no such limit either
        return allowed
    with open(STATM) as file:
        pages = int(file.read().split()[5])
    most = pages * resource.getpagesize() + MAX_GROWN_BYTES
    return most if allowed == resource.RLIM_INFINITY else min(most, allowed)


@functools.cache  # a third of the time of a rendering, if it were done for each
def _watch_timer() -> None:
    signal.signal(signal.SIGVTALRM, _check_limits)


def _check_limits(number: int, frame: FrameType | None) -> None:
    """Stop a template that takes too long or too much memory."""
    found = _overstepped(_began, MAX_CPU_SECONDS, MAX_GROWN_BYTES)
    if found:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise _Stopped(f"{_stopping[0]} {found}; {_stopping[1]}")


def _overstepped(began: tuple[float, int], most_seconds: float, most_bytes: int) -> str | None:
    """Return which limit is overstepped, in words, None where none is."""
    seconds = time.process_time() - began[0]
    grown = _peak_bytes() - began[1]
    if seconds > most_seconds:
        return f"has not ended after {seconds:.0f} s"
    if grown > most_bytes:
        return f"has taken {grown / 2**30:.1f} GiB of memory and goes on"
    return None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT


def run_limited(call: Callable[[], Result], most_seconds: float, most_bytes: int) -> Result:
    """Return the result of a call that cannot be interrupted; leave it where it takes more.

    It runs on a thread of its own. Raises: its error, DataError for a limit.
    """
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - panics of Rust are no Exceptions
            failed.append(error)

    began = time.process_time(), _peak_bytes()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(TICK_SECONDS)
        words = _overstepped(began, most_seconds, most_bytes)
        if words and thread.is_alive():
            raise DataError(words)
    if not failed:
        return found[0]
    (error,) = failed
    raise error if isinstance(error, Exception) else RuntimeError(first_line(error)) from error


def load_limited(load: Callable[[], Result]) -> Result:
    """Return the tokenizer that a call loads from files that anyone may have made.

    Raises: its error; ValueError where it takes too much, or a token is too long to be meant.
    """
    tokenizer = run_limited(load, LOAD_SECONDS, LOAD_BYTES)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    longest = max(map(str, backend.get_added_tokens_decoder().values()), key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise ValueError(
            f"the added token {shorten(longest)!r} has {len(longest):,} characters, more than "
            f"{MAX_TOKEN_CHARACTERS:,}"
        )
    return tokenizer


def encode(
    tokenizer: Any,
    texts: Sequence[str],
    with_offsets: bool = False,
    add_special_tokens: bool = False,
) -> list[Any]:
    """Return the encodings of texts by a tokenizer of the library `tokenizers`.

    Raises: DataError where it fails, or takes longer, or more memory, than any tokenizer.
    """
    call = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    tokenizer.no_truncation()  # earlier code, or its file, may have set these two
    tokenizer.no_padding()
    call = functools.partial(call, texts, add_special_tokens=add_special_tokens)
    characters = sum(map(len, texts))
    most_seconds = MAX_CPU_SECONDS + characters * CHARACTER_SECONDS
    try:
        return run_limited(call, most_seconds, MAX_GROWN_BYTES + characters * CHARACTER_BYTES)
    except Exception as error:  # noqa: BLE001 - the library raises no other class
        words = str(error) if isinstance(error, DataError) else f"fails ({first_line(error)})"
    raise DataError(f"the tokenizer {words}; correct tokenizer.json, or get the model again")
