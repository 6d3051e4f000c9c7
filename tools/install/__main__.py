"""`make install`, and the check before every other target.

    .venv/bin/python -S -m tools.install --check    exit code 0 if .venv is as the pins say
    python3 -m tools.install                        make it so
    .venv/bin/python -m tools.install add FILE      add a requirements file to this Python

INSTALLER=pip or uv, TORCH=cpu, cu126 or cu130, TORCH_INDEX=<a mirror of PyTorch's index>,
TRANSFORMERS=newest or a version in place of the one that requirements.lock pins.

torch may come from PyTorch's own index, which has builds for a CPU and for several CUDA versions.
Everything else, torch's own needs included, comes from the user's index. The stamp .venv/.installed
is written last: without one an install was cut short.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.install.driver import driver_cuda, tell_size

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / (os.environ.get("INSTALL_INTO") or ".venv")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # that the pins have wheels for
PIN_FILES = (
    "requirements.txt",
    "requirements-build.txt",
    "requirements-gpu.txt",
    "requirements.lock",
)
INSTALLERS = ("pip", "uv")
TORCH_BUILDS = ("cpu", "cu126", "cu130")
TORCH_INDEX = "https://download.pytorch.org/whl"
VARIABLES = ("TORCH", "TORCH_INDEX", "INSTALLER", "PYTHON", "TRANSFORMERS")
NEWEST = "newest"
# what a version of transformers may want newer: with another version, the lock is their least one
BELOW_TRANSFORMERS = ("huggingface_hub", "tokenizers", "safetensors")
VERSION = re.compile(r"\d+(\.\d+)+")
MAKE_VENV = {
    "pip": [sys.executable, "-m", "venv", str(VENV)],
    "uv": ["uv", "venv", "--seed", "--python", sys.executable, str(VENV)],
}
USAGE = "no such words; write add FILE for a requirements file, --check, or nothing to install all"
ENVIRON = {**os.environ, "DS_BUILD_OPS": "0"}
EVERY_SECONDS = 8  # between two lines of an install
LINES_SHOWN = 30  # of a log, if an install fails
ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def main(words: list[str]) -> int:
    """Check or install; return the exit code."""
    if words == ["--check"]:  # `make install` goes over everything
        is_as_pinned = read_stamp().items() >= make_stamp().items()
        return int(bool(os.environ.get("INSTALL_AGAIN")) or not is_as_pinned)
    if words and (len(words) != 2 or words[0] != "add"):
        raise SystemExit(f"python -m tools.install {' '.join(words)}: {USAGE}")
    refuse_python(version_of(sys.executable))
    refuse_misspelt(os.environ.get("SFT_PLAY_VARIABLES", ""))
    try:
        if words:
            add(words[1])
        else:
            with one_install_at_a_time():
                install()
    except KeyboardInterrupt:
        print("\nstopped; make install continues from here", file=sys.stderr)
        return 130
    return 0


def refuse_python(version: str | None) -> None:
    """Raise SystemExit if this Python is too old or too new, with one to use instead."""
    if version not in PYTHONS:
        here = [f"python{each}" for each in PYTHONS if shutil.which(f"python{each}")]
        fix = "install one, such as sudo apt-get install python3.12 python3.12-venv"
        if here:
            fix = f"type make install PYTHON={here[0]}"
        raise SystemExit(f"Python {version}: SFT-Play needs {PYTHONS[0]} to {PYTHONS[-1]}; {fix}")


def refuse_misspelt(names: str) -> None:
    """Raise SystemExit for a variable of make's command line that is nearly one of ours.

    sft_play refuses other unknown ones; it cannot run before what it needs is downloaded.
    """
    for name in names.split():
        meant = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.7)
        if meant and name not in VARIABLES:
            raise SystemExit(f"{name}: make install has no such variable; did you mean {meant[0]}?")


def add(name: str) -> None:
    """Install a requirements file into this Python, and keep its transformers if that is newer.

    Raises SystemExit if the file has a highest version of transformers, and this one is newer.
    """
    found, locked = installed_transformers(Path(sys.prefix)), locked_transformers()
    is_newer = found is not None and locked is not None and numbers(found) > numbers(locked)
    cap = re.search(r"(?m)^transformers<=(\S+)", (ROOT / name).read_text(encoding="utf-8"))
    if is_newer and cap and numbers(found) > numbers(cap[1]):
        raise SystemExit(
            f"{name} needs transformers {cap[1]} or older, and {sys.prefix} has {found}; type "
            f"make install, which goes back to {locked}, then this again"
        )
    with requirements(found if is_newer else "") as folder:
        file = folder / name if (folder / name).exists() else ROOT / name
        run([*install_command(sys.executable, "pip"), "-r", str(file)])


def install() -> None:
    """Make .venv, or bring it up to the pins."""
    python = str(VENV / "bin" / "python")
    check = [python, "-S", "-m", "tools.install", "--check"]
    if version_of(python) and subprocess.run(check, cwd=ROOT).returncode == 0:
        return  # another make has just done it
    installer = choose(INSTALLERS, "INSTALLER", "pip")
    build = choose(TORCH_BUILDS, "TORCH", "")
    transformers = choose_transformers()
    reason = why_anew()
    if reason is not None:
        print(f"{VENV.name} is made again: {reason}", flush=True)
        remove()
    if not VENV.exists():
        print(f"installing into {VENV.name} with {installer} (a few minutes, once)", flush=True)
        run(MAKE_VENV[installer])
    forget_half_unpacked()
    cuda = driver_cuda()
    if sys.platform == "linux" and not build:
        tell_size(cuda)
    found, locked = installed_transformers(VENV), locked_transformers()
    if found not in (None, locked) and not transformers:
        print(
            f"transformers {found} is replaced by {locked}, which requirements.lock pins; "
            f"make install TRANSFORMERS={found} keeps it",
            flush=True,
        )
    has_gpu = cuda is not None
    with requirements(transformers) as folder:
        (VENV / "install.log").write_bytes(b"")
        for title, command in install_commands(python, installer, build, has_gpu, folder).items():
            run_logged(title, [*command, "--upgrade"] if transformers == NEWEST else command)
    stamp = make_stamp(version_of(python))
    if transformers:
        stamp["transformers"] = installed_transformers(VENV)
    text = json.dumps(stamp, indent=2, sort_keys=True)
    (VENV / ".installed").write_text(text + "\n", encoding="utf-8")
    print("installed" + tell_transformers(stamp, locked), flush=True)


def tell_transformers(stamp: dict[str, str], locked: str | None) -> str:
    """Return what to say of a version of transformers that was asked for, nothing without one."""
    if "transformers" not in stamp:
        return ""
    return (
        f", with transformers {stamp['transformers']} instead of the {locked} that "
        "requirements.lock pins; make install without TRANSFORMERS goes back"
    )


def choose_transformers() -> str:
    """Return newest or a version of transformers, "" for the one that is locked.

    `make install` reads TRANSFORMERS; what any other target mends stays as it was chosen.
    Raises SystemExit for a version outside the range of requirements.txt.
    """
    wanted = os.environ.get("TRANSFORMERS", "")
    if not os.environ.get("INSTALL_AGAIN"):
        return read_stamp().get("transformers", "")
    if wanted in ("", NEWEST):
        return wanted
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    least, below = re.search(r"(?m)^transformers>=([\d.]+),<([\d.]+)", text).groups()
    is_version = VERSION.fullmatch(wanted)
    if not is_version or not numbers(least) <= numbers(wanted) < numbers(below):
        raise SystemExit(
            f"TRANSFORMERS={wanted} is not valid; write newest, or a version of at least {least} "
            f"and below {below}, such as {locked_transformers()}"
        )
    return wanted


def numbers(version: str) -> list[int]:
    """Return 5.17.0 as [5, 17, 0], to compare versions."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def locked_transformers() -> str | None:
    """Return the version of transformers that the lock pins."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.search(r"(?m)^transformers==(\S+)", lock)
    return found and found[1]


def installed_transformers(prefix: Path) -> str | None:
    """Return the version of transformers in an environment, None if it has none."""
    found = [
        metadata.stem.split("-")[1]
        for metadata in prefix.glob("lib/python*/site-packages/transformers-*.dist-info")
    ]
    return found[0] if found else None


@contextlib.contextmanager
def requirements(transformers: str) -> Iterator[Path]:
    """Yield a folder with the requirements files; their lock allows `transformers`, if not ""."""
    if not transformers:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in ROOT.glob("requirements*"):
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".lock":
                text = unlock(text, transformers)
            (Path(folder) / file.name).write_text(text, encoding="utf-8")
        yield Path(folder)


def unlock(lock: str, transformers: str) -> str:
    """Return a lock that pins another version of transformers, and newest not at all."""
    for name in BELOW_TRANSFORMERS:
        lock = re.sub(rf"(?m)^{name}==", f"{name}>=", lock)
    pin = "" if transformers == NEWEST else f"transformers=={transformers}"
    return re.sub(r"(?m)^transformers==.*", pin, lock)


def choose(values: tuple[str, ...], name: str, default: str) -> str:
    """Return the value of a variable. Raises SystemExit if it is none of `values`."""
    value = os.environ.get(name) or default
    if value and value not in values:
        raise SystemExit(f"{name}={value} is not valid; write {', '.join(values)}")
    return value


def run(command: list[str]) -> None:
    """Run a command. Raises SystemExit if it fails; what it printed says why."""
    done = subprocess.run(command, env=ENVIRON, check=False)
    if done.returncode != 0:
        raise SystemExit("see what the lines above say, then type make install again")


def run_logged(title: str, command: list[str]) -> None:
    """Run an installer whose lines go to install.log, and print one line every few seconds.

    Raises SystemExit if it fails, after the last lines of the log.
    """
    log, started = VENV / "install.log", time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=ENVIRON, stdout=file, stderr=subprocess.STDOUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        while process.poll() is None:
            print(f"{title}: {time.monotonic() - started:.0f} s, {doing(log)}", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EVERY_SECONDS)
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-LINES_SHOWN:]), flush=True)
        raise SystemExit(f"see what the lines above and {log} say, then type make install again")
    print(f"{title}: done in {time.monotonic() - started:.0f} s", flush=True)


def doing(log: Path) -> str:
    """Return what an installer was doing by its log, cut to a terminal's width."""
    text = log.read_text(encoding="utf-8", errors="replace")
    done = re.findall(r"(?m)^ *((?:Collecting|Downloading|Processing|Building|Installing).*)", text)
    return done[-1][:80] if done else "starting"


