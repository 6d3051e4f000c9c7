"""`make install`: what it installs and from where, and how it mends a broken .venv."""

import os
import re
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

ROOT = Path(__file__).resolve().parents[1]
LOCK = "requirements.lock"


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one module and one script into a package index."""
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
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
    with (package / "index.html").open("a") as page:
        page.write(f'<a href="{wheel}">{wheel}</a>\n')


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
def project(tmp_path) -> Path:
    """A project with our Makefile and installer, whose pins are three tiny packages."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools" / "install", project / "tools" / "install")
    (project / "tools" / "__init__.py").touch()
    shutil.copy(ROOT / "Makefile", project)
    (project / "requirements-build.txt").write_text("torch==2.13.0\n")
    (project / "requirements.txt").write_text(
        "-r requirements-build.txt\n-c requirements.lock\ntiny==1.0\ntransformers>=5.17,<6\n"
    )
    (project / "requirements-gpu.txt").write_text("tiny==1.0\n")
    (project / "requirements.lock").write_text("torch==2.13.0\ntiny==1.0\ntransformers==5.17.0\n")
    begin_venv(project / ".venv")
    write_wheel(tmp_path / "whl" / "cpu", "torch", "2.13.0+cpu")
    write_wheel(tmp_path / "index", "tiny", "1.0")
    for version in ("5.17.0", "5.24.0", "6.0.0"):
        write_wheel(tmp_path / "index", "transformers", version)
    return project


