"""Containers and clocks of other machines, as namespaces of this one."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from calls import outcome_of

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")  # with the name of its host
# What psutil adds to the ticks since boot is moved, for one process and those below it
MOVED_CLOCK = """
sed "s/^btime .*/btime $(($(sed -n 's/^btime //p' /proc/stat) + MOVED))/" /proc/stat > "$STAT" &&
mount --bind "$STAT" /proc/stat && exec "$@"
"""


def can_unshare() -> bool:
    """Return whether this host allows namespaces of processes, mounts and time."""
    try:
        command = [*CONTAINER, "--time", "true"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or not can_unshare(), reason="namespaces need root and unshare"
)


def moved_clock(words: Sequence[str], stat: Path, seconds: int = 3600) -> list[str]:
    """Return a command line for which the time of the boot has moved."""
    environ = ["env", f"MOVED={seconds}", f"STAT={stat}"]
    return ["unshare", "--mount", *environ, "sh", "-c", MOVED_CLOCK, "sh", *words]


def in_container(
    words: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command in a namespace of processes of its own, on the same disk."""
    return run([*CONTAINER, *words], environ, seconds)


def run(
    words: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command from the project's folder, with variables on top."""
    return outcome_of(words, {**os.environ, **(environ or {})}, seconds)
