"""The folder .venv: what was installed into it, what is wrong with it, and how it is mended.

Its stamp, `.venv/.installed`, is written last: without one an install was cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)
PIN_FILES = (
    "requirements.txt",
    "requirements-build.txt",
    "requirements-gpu.txt",
    "requirements.lock",
)
LOG_NAME = "install.log"
ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
START_SECONDS = 60  # on a slow network disk the first start of Python takes a while


def python_of(venv: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return venv / "bin" / "python"


def stamp_of(venv: Path, root: Path = ROOT) -> dict[str, str]:
    """Return the stamp that this interpreter would write after an install into `venv`."""
    digest = hashlib.sha256()
    for name in PIN_FILES:
        digest.update((root / name).read_bytes())
    return {
        "python": dotted(sys.version_info[:2]),
        "folder": os.path.realpath(venv),
        "pins": digest.hexdigest(),
    }


def read_stamp(venv: Path) -> dict[str, str]:
    """Return the stamp of the last install, an empty one where none was completed."""
    try:
        found = json.loads((venv / ".installed").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    """Mark an install as complete."""
    unfinished = venv / ".installed.tmp"
    unfinished.write_text(json.dumps(stamp, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(unfinished, venv / ".installed")


def dotted(version: tuple[int, ...]) -> str:
    """Return (3, 11) as 3.11."""
    return ".".join(map(str, version))


def version_of(python: Path) -> str | None:
    """Return the version of an interpreter, such as 3.11, or None where it does not start."""
    try:
        done = subprocess.run(
            [str(python), "-S", "-c", ASK_VERSION],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode().strip() or None


def why_anew(venv: Path, wanted: str | None) -> str | None:
    """Return why `venv` must be made anew, None where it can be kept or is not there.

    `wanted` is the version of a Python that the user named, such as 3.12.
    """
    if not venv.exists() and not venv.is_symlink():
        return None
    if not (venv / "pyvenv.cfg").exists():
        return "it is half made"
    version = version_of(python_of(venv))
    if version is None:
        return "its Python is gone or does not start"
    if not (venv / "lib" / f"python{version}" / "site-packages").is_dir():
        return f"its Python is now {version}, and its packages are for another version"
    if not is_supported(tuple(map(int, version.split(".")))):
        return f"it is of Python {version}"
    if wanted is not None and version != wanted:
        return f"it is of Python {version}, and PYTHON is {wanted}"
    return None


def is_supported(version: tuple[int, ...]) -> bool:
    """Return whether the pins have wheels for a version of Python."""
    return OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON


def remove(venv: Path) -> None:
    """Delete a virtual environment that cannot be used.

    Raises SystemExit for a link, and for a folder that is something else.
    """
    if venv.is_symlink():
        raise SystemExit(f"{venv} is a link to {os.readlink(venv)}; rm {venv}, then make install")
    is_environment = (venv / "pyvenv.cfg").exists()
    if not is_environment and any(path.name != LOG_NAME for path in files_in(venv)):
        raise SystemExit(f"{venv} is not a virtual environment; move it away, then make install")
    shutil.rmtree(venv)


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and in those below it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def forget_half_unpacked(venv: Path) -> list[str]:
    """Delete the metadata of packages whose install was cut short, and return their names.

    pip writes RECORD last; without it pip takes the package for installed and cannot remove it.
    """
    names = []
    for metadata in sorted(venv.glob("lib/python*/site-packages/*.dist-info")):
        if not (metadata / "RECORD").exists():
            shutil.rmtree(metadata)
            names.append(metadata.name[: -len(".dist-info")])
    return names


def mend_scripts(venv: Path, old: str) -> int:
    """Write this folder's path into the scripts of a moved `venv`; return how many named `old`."""
    new = os.path.realpath(venv)
    mended = 0
    for script in sorted((venv / "bin").iterdir()):
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if b"\0" in content or old.encode() not in content:
            continue
        mode = script.stat().st_mode
        script.write_bytes(content.replace(old.encode(), new.encode()))
        script.chmod(mode)
        mended += 1
    return mended
