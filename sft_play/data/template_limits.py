"""Stops a chat template that does not end, or that fills the memory. Loads no torch."""

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from sft_play.errors import DataError

# A template writes a long conversation in some milliseconds
MAX_CPU_SECONDS = 3.0
MAX_GROWN_BYTES = 1 << 30
TICK_SECONDS = 0.05  # of CPU time between two checks
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
REMEDY = "correct its loops, or choose another with MODEL_CHAT_TEMPLATE"


class _Stopped(BaseException):
    """Raised inside a template: no error of a row, which whoever renders it would catch."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Stop what is rendered inside after MAX_CPU_SECONDS, or MAX_GROWN_BYTES more memory.

    It is not one row's error: the next row would take as long. Only the main thread is watched,
    as signals reach no other. Raises: DataError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.process_time()
    peak = _peak_bytes()

    def check(number: int, frame: FrameType | None) -> None:
        """Stop a template that takes too long or too much memory."""
        seconds = time.process_time() - began
        grown = _peak_bytes() - peak
        if seconds > MAX_CPU_SECONDS:
            found = f"has not ended after {seconds:.0f} s"
        elif grown > MAX_GROWN_BYTES:
            found = f"has taken {grown / 2**30:.1f} GiB of memory and goes on"
        else:
            return
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise _Stopped(f"the chat template {found}; {REMEDY}")

    before = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield
    except _Stopped as error:
        raise DataError(str(error)) from None
    except MemoryError:
        raise DataError(f"the chat template asks for more memory than there is; {REMEDY}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