def install_commands(
    python: str, installer: str, build: str, has_gpu: bool, folder: Path = ROOT
) -> dict[str, list[str]]:
    """Return the commands that install the requirements files of a folder, by what they install."""
    install = install_command(python, installer)
    retries = ["--retries", "1"] if installer == "pip" else []  # torch may lie elsewhere, too
    commands = {}
    if build:
        pins = (ROOT / "requirements-build.txt").read_text(encoding="utf-8").split()
        (torch,) = [pin for pin in pins if pin.startswith("torch==")]
        index = f"{(os.environ.get('TORCH_INDEX') or TORCH_INDEX).rstrip('/')}/{build}"
        torch = f"{torch}+{build}"
        commands[torch] = [*install, *retries, "--index-url", index, "--no-deps", torch]
    lock = str(folder / "requirements.lock")
    build_file = str(folder / "requirements-build.txt")
    commands["torch and build tools"] = [*install, "-r", build_file, "-c", lock]
    # DeepSpeed is built against the torch that is there; it compiles its ops when a run needs them
    rest = str(folder / "requirements.txt")
    commands["libraries"] = [*install, "--no-build-isolation", "-r", rest]
    if has_gpu and build != "cpu":
        commands["kernels for GPUs"] = [*install, "-r", str(folder / "requirements-gpu.txt")]
    return commands


