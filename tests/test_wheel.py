"""The wheel of the project: its files, its requirements, and runs from it in an empty folder."""

import os
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from conftest import ROOT

import sft_play

SMALL = ["train.max_steps=1", "train.predict_with_generate=false", "train.reopen_saved=false"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install .` builds, by the installed setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program sft-play of an environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    words = ["--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return folder / "bin" / "sft-play"


def tracked(*folders: str) -> set[str]:
    """Return the files that git has in these folders."""
    found = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(found.stdout.split())


def test_the_wheel_has_the_package_and_what_a_run_reads_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    inside = tracked("configs", "scripts", "data/desk", "data/gsm8k", "data/tiny_llama")
    inside |= {path.name for path in ROOT.glob("requirements*.txt")}
    packages = tracked("sft_play", "sft_kernels/*.py", "notebook_converter")
    assert names == packages | {f"sft_play/_project/{name}" for name in inside}


def test_the_wheel_requires_what_the_requirements_files_name(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    described = Parser().parsestr(archive.read(name).decode())
    assert described["Version"] == sft_play.__version__
    required = described.get_all("Requires-Dist")
    text = (ROOT / "requirements.txt").read_text()
    for line in text.partition("# work on SFT-Play itself")[0].splitlines():
        package = line.partition("#")[0].partition("=")[0].rstrip("<>").strip()
        if package and not package.startswith("-"):
            assert any(each.startswith(package) for each in required), package
    assert "torch<2.14,>=2.11" in required
    assert not [each for each in required if each.startswith(("pytest", "ruff", "mkdocs"))]
    assert described.get_all("Provides-Extra") == ["bench", "gguf", "unsloth"]


@pytest.mark.slow
def test_the_installed_program_plans_and_checks_in_an_empty_folder(installed, tmp_path):
    environ = {**os.environ, "DEVICE": "cpu"}
    environ.pop("PYTHONPATH", None)
    for command, words in (("plan", "2.7 million weights"), ("doctor", "requirements.txt")):
        done = subprocess.run(
            [installed, command], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert words in done.stdout, done.stderr


@pytest.mark.long
def test_the_installed_program_trains_into_the_current_folder(installed, tmp_path):
    environ = {**os.environ, "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONPATH", None)
    words = [f"--set={setting}" for setting in (*SMALL, "train.run_name=first")]
    done = subprocess.run(
        [installed, "train", *words], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "sft-play chat RUN=first" in done.stdout
    assert (tmp_path / "outputs" / "first" / "adapter" / "adapter_model.safetensors").is_file()
    assert (
        "run first: done"
        in subprocess.run(
            [installed, "watch", "RUN=first"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
        ).stdout
    )
