"""What the processes of a run did when, front end included. Loads no torch."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A part of a run; it may lie inside another one, or next to one of another process."""

    name: str
    start: float  # seconds since the epoch
    end: float


spans: list[Span] = []  # of this process


def note(name: str, start: float | None = None) -> None:
    """Note a part that ends now; without `start` it began when this process did."""
    if start is None:
        import psutil  # it takes a while

        start = psutil.Process().create_time()
    spans.append(Span(name, start, time.time()))


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Note what is done inside this context, also if it fails."""
    start = time.time()
    try:
        yield
    finally:
        note(name, start)
