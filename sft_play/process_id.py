"""One identity of a process, which no clock that is set and no other container changes.

On Linux it is the clock ticks after boot at which the process started, the boot, and the namespaces
that its number and these ticks belong to. Another system has none of these: there it is the start
that psutil reports, in seconds since the epoch, which moves if the clock is set.
"""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROC = Path("/proc")
STARTED = 22 - 4  # field 22 of /proc/PID/stat, of those after its state, the third
ENDED = ("Z", "X")  # a zombie was killed, and its parent has not asked for its end


@dataclass(frozen=True)
class ProcessId:
    """Which process, of which boot of which machine."""

    pid: int
    host: str
    started: float  # clock ticks after boot; elsewhere than on Linux seconds since the epoch
    boot: str | None = None  # None on other systems than Linux
    namespace: str | None = None

    @classmethod
    def read(cls, pid: int | None = None) -> Self | None:
        """Return the identity of a process, by default of this one; None if it has ended.

        Raises: PermissionError for a process that the system hides.
        """
        number = os.getpid() if pid is None else pid
        try:
            started = _read_start(number)
        except ProcessLookupError:
            return None
        return cls(number, socket.gethostname(), started, _read_boot(), _read_namespace())

    @classmethod
    def from_json(cls, values: Any) -> Self | None:
        """Return the identity that a file has, None if it has none."""
        try:
            return cls(**values)
        except TypeError:
            return None

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it ran, or runs, under the kernel of this process."""
        is_known = self.boot is not None or self.host == socket.gethostname()
        return is_known and self.boot == _read_boot()

    @property
    def is_here(self) -> bool:
        """Whether its number means the same process to this one."""
        return self.is_of_this_boot and self.namespace == _read_namespace()

    def is_alive(self) -> bool | None:
        """Return whether the process lives; None if this one cannot see it.

        That is on another machine, before this boot, in another container, and where /proc hides
        the processes of other users.
        """
        if not self.is_here:
            return None
        try:
            return abs(_read_start(self.pid) - self.started) < 1
        except ProcessLookupError:
            return False
        except PermissionError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _read_boot() -> str | None:
    """Return the id of this boot, None elsewhere than on Linux."""
    if sys.platform != "linux":
        return None
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _read_namespace() -> str | None:
    """Return the namespaces of process numbers and of the time since boot."""
    if sys.platform != "linux":
        return None
    spaces = (PROC / "self/ns" / name for name in ("pid", "time"))
    return " ".join(os.readlink(space) for space in spaces if space.is_symlink())


def _read_start(pid: int) -> float:
    """Return when a process started.

    Raises: ProcessLookupError if it has ended, PermissionError if it is hidden.
    """
    if sys.platform != "linux":
        return _read_start_elsewhere(pid)
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except FileNotFoundError:
        os.kill(pid, 0)  # sends nothing, and finds what hidepid= of /proc hides
        raise PermissionError(f"/proc shows no process {pid}, and there is one") from None
    state, *fields = text.rpartition(")")[2].split()
    if state in ENDED:
        raise ProcessLookupError(f"process {pid} has ended")
    return float(fields[STARTED])


def _read_start_elsewhere(pid: int) -> float:
    import psutil

    try:
        process = psutil.Process(pid)
        started = process.create_time()
        has_ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        has_ended = True
    except psutil.AccessDenied:
        raise PermissionError(f"process {pid} is hidden") from None
    if has_ended:
        raise ProcessLookupError(f"process {pid} has ended")
    return started
