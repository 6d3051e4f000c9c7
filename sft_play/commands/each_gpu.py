"""A process on each GPU, for commands that share their rows: the same command with a number.

Loads no torch.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from sft_play import stops
from sft_play.commands.call import Call
from sft_play.config.loader import PROJECT_ROOT
from sft_play.errors import ExitClass, StoppedOnRequest, of_class
from sft_play.plan import devices
from sft_play.plan.launch import free_port
from sft_play.plan.ranks import visible_entries
from sft_play.runs.answer_file import PLACE, Place
from sft_play.runs.folder import RunFolder

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_END = 10.0  # after which a process that was asked to end is killed


def processes_of(call: Call, gpus_per_process: int = 1) -> int:
    """Return how many processes a command takes: one a GPU, or NUM_GPUS."""
    asked = call.invocation.num_gpus
    hardware = devices.detect(call.invocation.device, call.environ)
    if hardware.kind == "cpu":
        return asked or 1
    return max(1, min(asked or hardware.count, hardware.count) // gpus_per_process)


def own_place(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this process, None where it is the one that the user started.

    A process that has a place ends with the one that started it.
    """
    place = Place.of_environment(environ)
    if place is not None:
        stops.end_with_parent()
    return place


def run_on_each(
    command: str,
    overrides: Sequence[str],
    call: Call,
    run: RunFolder,
    count: int,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run `count` processes of a command to their end; `look` is called meanwhile.

    `overrides` are those of --set. Raises: StoppedOnRequest after a signal, and the error class of
    a process that failed.
    """
    words = [word for override in overrides for word in ("--set", override)]
    port = free_port()
    entries = visible_entries(call.environ.get("CUDA_VISIBLE_DEVICES"), count)
    children = []
    with _stopped_by_signals(), _ended(children):
        for number in range(count):
            environ = {
                **call.environ,
                "RUN": str(run.path),
                "PYTHONPATH": _python_path(call.environ),
                PLACE: f"{number}/{count}:{port}",
            }
            if call.invocation.device != "cpu":
                environ["CUDA_VISIBLE_DEVICES"] = entries[number]
            line = [sys.executable, "-m", "sft_play", command, *words]
            children.append(subprocess.Popen(line, env=environ, stdin=subprocess.DEVNULL))
        while any(child.poll() is None for child in children):
            _refuse_failed(children, command)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            look()
        _refuse_failed(children, command)


def _python_path(environ: Mapping[str, str]) -> str:
    paths = [str(PROJECT_ROOT), environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def _refuse_failed(children: Sequence[subprocess.Popen], command: str) -> None:
    for number, child in enumerate(children):
        if child.poll():
            known = child.returncode in set(ExitClass)
            raise of_class(
                child.returncode if known else None,
                f"{command}: process {number} of {len(children)} ended with exit code "
                f"{child.returncode}; it says why above",
            )


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise StoppedOnRequest in this context after a signal."""
    try:
        with stops.StopSignals():
            yield
    except KeyboardInterrupt:
        raise StoppedOnRequest("stopped") from None


@contextlib.contextmanager
def _ended(children: list[subprocess.Popen]) -> Iterator[None]:
    """End processes that still run when the context is left."""
    try:
        yield
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            try:
                child.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
