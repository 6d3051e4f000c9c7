"""`make install`: what it installs and from where, and how it mends a broken .venv."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from sft_play.monitor import packages
from tools.install import __main__ as program
from tools.install import commands, environment, watched
from tools.install.commands import Step, TorchSource

ROOT = Path(__file__).resolve().parents[1]


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one module and one script into a package index."""
    package = folder / name
    package.mkdir(parents=True)
    wheel = f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(package / wheel, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\ndef main(): print(version)\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    (package / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')


def begin_venv(folder: Path) -> None:
    """Make a virtual environment as an install that was cut short leaves it.

    Its pip is a link to ours: installing pip takes longer than all the rest.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages_of_venv,) = folder.glob("lib/python*/site-packages")
    installed = Path(metadata.distribution("pip").locate_file(""))
    for path in installed.glob("pip*"):
        (packages_of_venv / path.name).symlink_to(path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with our Makefile and installer, whose pins are two tiny packages."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools" / "install", project / "tools" / "install")
    (project / "tools" / "__init__.py").touch()
    shutil.copy(ROOT / "Makefile", project)
    (project / "requirements-build.txt").write_text("torch==2.13.0\n")
    (project / "requirements.txt").write_text("-r requirements-build.txt\ntiny==1.0\n")
    (project / "requirements-gpu.txt").write_text("tiny==1.0\n")
    (project / "requirements.lock").write_text("torch==2.13.0\ntiny==1.0\n")
    begin_venv(project / ".venv")
    write_wheel(tmp_path / "whl" / "cpu", "torch", "2.13.0+cpu")
    write_wheel(tmp_path / "index", "tiny", "1.0")
    return project


def make(project: Path, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project, with the two indexes beside it as the only ones."""
    folder = project.parent
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{folder.as_uri()}/index",
        "TORCH_INDEX": f"{folder.as_uri()}/whl",
        **variables,
    }
    return subprocess.run(
        ["make", target], cwd=project, env=environ, capture_output=True, text=True, timeout=120
    )


def script(project: Path, name: str) -> str:
    return subprocess.run([project / ".venv" / "bin" / name], capture_output=True, text=True).stdout


def test_an_install_takes_torch_from_its_own_index_and_mends_a_venv_cut_short_and_moved(
    project, monkeypatch, capsys
):
    done = make(project, "install", TORCH="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on with the install into .venv" in done.stdout
    assert "torch for cpu from file://" in done.stdout
    assert script(project, "torch") == "2.13.0+cpu\n"
    assert make(project, ".venv/.installed").stdout == "", "nothing to do"

    moved = project.rename(project.with_name("moved"))
    (half,) = moved.glob(".venv/lib/python*/site-packages/tiny-*.dist-info")
    (half / "RECORD").unlink()
    monkeypatch.setattr(program, "VENV", moved / ".venv")
    program.prepare("pip")
    told = capsys.readouterr().out
    assert f".venv was moved from {project}" in told
    assert "tiny-1.0 was half installed: once more" in told
    assert script(moved, "torch") == "2.13.0+cpu\n"

    python = moved / ".venv" / "bin" / "python"
    version = environment.version_of(python)
    assert environment.why_anew(moved / ".venv", None) is None
    assert (
        environment.why_anew(moved / ".venv", "3.9")
        == f"it is of Python {version}, and PYTHON is 3.9"
    )
    python.unlink()
    assert environment.why_anew(moved / ".venv", None) == "its Python is gone or does not start"


def test_a_python_of_another_version_than_the_packages_makes_a_venv_anew(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "lib" / "python3.9" / "site-packages").mkdir(parents=True)
    assert environment.why_anew(tmp_path, None) == "it is half made"
    (tmp_path / "pyvenv.cfg").touch()
    assert "its packages are for another version" in environment.why_anew(tmp_path, None)


def test_only_a_virtual_environment_is_deleted(tmp_path):
    folder = tmp_path / ".venv"
    folder.mkdir()
    (folder / environment.LOG_NAME).touch()
    environment.remove(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="is not a virtual environment; move it away"):
        environment.remove(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(SystemExit, match="is a link to"):
        environment.remove(link)
    assert (folder / "thesis.txt").exists()


def test_torch_names_a_build_of_pytorchs_index():
    named = commands.torch_source({"TORCH": "cu126"}, "linux")
    assert named == TorchSource("cu126", "https://download.pytorch.org/whl/cu126")
    mirror = {"TORCH": "cpu", "TORCH_INDEX": "https://mirror.example/whl/"}
    assert commands.torch_source(mirror, "linux").index == "https://mirror.example/whl/cpu"
    assert commands.torch_source({}, "linux") is None
    assert commands.torch_source({"TORCH": "cpu"}, "darwin") is None
    with pytest.raises(SystemExit, match="TORCH=cuda is not valid; write cpu, cu126, cu130"):
        commands.torch_source({"TORCH": "cuda"}, "linux")
    with pytest.raises(SystemExit, match="leave TORCH out"):
        commands.torch_source({"TORCH": "cu130"}, "darwin")


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_only_torch_comes_from_pytorchs_index_and_at_the_pinned_version(installer):
    source = TorchSource("cpu", "https://download.pytorch.org/whl/cpu")
    first, *rest = commands.install_steps(ROOT, Path("/venv/bin/python"), installer, source)
    pin = commands.torch_pin(ROOT)
    assert first.command[-4:] == ["--index-url", source.index, "--no-deps", f"torch=={pin}+cpu"]
    assert not any(source.index in step.command for step in rest)
    assert all("/venv/bin/python" in step.command for step in [first, *rest])


def test_kernels_for_gpus_come_where_a_driver_is_seen():
    def titles(source, has_gpu):
        steps = commands.install_steps(ROOT, Path("/venv/bin/python"), "pip", source, has_gpu)
        return [step.title for step in steps]

    cpu = TorchSource("cpu", "https://download.pytorch.org/whl/cpu")
    assert "kernels for GPUs" in titles(None, has_gpu=True)
    assert "kernels for GPUs" not in titles(None, has_gpu=False)
    assert "kernels for GPUs" not in titles(cpu, has_gpu=True)


@pytest.mark.parametrize("words", ["--help", "check", "add", "add a.txt b.txt", "--check again"])
def test_words_that_do_not_exist_are_refused_with_those_that_do(monkeypatch, words):
    def install():
        raise AssertionError("installs")

    monkeypatch.setattr(program, "install", install)
    monkeypatch.setattr(program, "add", lambda file: install())
    with pytest.raises(SystemExit, match=f"tools.install {words}: no such words; write add FILE"):
        program.main(words.split())


def test_uv_installs_only_where_it_finds_what_pip_finds():
    choose = commands.choose_installer
    assert choose({}, False, "") == "pip"
    assert choose({}, True, "global.timeout='60'\n") == "uv"
    assert choose({}, True, "global.index-url='https://mirror.example'\n") == "pip"
    assert choose({"PIP_FIND_LINKS": "/wheels"}, True, "") == "pip"
    assert choose({"PIP_FIND_LINKS": "/wheels", "INSTALLER": "uv"}, True, "") == "uv"
    assert choose({"INSTALLER": "pip"}, True, "") == "pip"
    with pytest.raises(SystemExit, match="INSTALLER=uv: no uv on PATH"):
        choose({"INSTALLER": "uv"}, False, "")
    with pytest.raises(SystemExit, match="INSTALLER=conda is not valid; write pip or uv"):
        choose({"INSTALLER": "conda"}, True, "")


def test_a_long_step_is_not_silent_and_large_downloads_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watched, "QUIET_SECONDS", 0.05)
    talk = "print('Collecting a', flush=True); import time; time.sleep(0.3); print('  Downloading a.whl (1.2 GB)')"
    step = Step("packages", [sys.executable, "-S", "-c", talk], {})
    watched.run_watched(step, tmp_path / "log")
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "  packages ..."
    assert "  packages: 0 s, Collecting a" in told
    assert "  Downloading a.whl (1.2 GB)" in told
    assert told[-1] == "  packages: done in 0 s"
    assert "Collecting a\n" in (tmp_path / "log").read_text()


def test_a_failed_step_ends_with_its_last_lines_and_what_to_type(tmp_path):
    talk = "print('ERROR: [Errno 28] No space left on device'); raise SystemExit(1)"
    step = Step("packages", [sys.executable, "-S", "-c", talk], {})
    with pytest.raises(SystemExit) as raised:
        watched.run_watched(step, tmp_path / "log")
    text = str(raised.value)
    assert "    ERROR: [Errno 28] No space left on device" in text
    assert "free some room" in text and "type make install again" in text


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("error: Failed to establish a new connection: [Errno 101]", "PIP_INDEX_URL"),
        ("ERROR: No matching distribution found for torch==2.13.0", "PYTHON=python3.12"),
        ("SSLError(CERTIFICATE_VERIFY_FAILED)", "PIP_CERT"),
        ("something else", "the lines above"),
    ],
)
def test_advice_fits_the_error(output, advice):
    assert advice in watched.advice_for(output)


