"""Programs that are started in this project's folder."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def outcome_of(
    command: Sequence[str | Path], environ: Mapping[str, str], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what a program printed and its code; it is stopped after some seconds."""
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds
    )
