"""Refuse a call of make that cannot mean what it says. Every target runs this; needs no package."""

import os
import re
import sys
from pathlib import Path

READ_NOTHING = {"help", "clean"}


def problem() -> str | None:
    """Return what is wrong with the call in the environment, and what to type; None if nothing."""
    goals = os.environ["SFT_PLAY_TARGETS"].split() or ["help"]
    names = [
        name for name in os.environ["SFT_PLAY_VARIABLES"].split() if name not in ("PY", "PYTHON")
    ]
    folder = os.environ["SFT_PLAY_MAKEFILE"].strip().removesuffix("Makefile")
    call = f"make {' '.join(goals)}"
    if names and READ_NOTHING.issuperset(goals):
        return (
            f"{call} reads no variable, such as {' '.join(names)}; name a target that does, such "
            "as make train"
        )
    if not Path.cwd().samefile(folder or "."):
        return (
            f"this is not the folder of the Makefile: type make -C '{folder}' {' '.join(goals)}; "
            "paths in variables start there, too"
        )
    if not re.fullmatch(r"[\w/.+@:=-]+", os.environ["PY"], re.ASCII):
        return (
            f"PY={os.environ['PY']}: write the path of one Python program, such as python3, "
            "without spaces and signs of the shell"
        )
    return None


if __name__ == "__main__":
    sys.exit(problem())
