"""What only torch can count of a model, from another process, once. Loads no torch.

The answers are kept in the cache folder under a digest of all that they depend on. One process
answers what is asked in a row, as its imports take seconds.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Self

from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

COUNTER = "sft_play.models.structure"  # python -m: reads requests from stdin
PACKAGE = Path(__file__).resolve().parents[1]
# Their versions change the answers
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "fla-core",
    "flash-linear-attention",
)
SECONDS = 600  # after which a process that answers nothing is ended


class Uncounted(Exception):
    """Raised with the reason why there is no answer."""


def answer(
    module: str,
    request: Mapping[str, Any],
    told: str,
    folder: Path,
    environ: Mapping[str, str],
) -> Any:
    """Return what `module.answer` says to a request, from the cache if it is there.

    `told` is one line about the work, which is said where there was nothing in the cache. What a
    model's code refuses is kept too, as it would be refused again.

    Raises: Uncounted with the reason why there is no answer.
    """
    path = folder / f"{_digest(module, request)}.json"
    kept = _read(path)
    if kept is None:
        logger.warning("%s", told)
        kept = _ask(module, request, environ)
        write_json(path, kept)
    if "refused" in kept:
        raise Uncounted(kept["refused"])
    return kept["answer"]


@dataclass(frozen=True)
class _Counter:
    """A process that counts, which sees no GPU and ends by itself when nothing is asked."""

    process: subprocess.Popen[str]
    errors: IO[str]  # its stderr
    owner: int  # process id: a fork must not share the pipes

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> Self:
        """Start a process, whose imports take seconds."""
        paths = [str(PACKAGE.parent)]
        if environ.get("PYTHONPATH"):  # packages may be installed there alone
            paths.append(environ["PYTHONPATH"])
        env = {**environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        # a file, as a pipe that nobody reads would fill
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen([sys.executable, "-m", COUNTER], env=env, text=True, **pipes)
        return cls(process, errors, os.getpid())

    def ask(self, line: str) -> str:
        """Return the line that answers a line; "" where the process has ended.

        Raises: Uncounted after SECONDS.
        """
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            if timer.finished.is_set():
                raise Uncounted(f"the process that counts took more than {SECONDS} seconds")
            timer.cancel()

    def ending(self) -> str:
        """Return how the process ended, with the last line of what it said."""
        code = self.process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["no output"])[-1]
        return f"the process that counts ended with {code}: {last}"


_counters: dict[frozenset[tuple[str, str]], _Counter] = {}  # by their environment


def _ask(module: str, request: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return {"answer": ...} or {"refused": reason} of `module.answer`, in another process.

    A process that answered earlier and has not ended yet is asked first.
    """
    line = json.dumps([module, request])
    key = frozenset(environ.items())
    counter = _counters.pop(key, None)
    found = counter.ask(line) if counter and counter.owner == os.getpid() else ""
    if not found:
        counter = _Counter.start(environ)
        found = counter.ask(line)
    if not found:
        raise Uncounted(counter.ending())
    _counters[key] = counter
    return json.loads(found)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what was kept, None where nothing was or where its file is damaged."""
    try:
        kept = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s: cannot be read (%s); counting anew", path, error)
        return None
    return kept if isinstance(kept, dict) and kept.keys() & {"answer", "refused"} else None


def _digest(module: str, request: Mapping[str, Any]) -> str:
    text = json.dumps([module, request, _versions()], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _versions() -> list[str]:
    """Return the versions of the libraries, and a digest of the code that counts."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(name)
    return [*found, _digest_of_code()]


def _digest_of_code() -> str:
    total = hashlib.sha256()
    for path in sorted((PACKAGE / "models").rglob("*.py")):
        text = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE)}:{len(text)}:".encode() + text)
    return total.hexdigest()
