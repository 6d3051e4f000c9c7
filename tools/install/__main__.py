"""`make install`, and the check before every other target.

    .venv/bin/python -S -m tools.install --check    exit code 0 where .venv is as the pins say
    python3 -m tools.install                        make it so
    .venv/bin/python -m tools.install add FILE      add a requirements file to this Python

INSTALLER=pip or uv, TORCH=cpu, cu126 or cu130, TORCH_INDEX=<a mirror of PyTorch's index>.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tools.install import environment
from tools.install.environment import ROOT

if TYPE_CHECKING:
    from tools.install.commands import TorchSource

VENV = ROOT / ".venv"
LOG = VENV / environment.LOG_NAME
VARIABLES = ("TORCH", "TORCH_INDEX", "INSTALLER", "PYTHON")
USAGE = "no such words; write add FILE for a requirements file, --check, or nothing to install all"
DEFAULT_CUDA = 13  # major version of the CUDA that PyPI's torch 2.13 for Linux is built for


def main(words: list[str]) -> int:
    """Check or install; return the exit code."""
    is_known = words in ([], ["--check"]) or (len(words) == 2 and words[0] == "add")
    if not is_known:
        raise SystemExit(f"python -m tools.install {' '.join(words)}: {USAGE}")
    if words == ["--check"]:
        is_asked = bool(os.environ.get("INSTALL_AGAIN"))  # `make install` goes over everything
        is_stale = environment.read_stamp(VENV) != environment.stamp_of(VENV)
        return int(is_asked or is_stale)
    refuse_python()
    refuse_misspelt(os.environ.get("SFT_PLAY_VARIABLES", ""))
    try:
        if words:
            add(Path(words[1]))
        else:
            install()
    except KeyboardInterrupt:
        print("\nstopped; make install goes on from here", file=sys.stderr)
        return 130
    return 0


def refuse_python() -> None:
    """Raise SystemExit where this Python is too old or too new, with one to use instead."""
    version = sys.version_info[:2]
    if environment.is_supported(version):
        return
    oldest = environment.dotted(environment.OLDEST_PYTHON)
    newest = environment.dotted(environment.NEWEST_PYTHON)
    found = other_python()
    if found is None:
        fix = "install one, such as sudo apt-get install python3.12 python3.12-venv"
    else:
        fix = f"type make install PYTHON={found}"
    raise SystemExit(
        f"Python {environment.dotted(version)} ({sys.executable}): "
        f"SFT-Play needs {oldest} to {newest}; {fix}"
    )


def refuse_misspelt(names: str) -> None:
    """Raise SystemExit for a variable of make's command line that is nearly one of ours.

    sft_play refuses other unknown ones; it cannot run before what it needs is downloaded.
    """
    for name in names.split():
        meant = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.7)
        if meant and name not in VARIABLES:
            raise SystemExit(f"{name}: make install has no such variable; did you mean {meant[0]}?")


def other_python() -> str | None:
    """Return the name of a supported Python on PATH, the one that most tests run on first."""
    oldest = environment.OLDEST_PYTHON[1]
    newest = environment.NEWEST_PYTHON[1]
    for minor in range(oldest, newest + 1):
        name = f"python3.{minor}"
        if environment.version_of(Path(name)) == f"3.{minor}":
            return name
    return None


def install() -> None:
    """Make .venv, or mend it, and install the pinned packages."""
    from tools.install import commands
    from tools.install.watched import run_watched

    source = commands.torch_source(os.environ, sys.platform)
    with one_install_at_a_time():
        if is_current():
            return  # another make has just done it
        has_uv = shutil.which("uv") is not None
        pip_config = pip_config_list() if has_uv else ""
        installer = commands.choose_installer(os.environ, has_uv, pip_config)
        prepare(installer)
        for line in torch_lines(source):
            print(line, flush=True)
        python = environment.python_of(VENV)
        has_gpu = driver_cuda() is not None
        for step in commands.install_steps(ROOT, python, installer, source, has_gpu):
            run_watched(step, LOG)
        write_stamp()
        print(f"installed; the whole output is in {LOG.relative_to(ROOT)}", flush=True)


def prepare(installer: str) -> None:
    """Leave a .venv with a Python that starts and a pip, and say what was wrong with it."""
    from tools.install import commands
    from tools.install.watched import run_watched

    named = os.environ.get("PYTHON", "python3")
    wanted = None
    if named != "python3":
        wanted = environment.dotted(sys.version_info[:2])
    reason = environment.why_anew(VENV, wanted)
    if reason is not None:
        print(f".venv is made anew: {reason}", flush=True)
        environment.remove(VENV)
    stamp = environment.read_stamp(VENV)
    (VENV / ".installed").unlink(missing_ok=True)
    if not VENV.exists():
        print(f"installing into .venv with {installer} (a few minutes, once)", flush=True)
        VENV.mkdir()
        command = commands.venv_command(sys.executable, VENV, installer)
        run_watched(commands.Step("an empty .venv", command, {}), LOG)
        return
    moved_from = stamp.get("folder", os.path.realpath(VENV))
    if not stamp:
        print(f"going on with the install into .venv, with {installer}", flush=True)
    elif moved_from != os.path.realpath(VENV):
        mended = environment.mend_scripts(VENV, moved_from)
        print(f".venv was moved from {moved_from}: {mended} scripts mended", flush=True)
    else:
        print(f"bringing .venv up to the pins, with {installer}", flush=True)
    for name in environment.forget_half_unpacked(VENV):
        print(f"{name} was half installed: once more", flush=True)
    ensure_pip()


def ensure_pip() -> None:
    """Give .venv a pip where it has none: what was cut short may be pip itself."""
    from tools.install import commands
    from tools.install.watched import run_watched

    python = str(environment.python_of(VENV))
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        run_watched(commands.Step("pip", [python, "-m", "ensurepip", "--upgrade"], {}), LOG)


def add(requirements: Path) -> None:
    """Install a requirements file for this Python, which may be the user's own."""
    from tools.install import commands
    from tools.install.watched import run_watched

    command = [*commands.install_command(Path(sys.executable), "pip"), "-r", str(requirements)]
    log = Path(sys.prefix) / "install.log"
    if not os.access(sys.prefix, os.W_OK):
        log = Path(os.devnull)
    run_watched(commands.Step(requirements.name, command, {}), log)