def make(project: Path, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project, with the two indexes next to it as the only ones."""
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


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder that the installer takes for .venv."""
    folder = tmp_path / ".venv"
    monkeypatch.setattr(program, "VENV", folder)
    return folder


def test_an_install_takes_torch_from_its_own_index_and_goes_on_where_one_was_cut_short(project):
    done = make(project, "install", TORCH="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch==2.13.0+cpu: done in " in done.stdout and "Processing" not in done.stdout
    assert "Processing" in (project / ".venv" / "install.log").read_text()
    assert script(project, "torch") == "2.13.0+cpu\n"
    assert make(project, ".venv/.installed").stdout == "", "nothing to do"

    (half,) = project.glob(".venv/lib/python*/site-packages/tiny-*.dist-info")
    (half / "RECORD").unlink()
    (project / ".venv" / ".installed").unlink()
    done = make(project, ".venv/.installed", TORCH="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny-1.0 was half installed: once more" in done.stdout
    assert "made again" not in done.stdout
    assert script(project, "tiny") == "1.0\n"


@pytest.mark.long
def test_another_transformers_is_installed_where_it_is_asked_for_and_stays_until_make_install(
    project,
):
    def installed(target: str, **variables: str) -> str:
        done = make(project, target, TORCH="cpu", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return script(project, "transformers").strip() + done.stdout

    assert installed("install").startswith("5.17.0")
    newest = installed("install", TRANSFORMERS="newest")
    assert newest.startswith("5.24.0") and script(project, "tiny") == "1.0\n"
    assert installed(".venv/.installed") == "5.24.0", "nothing to do"
    (project / "requirements-gpu.txt").write_text("# another pin\n")
    assert installed(".venv/.installed").startswith("5.24.0"), "pins have changed"
    back = installed("install")
    assert back.startswith("5.17.0")
    assert "make install TRANSFORMERS=5.24.0 keeps it" in back


def test_an_addition_keeps_a_newer_transformers_and_unsloth_refuses_it(monkeypatch):
    ran = []

    def run(command: list[str]) -> None:
        file = Path(command[-1])
        ran.append(re.findall("(?m)^transformers==.*", file.with_name(LOCK).read_text()))

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program, "installed_transformers", lambda prefix: "5.99.0")
    program.add("requirements-gguf.txt")
    assert ran == [["transformers==5.99.0"]]
    with pytest.raises(SystemExit, match=r"needs transformers 5\.17\.0 or older, .* make install,"):
        program.add("requirements-unsloth.txt")
    monkeypatch.setattr(program, "installed_transformers", lambda prefix: "5.17.0")
    program.add("requirements-unsloth.txt")
    assert len(ran) == 2


def test_a_failed_install_says_what_to_type_and_leaves_no_stamp(project):
    done = make(project, "install", TORCH="cu126")
    assert done.returncode != 0
    assert "No matching distribution found for torch==2.13.0+cu126" in done.stdout + done.stderr
    assert "say, then type make install again" in done.stderr
    assert not (project / ".venv" / ".installed").exists()


def test_a_venv_that_cannot_be_kept_is_made_anew_with_the_reason(folder, monkeypatch):
    assert program.why_anew() is None, "there is none"
    begin_venv(folder)
    version = program.version_of(sys.executable)
    assert program.why_anew() is None
    (folder / ".installed").write_text('{"folder": "/elsewhere"}')
    assert program.why_anew() == "it was moved from /elsewhere"
    monkeypatch.setattr(program, "PYTHONS", ("3.8",))
    assert program.why_anew() == f"it is of Python {version}"
    (folder / "lib" / f"python{version}").rename(folder / "lib" / "python3.9")
    assert program.why_anew() == "its Python is gone, does not start or has changed"
    (folder / "bin" / "python").unlink()
    assert program.why_anew() == "its Python is gone, does not start or has changed"


def test_only_a_virtual_environment_is_deleted(folder, tmp_path, monkeypatch):
    folder.mkdir()
    (folder / "pyvenv.cfg").touch()
    program.remove()
    assert not folder.exists()
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="is not a virtual environment; move it away"):
        program.remove()
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(program, "VENV", link)
    with pytest.raises(SystemExit, match="is a link to"):
        program.remove()
    assert (folder / "thesis.txt").exists()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_only_torch_comes_from_pytorchs_index_and_at_the_pinned_version(installer, monkeypatch):
    monkeypatch.setenv("TORCH_INDEX", "https://mirror.example/whl/")
    commands = program.install_commands("/venv/bin/python", installer, "cpu", has_gpu=False)
    first, *rest = commands.values()
    assert first[-4:-1] == ["--index-url", "https://mirror.example/whl/cpu", "--no-deps"]
    pins = (ROOT / "requirements-build.txt").read_text()
    assert first[-1].endswith("+cpu") and first[-1].removesuffix("+cpu") in pins
    assert not any("--index-url" in command for command in rest)
    assert all("/venv/bin/python" in command for command in [first, *rest])


def test_kernels_for_gpus_come_where_a_driver_is_seen():
    def has_kernels(build, has_gpu):
        commands = program.install_commands("/venv/bin/python", "pip", build, has_gpu)
        return "kernels for GPUs" in commands

    assert has_kernels("", has_gpu=True)
    assert not has_kernels("", has_gpu=False)
    assert not has_kernels("cpu", has_gpu=True)


def test_a_host_without_a_driver_is_told_of_the_small_torch(capsys):
    for cuda, words in ((None, "TORCH=cpu"), (12, "TORCH=cu126"), (13, "2.7 GB")):
        program.tell_size(cuda)
        assert words in capsys.readouterr().out


def test_the_installer_and_the_doctor_know_the_same_pythons():
    assert [".".join(map(str, known)) for known in packages.PYTHONS] == list(program.PYTHONS)


def fail(*arguments):
    raise AssertionError("installs")


@pytest.mark.parametrize(
    ("environ", "call", "said"),
    [
        (
            {"TORCH": "cuda"},
            lambda: program.choose(program.TORCH_BUILDS, "TORCH", ""),
            "cpu, cu126",
        ),
        (
            {"INSTALLER": "conda"},
            lambda: program.choose(program.INSTALLERS, "INSTALLER", "pip"),
            "INSTALLER=conda .*pip, uv",
        ),
        *(
            ({"INSTALL_AGAIN": "yes", "TRANSFORMERS": wanted}, program.choose_transformers, wanted)
            for wanted in ("6.0.0", "5.16", "latest", "5.24.0.dev0")
        ),
        ({}, lambda: program.main(["check"]), "check: .*add FILE"),
        ({}, lambda: program.main(["add", "a.txt", "b.txt"]), "add a.txt b.txt: "),
        ({}, lambda: program.refuse_python("3.10"), r"3\.11 to 3\.14; .*PYTHON=python3\.12"),
        ({}, lambda: program.refuse_misspelt("TORCH PY TROCH"), "TROCH: .*TORCH"),
    ],
)
def test_what_cannot_be_installed_is_refused_before_anything_is_done(
    monkeypatch, environ, call, said
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "install", fail)
    monkeypatch.setattr(program, "run", fail)
    monkeypatch.setattr(program.shutil, "which", lambda name: name if name[-2:] == "12" else None)
    with pytest.raises(SystemExit, match=said):
        call()
