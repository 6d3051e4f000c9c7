"""Run an installer's command, say now and then what it does, and on failure what to type."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from tools.install.commands import Step

QUIET_SECONDS = 30.0  # without a line on the terminal
LINES_SHOWN = 15  # of a command that failed
# pip: `Downloading torch-2.13.0.whl (554.0 MB)`; uv: `Downloading torch (528.3MiB)`
LARGE_DOWNLOAD = re.compile(r"^\s*Downloading (\S+) \(([\d.]+\s?[MG]i?B)\)")
LARGE_MEGABYTES = 50.0
WORTH_TELLING = re.compile(
    r"^\s*(Collecting|Downloading|Downloaded|Using cached|Building|Installing|Prepared)"
)

# the first pattern that a failed command's lines match says what to type
ADVICE = (
    (r"No space left on device", "free some room (or TMPDIR=<a folder on a larger disk>)"),
    (
        r"Temporary failure in name resolution|Name or service not known|dns error"
        r"|Failed to establish a new connection|ConnectTimeout|Network is unreachable"
        r"|Connection refused",
        "check the network and its proxy (HTTPS_PROXY), or name a mirror: PIP_INDEX_URL for "
        "packages, TORCH_INDEX for PyTorch's",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate",
        "name your network's certificates: PIP_CERT=<file.pem>",
    ),
    (
        r"Could not find a version that satisfies|No matching distribution|No solution found",
        "this Python or machine has no build of the package named above; try another Python, "
        "PYTHON=python3.12",
    ),
    (r"ensurepip is not available", "sudo apt-get install python3-venv"),
)


def run_watched(step: Step, log: Path) -> None:
    """Run a step to its end; its output goes to `log`, and a line now and then to the terminal.

    Raises SystemExit with the last lines and with what to type when it fails.
    """
    started = time.monotonic()
    print(f"  {step.title} ...", flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(step.command)}\n")
        lines, code = _run(step, file, started)
    if code != 0:
        raise SystemExit(failure_text(step, lines, log))
    print(f"  {step.title}: done in {spoken(time.monotonic() - started)}", flush=True)


def _run(step: Step, file: IO[str], started: float) -> tuple[list[str], int]:
    """Return the lines that a step printed, and its exit code."""
    process = subprocess.Popen(
        step.command,
        env={**os.environ, **step.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    arrived: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, arrived), daemon=True).start()
    lines = []
    latest = ""
    told_at = time.monotonic()
    try:
        while True:
            try:
                line = arrived.get(timeout=max(0.0, told_at + QUIET_SECONDS - time.monotonic()))
            except queue.Empty:
                elapsed = spoken(time.monotonic() - started)
                print(f"  {step.title}: {elapsed}, {latest or 'no word yet'}", flush=True)
                told_at = time.monotonic()
                continue
            if line is None:
                return lines, process.wait()
            file.write(line)
            lines.append(line.rstrip())
            if WORTH_TELLING.match(line):
                latest = shortened(line)
            if is_large_download(line):
                print(f"  {latest}", flush=True)
                told_at = time.monotonic()
    finally:
        if process.poll() is None:  # Ctrl-C reached this process alone
            process.terminate()
            process.wait()


def _read(stream: IO[str], arrived: queue.Queue[str | None]) -> None:
    for line in stream:
        arrived.put(line)
    arrived.put(None)


def is_large_download(line: str) -> bool:
    """Return whether a line tells of a download that takes a while."""
    found = LARGE_DOWNLOAD.match(line)
    if not found:
        return False
    megabytes = float(re.sub(r"[^\d.]", "", found[2]))
    return "G" in found[2] or megabytes >= LARGE_MEGABYTES


def shortened(line: str) -> str:
    """Return a line of pip's or uv's that fits beside the title of its step."""
    text = line.strip()
    return text if len(text) <= 80 else text[:77] + "..."


def spoken(seconds: float) -> str:
    """Return a duration in words.

    >>> spoken(125.3)
    '2 min 5 s'
    """
    minutes = int(seconds) // 60
    rest = int(seconds) % 60
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def failure_text(step: Step, lines: list[str], log: Path) -> str:
    """Return the end of a failed command's output, and what to type next."""
    shown = [f"    {line}" for line in lines[-LINES_SHOWN:] if line.strip()]
    advice = advice_for("\n".join(lines))
    return "\n".join(
        [
            f"  {step.title}: failed; the end of its output:",
            *shown,
            f"  all of it is in {log}",
            f"  {advice}, then type make install again: it goes on from here",
        ]
    )


def advice_for(output: str) -> str:
    """Return what to do about the output of a command that failed."""
    for pattern, advice in ADVICE:
        if re.search(pattern, output):
            return advice
    return "see what the lines above say"