def torch_lines(source: TorchSource | None) -> list[str]:
    """Return what a user should know about the torch that comes, before it is downloaded."""
    if source is not None or sys.platform != "linux" or has_torch():
        return []
    cuda = driver_cuda()
    size = "PyPI's torch for Linux contains CUDA 13: 2.7 GB to download, 5 GB on disk"
    if cuda is None:
        small = "without a GPU type make install TORCH=cpu (0.2 GB)"
        return [f"no NVIDIA driver is seen here. {size}; {small}"]
    if cuda < DEFAULT_CUDA:
        return [
            f"{size}. This driver runs CUDA {cuda}: type make install TORCH=cu126, or update it"
        ]
    return [size]


def has_torch() -> bool:
    """Return whether .venv has a torch already, of whatever build."""
    return any(VENV.glob("lib/python*/site-packages/torch-*.dist-info"))


def driver_cuda() -> int | None:
    """Return the major version of CUDA that the NVIDIA driver runs, None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        version = ctypes.c_int()
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):  # no such library, or a driver from before 2018
        return None
    return version.value // 1000


def is_current() -> bool:
    """Return whether .venv holds what the pins say, asked of its own Python."""
    command = [str(environment.python_of(VENV)), "-S", "-m", "tools.install", "--check"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    except OSError:
        return False


def write_stamp() -> None:
    """Mark the install as complete, by the version of .venv's own Python."""
    version = environment.version_of(environment.python_of(VENV))
    environment.write_stamp(VENV, {**environment.stamp_of(VENV), "python": str(version)})


def pip_config_list() -> str:
    """Return pip's settings from files and the environment, empty where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True).stdout


@contextlib.contextmanager
def one_install_at_a_time() -> Iterator[None]:
    """Wait for another make that installs into the same .venv."""
    import fcntl

    with Path(__file__).open() as own_source:
        try:
            fcntl.flock(own_source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another make installs into .venv; waiting for it", flush=True)
            fcntl.flock(own_source, fcntl.LOCK_EX)
        except OSError:  # a network disk without locks
            pass
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
