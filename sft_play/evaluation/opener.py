"""A process that will open saved weights, forked while nothing of a run is imported yet.

It has imported transformers, and of this project nothing that computes. So saved weights need not
wait for imports, and are opened as a stranger does all the same. It touches no GPU before that.
"""

import gc
import importlib
import json
import os
import runpy
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sft_play import stops

SCRIPT = Path(__file__).with_name("plain.py")
# What the script needs of transformers. PEFT's import would start CUDA, by way of bitsandbytes
LIBRARIES = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
# Variables of a launcher's ranks, which would make transformers wait for the others
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ACCELERATE_", "TORCHELASTIC_")
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Opener:
    """A process that waits for one request."""

    pid: int
    pipe: int

    def answer(self, asked: Path, answered: Path, said: Path, seconds: float) -> int:
        """Let it answer the script's request; return its exit code. What it prints goes to `said`.

        Raises: TimeoutError after so many seconds.
        """
        os.write(self.pipe, json.dumps([str(asked), str(answered), str(said)]).encode())
        os.close(self.pipe)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(POLL_SECONDS)
        raise TimeoutError


_waiting: list[Opener] = []


def start() -> None:
    """Fork the process. Call it before CUDA is used, and before anything that changes libraries.

    Its variables are those of now, without a launcher's.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    reading, writing = os.pipe()
    gc.freeze()  # so that fewer pages are copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of BLAS, which know of forks
        pid = os.fork()
    if pid == 0:
        os.close(writing)
        _serve(reading)
    gc.unfreeze()
    os.close(reading)
    _waiting.append(Opener(pid, writing))


def is_started() -> bool:
    """Return whether a process waits."""
    return bool(_waiting)


def take() -> Opener | None:
    """Return the process that waits, for the only request that it answers; None without one."""
    return _waiting.pop() if _waiting else None


def _serve(reading: int) -> NoReturn:
    """Answer one request, and end."""
    code = 1
    try:
        stops.end_with_parent()
        stops.ignore()  # Ctrl-C stops the run, whose weights are checked all the same
        os.setsid()
        with os.fdopen(reading, encoding="utf-8") as pipe:
            request = pipe.read()
        if request:
            asked, answered, said = json.loads(request)
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            for name in [name for name in os.environ if name.startswith(OF_RANKS)]:
                del os.environ[name]
            runpy.run_path(str(SCRIPT))["answer"](asked, answered)
        code = 0
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends
        traceback.print_exc()
    finally:
        os._exit(code)
