"""metrics.jsonl: what a run says of itself while it continues, a line at a time. Loads no torch.

It is only appended to, by the main rank, so that others can follow it.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from sft_play.runs.files import json_line, open_in_place, write_text


@dataclass(frozen=True)
class GpuSample:
    """The load of one GPU, as NVML gave it; None if it did not."""

    rank: int  # that computes on it; run.json's memory_by_rank has its name
    busy_percent: float | None = None
    used_gib: float | None = None  # by all programs
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class SampleAnswer:
    """A generated answer next to the one in the row."""

    prompt: str
    expected: str
    answer: str


@dataclass(frozen=True)
class MetricsLine:
    """What a run said at one moment."""

    step: int
    steps: int  # of the complete run
    time: float | None = None  # seconds since the epoch; None for a step of the run resumed from
    values: dict[str, float | int] = field(default_factory=dict)  # by the names of the log
    gpus: tuple[GpuSample, ...] = ()
    answers: tuple[SampleAnswer, ...] = ()

    def to_json(self) -> str:
        """Return the line, without what it does not say."""
        said = {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}
        return json_line(said)


@cache
def _adapter() -> TypeAdapter[MetricsLine]:
    return TypeAdapter(MetricsLine)


def append(path: Path, line: MetricsLine) -> None:
    """Add a line to the file."""
    with open_in_place(path, "a") as file:
        file.write(line.to_json())


def forget_after(path: Path, step: int) -> None:
    """Remove the lines of later steps than `step`, from which the run continues."""
    if path.exists():
        kept = [line for line in read_metrics(path).lines if line.step <= step]
        write_text(path, "".join(line.to_json() for line in kept))


class NewLines(NamedTuple):
    """The part of a file after an offset."""

    lines: list[MetricsLine]
    offset: int  # where to read on


def read_metrics(path: Path, offset: int = 0) -> NewLines:
    """Return the complete lines from `offset` on; none if there is no file yet.

    The last line may be half written: it is read once it is complete.
    """
    if not path.is_file():  # reading a pipe would wait
        return NewLines([], offset)
    with path.open("rb") as file:
        file.seek(offset)
        found = file.read()
    end = found.rfind(b"\n") + 1
    # a disk that was full for a moment leaves half a line in the middle
    lines = [line for line in map(_parsed, found[:end].splitlines()) if line is not None]
    return NewLines(lines, offset + end)


def _parsed(line: bytes) -> MetricsLine | None:
    try:
        return _adapter().validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return None
