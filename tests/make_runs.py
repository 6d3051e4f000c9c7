"""Training targets as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def run_make(target: str, folder: Path, seconds: int, **variables: str) -> str:
    """Run a make target to its end, its run in `folder`; return what it printed."""
    words = {"TRAIN_OUTPUT_DIR": str(folder), "RUN": "run", "PY": sys.executable, **variables}
    done = subprocess.run(
        ["make", target, *(f"{name}={value}" for name, value in words.items())],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