def install_command(python: str, installer: str) -> list[str]:
    """Return the words that start an install for an interpreter."""
    if installer == "uv":
        return ["uv", "pip", "install", "--python", python]
    return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]


def make_stamp(version: str | None = None) -> dict[str, str]:
    """Return the stamp of an install by this interpreter, or by one of another version."""
    pins = b"".join((ROOT / name).read_bytes() for name in PIN_FILES)
    return {
        "python": version or "{}.{}".format(*sys.version_info[:2]),
        "folder": os.path.realpath(VENV),
        "pins": hashlib.sha256(pins).hexdigest(),
    }


def read_stamp() -> dict[str, str]:
    """Return the stamp of the last install, an empty one if none was completed."""
    try:
        return json.loads((VENV / ".installed").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def version_of(python: str) -> str | None:
    """Return the version of an interpreter, such as 3.11, or None if it does not start."""
    try:
        done = subprocess.run([python, "-S", "-c", ASK_VERSION], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def why_anew() -> str | None:
    """Return why .venv must be made again, None if it can be kept or is not there."""
    if not VENV.exists() and not VENV.is_symlink():
        return None
    version = version_of(str(VENV / "bin" / "python"))
    if version is None or not (VENV / "lib" / f"python{version}" / "site-packages").is_dir():
        return "its Python is gone, does not start or has changed"
    wanted = version_of(sys.executable) if os.environ.get("PYTHON", "python3") != "python3" else ""
    if version not in PYTHONS or wanted not in ("", version):
        return f"it is of Python {version}"
    folder = os.path.realpath(VENV)
    moved_from = read_stamp().get("folder", folder)
    return None if moved_from == folder else f"it was moved from {moved_from}"


def remove() -> None:
    """Delete .venv. Raises SystemExit for a link, and for a folder that is something else."""
    if VENV.is_symlink():
        raise SystemExit(f"{VENV} is a link to {os.readlink(VENV)}; rm {VENV}, then make install")
    if not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir()):
        raise SystemExit(f"{VENV} is not a virtual environment; move it away, then make install")
    shutil.rmtree(VENV)


def forget_half_unpacked() -> None:
    """Delete the metadata of packages whose install was cut short.

    pip writes RECORD last; without it pip takes the package for installed and cannot remove it.
    """
    for metadata in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (metadata / "RECORD").exists():
            print(f"{metadata.stem} was half installed: once more", flush=True)
            shutil.rmtree(metadata)


@contextlib.contextmanager
def one_install_at_a_time() -> Iterator[None]:
    """Wait for another make that installs into the same .venv."""
    import fcntl

    with Path(__file__).open() as own_source:
        with contextlib.suppress(OSError):  # a network disk without locks
            fcntl.flock(own_source, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
