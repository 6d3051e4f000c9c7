"""One TensorBoard of our own: start it, find it again, stop it and nothing else.

A pid file names the process. It also holds the process's start time, so that a pid that the system
has since given to another program is never taken for ours. Imports neither torch nor tensorboard.
"""

import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel

from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.process_id import ProcessId
from sft_play.runs.files import read_json, write_json

HOST = "127.0.0.1"  # loopback: training logs are not for the network
PORTS_TRIED = 21  # the one that was asked for and the 20 after it
START_SECONDS = 20.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 2.0
LOG = ".log"  # in place of the pid file's suffix
LOG_LINES_SHOWN = 8
# The groups of cards are sorted by name, `train` last: the loss is pinned above them
OPENS_ON = "/?pinnedCards=" + quote('[{"plugin":"scalars","tag":"train/loss"}]')


class _Served(BaseModel):
    """What TensorBoard says of itself."""

    data_location: str


@dataclass(frozen=True)
class Board:
    """A TensorBoard, as the pid file has it."""

    process: ProcessId
    port: int
    logdir: str

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def start_tensorboard(
    logdir: Path, port: int, python: str, environ: Mapping[str, str], pid_file: Path
) -> tuple[Board, str]:
    """Return a TensorBoard that shows `logdir`, a running one or a new one, and what to print.

    A new one takes `port` or the next free port. It is started with the interpreter `python`,
    outlives this process, and writes its output next to the pid file.

    Raises: ConfigError for an invalid port; EnvironmentFault when no port is free, when it dies, or
    when it does not answer in 20 s.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"TB_PORT={port}: write a port of 1 to 65535, such as TB_PORT=6006")
    resolved = str(logdir.resolve())
    notes = []
    running = _running(pid_file)
    if running and running.logdir != resolved:
        notes.append(stop(pid_file))
    elif running and _wait_until_it_answers(running, pid_file):
        return running, f"TensorBoard runs already: {running.url}{OPENS_ON} (pid {running.pid})"
    candidates = range(port, min(port + PORTS_TRIED, 65536))
    for candidate in filter(_is_free, candidates):
        record = _spawn(resolved, candidate, python, environ, pid_file)
        if _wait_until_it_answers(record, pid_file):
            if candidate != port:
                notes.append(f"port {port} is taken, it uses {candidate}")
            started = f"TensorBoard: {record.url}{OPENS_ON} (pid {record.pid})"
            return record, "; ".join([started, *notes])
        if _is_free(candidate):
            raise EnvironmentFault(
                "TensorBoard died at its start; `make doctor` checks its package. "
                f"{_end_of_log(pid_file)}"
            )
    from sft_play.plan.launch import free_port  # loads psutil

    raise EnvironmentFault(
        f"TB_PORT={port}: no free port in {port} to {port + PORTS_TRIED - 1}; "
        f"choose another, such as TB_PORT={free_port()}"
    )


def stop(pid_file: Path, grace_seconds: float = 5.0, port: int | None = None) -> str:
    """Stop the TensorBoard of the pid file and return a sentence on what was done.

    It gets SIGTERM, and SIGKILL after `grace_seconds`. Raises: ConfigError if it runs on another
    port than the one that was named.
    """
    record = _running(pid_file)
    if record is None:
        pid_file.unlink(missing_ok=True)
        return "no TensorBoard of ours is running"
    if port not in (None, record.port):
        raise ConfigError(
            f"TB_PORT={port}: there is no TensorBoard of {record.logdir} on this port; it runs on "
            f"port {record.port}; type make tb-stop TB_PORT={record.port} to stop it"
        )
    _end(record.pid, grace_seconds)
    pid_file.unlink(missing_ok=True)
    return f"stopped the TensorBoard of {record.logdir} on port {record.port} (pid {record.pid})"


def _running(pid_file: Path) -> Board | None:
    """Return the pid file's TensorBoard if that very process is alive."""
    try:
        record = Board(**read_json(pid_file))
        process = ProcessId.from_json(record.process)
    except (FileNotFoundError, ValueError, TypeError):  # TypeError: JSON of another shape
        return None
    return replace(record, process=process) if process and process.is_alive() else None


def _spawn(
    logdir: str, port: int, python: str, environ: Mapping[str, str], pid_file: Path
) -> Board:
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    options = ["--logdir", logdir, "--host", HOST, "--port", str(port)]
    with pid_file.with_suffix(LOG).open("wb") as log:
        try:
            child = subprocess.Popen(
                [python, "-m", "tensorboard.main", *options],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(
                f"TensorBoard cannot be started with {python}: {error.strerror}; run `make install`"
            ) from None
    child.returncode = 0  # it outlives us on purpose, of which Popen would warn when collected
    record = Board(ProcessId.read(child.pid), port, logdir)
    # before the wait: a start that Ctrl-C ends can still be stopped
    write_json(pid_file, asdict(record))
    return record


def _wait_until_it_answers(record: Board, pid_file: Path) -> bool:
    """Return True once the process serves its logdir, False as soon as it is dead.

    Raises: EnvironmentFault after 20 s.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not (record.process and record.process.is_alive()):
            pid_file.unlink(missing_ok=True)
            return False
        if _answers(record):
            return True
        time.sleep(POLL_SECONDS)
    stop(pid_file)
    raise EnvironmentFault(
        f"TensorBoard did not answer on port {record.port} in {START_SECONDS:.0f} s. "
        f"{_end_of_log(pid_file)}"
    )


def _answers(record: Board) -> bool:
    """Return whether the port shows our folder.

    Another program, or another project's TensorBoard, may have taken the port first.
    """
    from sft_play.http_client import (  # 0.2 s, and most commands start no TensorBoard
        NoAnswer,
        fetch,
    )

    try:
        answer = fetch(f"{record.url}/data/environment", ANSWER_SECONDS, uses_proxy=False)
        served = answer.parse(_Served)
    except NoAnswer:
        return False
    return served.data_location == record.logdir


def _end(pid: int, grace_seconds: float) -> None:
    """End a process and its children (TensorBoard's data server)."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            try:
                send(member)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=grace_seconds)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as TensorBoard binds: a listener holds a port, a closed connection that lingers does not
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _end_of_log(pid_file: Path) -> str:
    log = pid_file.with_suffix(LOG)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"The end of {log}:\n" + "\n".join(lines[-LOG_LINES_SHOWN:])