def test_a_host_without_a_driver_is_told_of_the_small_torch(monkeypatch):
    monkeypatch.setattr(program, "has_torch", lambda: False)
    monkeypatch.setattr(program.sys, "platform", "linux")
    for cuda, words in ((None, "TORCH=cpu"), (12, "TORCH=cu126"), (13, "2.7 GB")):
        monkeypatch.setattr(program, "driver_cuda", lambda cuda=cuda: cuda)
        (line,) = program.torch_lines(None)
        assert words in line
    assert program.torch_lines(TorchSource("cpu", "")) == []


def test_the_installer_and_the_doctor_know_the_same_pythons():
    known = packages.PYTHONS
    assert (known[0], known[-1]) == (environment.OLDEST_PYTHON, environment.NEWEST_PYTHON)
    assert all(environment.is_supported(version) for version in known)


def test_an_unsupported_python_is_refused_with_one_that_is_there(monkeypatch):
    monkeypatch.setattr(program.sys, "version_info", (3, 10, 1))
    monkeypatch.setattr(program, "other_python", lambda: "python3.12")
    with pytest.raises(
        SystemExit, match=r"needs 3\.11 to 3\.14; type make install PYTHON=python3\.12"
    ):
        program.refuse_python()


def test_a_misspelt_variable_is_refused_before_anything_is_downloaded():
    program.refuse_misspelt("TORCH INSTALLER PIP_INDEX_URL PY")
    with pytest.raises(SystemExit, match=r"TROCH: .* did you mean TORCH"):
        program.refuse_misspelt("TROCH")
