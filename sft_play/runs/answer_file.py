"""Answers to the prompts of a file: in parts while they are made, then one file in order.

Every process, by its place among them, appends to its part; a call that is typed again resumes from
all parts.
Imports no torch.
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.runs.files import (
    Json,
    free_name,
    json_line,
    open_in_place,
    read_json,
    write_json,
    write_text,
)

LOCK = "lock"  # in the folder of parts
NUMBER = "number"  # of a prompt in its file, from 0: only in parts

PLACE = "SFT_PLAY_PLACE"  # of a process: "1/4:29500:7312"


@dataclass(frozen=True)
class AnswerFile:
    """The file of answers that a call is to write, completely or not at all."""

    path: Path

    @property
    def asked(self) -> Path:
        """What was asked, with which weights and settings."""
        return self.path.with_name(f"{self.path.stem}.asked.json")

    @property
    def parts(self) -> Path:
        """The folder of the answers so far."""
        return self.path.with_name(f"{self.path.name}.parts")

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Note what is asked, or continue if the same was asked before.

        Raises: ConfigError if the file contains answers to something else.
        """
        if self.asked.is_file():
            try:
                before = dict(read_json(self.asked))
            except (ValueError, TypeError):
                raise ConfigError(
                    f"OUT={self.path}: {self.asked} is there, which no call wrote; "
                    f"OUT={free_name(self.path)} is free"
                ) from None
            different = sorted(name for name in asked if before.get(name) != asked[name])
            if different:
                shown = ", ".join(f"{name}={before.get(name)}" for name in different)
                raise ConfigError(
                    f"OUT={self.path}: answers of another call are there ({shown}); "
                    "name another file, or remove it and its other files: "
                    f"rm -r {self.path}* {self.asked}"
                )
        elif self.path.exists() or self.parts.exists():
            free = free_name(self.path)
            taken = self.path if self.path.exists() else self.parts
            raise ConfigError(f"OUT={self.path}: {taken} is there; OUT={free} is free")
        self.parts.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.asked, dict(asked))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other calls from writing the same answers meanwhile.

        Raises: EnvironmentFault if another one does.
        """
        self.parts.mkdir(exist_ok=True)
        with open_in_place(self.parts / LOCK, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            except BlockingIOError:
                raise EnvironmentFault(
                    f"OUT={self.path}: another call writes these answers now; wait for it, or name "
                    "another file"
                ) from None
            yield

    def is_complete(self) -> bool:
        """Return whether all answers are there, in order."""
        return self.path.is_file()

    def answered(self) -> set[int]:
        """Return the numbers of the prompts that have an answer in a part."""
        return {line[NUMBER] for line in self._lines()}

    def append_to_part(self, part: int) -> "AnswerShard":
        """Return where a process writes its answers."""
        self.parts.mkdir(exist_ok=True)
        return AnswerShard(self.parts / f"{part}.jsonl")

    def finish(self, prompts: int) -> None:
        """Write the file of all answers, in the order of the prompts, and remove the parts."""
        lines = {line.pop(NUMBER): line for line in self._lines()}
        assert len(lines) == prompts, f"{len(lines)} answers to {prompts} prompts"
        in_order = (json_line(lines[number]) for number in range(prompts))
        write_text(self.path, "".join(in_order))
        shutil.rmtree(self.parts)

    def count_without_answer(self) -> int:
        """Return how many prompts the finished file has no answer to."""
        with self.path.open(encoding="utf-8") as file:
            return sum(json.loads(line)["answer"] is None for line in file)

    def _lines(self) -> Iterator[Json]:
        """Yield the complete lines of all parts; one that broke off is left out."""
        for path in sorted(self.parts.glob("*.jsonl")):
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield json.loads(line)


class PartsWatch:
    """Counts the answers that processes append to the parts."""

    def __init__(self, file: AnswerFile) -> None:
        self._file = file
        self._read: dict[Path, int] = {}  # bytes of each part
        self.new_answers()

    def new_answers(self) -> int:
        """Return how many answers were written since the last call."""
        count = 0
        for path in self._file.parts.glob("*.jsonl"):
            with path.open("rb") as part:
                part.seek(self._read.get(path, 0))
                count += part.read().count(b"\n")
                self._read[path] = part.tell()
        return count


class AnswerShard:
    """The answers that one process has written."""

    def __init__(self, path: Path) -> None:
        """Open it, without a last line that broke off."""
        self._file = open_in_place(path, "ab+")
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)

    def write(self, answers: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Append answers by the number of their prompt."""
        lines = [json_line({NUMBER: number, **values}) for number, values in answers]
        self._file.write("".join(lines).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class FanOutPlace(NamedTuple):
    """A process among those of a command, the port where they meet, and who started them."""

    number: int
    of: int
    port: int = 0  # 0 for the only one
    parent: int = 0  # its process id

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> "FanOutPlace | None":
        """Return that of this process, None if it is the one that the user started."""
        if PLACE not in environ:
            return None
        place, port, parent = environ[PLACE].split(":")
        number, _, of = place.partition("/")
        return cls(int(number), int(of), int(port), int(parent))
