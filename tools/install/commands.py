"""The commands of an install, as data: pip's or uv's, and where torch comes from. Starts nothing.

torch may come from PyTorch's own index, which has builds for a CPU and for several CUDA versions.
Everything else, torch's own needs included, comes from the user's index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TORCH_INDEX = "https://download.pytorch.org/whl"
TORCH_BUILDS = ("cpu", "cu126", "cu130")
INSTALLERS = ("pip", "uv")
# pip's settings about where packages come from; uv reads none of them
SOURCE_SETTINGS = re.compile(
    r"\.(index-url|extra-index-url|find-links|no-index|constraint|proxy|cert|trusted-host)="
)
SOURCE_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
# On all cores. Some packages have templates that are no Python; pip passes over them too.
COMPILE = """
import compileall, sysconfig
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)
"""


class Step(NamedTuple):
    """One command of an install; `env` is added to the environment."""

    title: str
    command: list[str]
    env: dict[str, str]


class TorchSource(NamedTuple):
    """Which build of torch to install, and the index that has it."""

    build: str
    index: str


def torch_source(environ: Mapping[str, str], platform: str) -> TorchSource | None:
    """Return what TORCH asks for, None where it is not set: then the user's index decides.

    Raises SystemExit for another value than TORCH_BUILDS has.
    """
    build = environ.get("TORCH", "")
    if not build:
        return None
    if build not in TORCH_BUILDS:
        raise SystemExit(f"TORCH={build} is not valid; write {', '.join(TORCH_BUILDS)}")
    if platform != "linux":
        if build != "cpu":
            raise SystemExit(f"TORCH={build}: PyTorch has CUDA builds for Linux; leave TORCH out")
        return None  # the only build there is
    index = environ.get("TORCH_INDEX") or TORCH_INDEX
    return TorchSource(build, f"{index.rstrip('/')}/{build}")


def choose_installer(environ: Mapping[str, str], has_uv: bool, pip_config: str) -> str:
    """Return "uv" where it is there and would find the same packages as pip, else "pip".

    `pip_config` is what `pip config list` prints. INSTALLER overrides the choice. Raises SystemExit
    for another value, and where uv is asked for and not there.
    """
    asked = environ.get("INSTALLER", "")
    if asked and asked not in INSTALLERS:
        raise SystemExit(f"INSTALLER={asked} is not valid; write {' or '.join(INSTALLERS)}")
    if asked == "uv" and not has_uv:
        raise SystemExit("INSTALLER=uv: no uv on PATH; python3 -m pip install uv, or INSTALLER=pip")
    if asked:
        return asked
    has_own_sources = any(environ.get(name) for name in SOURCE_VARIABLES)
    if SOURCE_SETTINGS.search(pip_config):
        has_own_sources = True
    return "uv" if has_uv and not has_own_sources else "pip"


def install_steps(
    root: Path, python: Path, installer: str, source: TorchSource | None, has_gpu: bool = False
) -> list[Step]:
    """Return the steps that install the pinned packages for the interpreter `python`."""
    install = install_command(python, installer)
    if installer == "pip":
        install.append("--no-compile")  # one core does it; the last step takes all
    constraints = ["-c", str(root / "requirements.lock")]
    steps = []
    if source is not None:
        torch = f"torch=={torch_pin(root)}+{source.build}"
        words = [*install, "--index-url", source.index, "--no-deps", torch]
        steps.append(Step(f"torch for {source.build} from {source.index}", words, {}))
    build = [*install, "-r", str(root / "requirements-build.txt"), *constraints]
    steps.append(Step("torch and build tools", build, {}))
    # DeepSpeed is built against the torch that is there; it compiles its ops when a run needs them
    rest = [*install, "--no-build-isolation", "-r", str(root / "requirements.txt")]
    steps.append(Step("training, data and front end", rest, {"DS_BUILD_OPS": "0"}))
    if has_gpu and (source is None or source.build != "cpu"):
        kernels = [*install, "-r", str(root / "requirements-gpu.txt")]
        steps.append(Step("kernels for GPUs", kernels, {}))
    steps.append(Step("bytecode", [str(python), "-c", COMPILE], {}))
    return steps


def install_command(python: Path, installer: str) -> list[str]:
    """Return the words that start an install for the interpreter `python`."""
    if installer == "uv":
        return ["uv", "pip", "install", "--python", str(python)]
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]


def venv_command(python: str, venv: Path, installer: str) -> list[str]:
    """Return the command that makes an empty virtual environment, with pip."""
    if installer == "uv":
        # the folder exists: it has the log
        return ["uv", "venv", "--seed", "--allow-existing", "--python", python, str(venv)]
    return [python, "-m", "venv", str(venv)]


def torch_pin(root: Path) -> str:
    """Return the version of torch in requirements-build.txt."""
    text = (root / "requirements-build.txt").read_text(encoding="utf-8")
    found = re.search(r"^torch==(\S+)", text, re.MULTILINE)
    assert found, "requirements-build.txt pins torch"
    return found[1]
