"""A process that will open saved weights, forked while nothing of a run is imported yet.

It has imported transformers, and of this project nothing that computes. So saved weights need not
wait for imports, and are opened as a stranger does anyway. It touches no GPU before that.
"""

import contextlib
import gc
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from sft_play import stops
from sft_play.config.loader import environment
from sft_play.config.place import is_of_launcher
from sft_play.runs.files import json_line

SCRIPT = Path(__file__).with_name("plain.py")
# What the script needs, as far as importing it starts no CUDA: PEFT's would, by way of bitsandbytes
LIBRARIES = ("transformers.models.auto.tokenization_auto", "transformers.masking_utils")
MODELS = "transformers.modeling_utils"  # imports torchao if it is installed, which starts CUDA
POLL_SECONDS = 0.02
SECONDS = 3600

_waiting: list[tuple[int, int]] = []  # its process id, and the pipe on which it waits


def fork_opener() -> None:
    """Fork the process. Call it before CUDA is used, and before anything that changes libraries.

    Its variables are those of now, without a launcher's. A second call does nothing.
    """
    if _waiting:
        return
    has_torchao = importlib.util.find_spec("torchao") is not None
    for name in LIBRARIES if has_torchao else (*LIBRARIES, MODELS):
        importlib.import_module(name)
    import torch  # it takes seconds, so not above

    if torch.cuda.is_initialized():
        return  # no fork could use it
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
    _waiting.append((pid, writing))


def dismiss() -> None:
    """End the process that waits: nothing will be saved that it is to open."""
    while _waiting:
        pid, pipe = _waiting.pop()
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, b"\n")
        os.close(pipe)
        os.waitpid(pid, 0)


def run_opener(asked: Path, answered: Path, printed: Path) -> int:
    """Run the script in the process that waits, else in one that is started now.

    Return its exit code; what it prints is in `printed`.
    Raises: TimeoutError after SECONDS.
    """
    if _waiting:
        pid, pipe = _waiting.pop()
        try:
            os.write(pipe, json_line([str(asked), str(answered), str(printed)]).encode())
            os.close(pipe)
        except BrokenPipeError:  # it was killed, as for memory
            pass
        else:
            return _exit_code(pid)
    # with a launcher's variables transformers would wait for the other ranks
    environ = {name: value for name, value in environment().items() if not is_of_launcher(name)}
    # -P: the folder of the script contains modules of this project
    words = [sys.executable, "-P", str(SCRIPT), str(asked), str(answered)]
    with printed.open("wb") as file:
        # in a new session: Ctrl-C stops the run, whose weights are checked anyway
        process = subprocess.Popen(
            words, env=environ, stdout=file, stderr=file, start_new_session=True
        )
    return _exit_code(process.pid)


def _exit_code(pid: int) -> int:
    """Return the exit code of a process, once it has ended."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    raise TimeoutError(f"saved weights were not opened within {SECONDS} s")


def _serve(reading: int) -> NoReturn:
    """Answer one request, and end."""
    code = 1
    try:
        stops.leave_to_parent()  # Ctrl-C stops the run, whose weights are checked anyway
        os.setsid()
        with os.fdopen(reading, encoding="utf-8") as pipe:
            # not to the end: processes that prepare batches have the other end open, too
            request = pipe.readline().strip()
        if request:
            asked, answered, printed = json.loads(request)
            descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            for name in filter(is_of_launcher, list(os.environ)):
                del os.environ[name]
            runpy.run_path(str(SCRIPT))["answer_request"](asked, answered)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)
