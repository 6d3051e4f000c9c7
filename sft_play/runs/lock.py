"""run.lock: one run folder, one run. Loads no torch.

The front end takes it, and becomes the launcher with the same process id. A lock is worth nothing
once its process is gone, so it is never released: whoever comes next sees that and says so.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from sft_play.errors import EnvironmentFault
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import start_time

NAME = "run.lock"
# What the front end writes before run.json
EARLY = {NAME, "config.yaml", "plan.json", "asked.json"}
# A run writes a line to metrics.jsonl every 5 s; before training it may load for long
SILENT_SECONDS = 900.0


@dataclass(frozen=True)
class Holder:
    """The process that a run folder belongs to."""

    pid: int
    host: str
    started: float  # of the process, in seconds since the epoch

    @classmethod
    def this_process(cls) -> "Holder":
        """Return the process that calls this."""
        return cls(os.getpid(), socket.gethostname(), start_time(os.getpid()))

    @classmethod
    def from_text(cls, text: str) -> "Holder | None":
        """Return what a lock file says, None where it was cut off."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def is_alive(self, folder: RunFolder) -> bool:
        """Return whether the process still runs; on another host, whether its run gives signs."""
        if self.host != socket.gethostname():
            signs = (folder.path / NAME, folder.metrics, folder.path / "run.json")
            last_sign = max(path.stat().st_mtime for path in signs if path.exists())
            return time.time() - last_sign < SILENT_SECONDS
        started = start_time(self.pid)
        return started is not None and abs(started - self.started) < 1

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def take(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Make a run folder this process's own, also where its former holder is gone.

    Raises: EnvironmentFault where another process has it.
    """
    own = Holder.this_process()
    with (folder.path / NAME).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of two that come at once, one sees the other's name
        file.seek(0)
        text = file.read()
        holder = Holder.from_text(text)
        if holder != own:
            refuse_if_held(folder)
        if holder not in (None, own):
            say(f"{folder.path / NAME} was {holder}'s, which is gone; this run takes it over")
        file.truncate(0)
        file.write(json.dumps(asdict(own), sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def refuse_if_held(folder: RunFolder) -> None:
    """Raise EnvironmentFault where a run goes on in a folder."""
    path = folder.path / NAME
    holder = Holder.from_text(path.read_text(encoding="utf-8")) if path.exists() else None
    if holder is not None and holder != Holder.this_process() and holder.is_alive(folder):
        advice = f"make watch RUN={folder.path} follows it, kill {holder.pid} stops it"
        if holder.host != socket.gethostname():
            advice = f"where it is gone for good, rm {path}"
        raise EnvironmentFault(f"{folder.path}: {holder} trains in it; {advice}")
    report = folder.read_report()
    # the launcher was killed, and its ranks save a last checkpoint
    if report.state == "running" and report.is_here and report.is_alive():
        raise EnvironmentFault(
            f"{folder.path}: process {report.pid} on {report.host} trains in it; make watch "
            f"RUN={folder.path} follows it, kill {report.pid} stops it"
        )


def is_abandoned(folder: RunFolder) -> bool:
    """Return whether the front end of a run was killed before it had written run.json."""
    if not (folder.path / NAME).is_file():
        return False
    names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
    if not names <= EARLY:
        return False
    with (folder.path / NAME).open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until who takes it now has written its name
        holder = Holder.from_text(file.read())
    return holder is None or not holder.is_alive(folder)
