"""Findings of `make doctor` about Python, the pinned packages and torch."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from sft_play.errors import ExitClass
from sft_play.monitor import packages
from sft_play.monitor.gpus import Driver
from sft_play.monitor.packages import Finding, TorchBuild, exit_class
from sft_play.plan.devices import GIB, Gpu

ROOT = Path(__file__).resolve().parents[1]
ONE_GPU = (Gpu(0, "NVIDIA H200", 139 * GIB, 139 * GIB, (9, 0), "GPU-a"),)


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "requirements.txt").write_text(f"psutil=={metadata.version('psutil')}\n")
    return tmp_path


def test_doctor_fails_when_a_pinned_package_is_missing(project):
    (project / "requirements.txt").write_text("no-such-package==1.0\n")
    findings = packages.package_findings(project / "requirements.txt")
    assert findings[1] == Finding(
        "missing", "no-such-package", "not installed, the pin is ==1.0", "make install"
    )
    torch, absent = packages.torch_findings(None, (), None), project / "none.txt"
    for found in (findings, list(torch), packages.package_findings(absent)):
        assert exit_class(found) == ExitClass.ENVIRONMENT == 13


def test_another_version_than_the_pin_warns(project):
    (project / "requirements.txt").write_text("psutil==0.1\n")
    (finding,) = packages.package_findings(project / "requirements.txt")[1:]
    assert (finding.level, finding.subject, finding.fix) == ("warn", "psutil", "make install")
    assert metadata.version("psutil") in finding.found and "0.1" in finding.found


def test_requirements_may_hold_comments_options_markers_and_continuations(project):
    psutil_version = metadata.version("psutil")
    (project / "requirements.txt").write_text(
        "# pins\n\n-r other.txt\n-c constraints.txt\n--extra-index-url https://example.org/#a\n"
        f"psutil=={psutil_version}  # why\nPyYAML>=6 \\\n  --hash=sha256:00\npywin32==1; "
        f"sys_platform == 'win32'\n"
        "typer[all]>0 --no-binary typer\ntorch==0.1\n"
    )
    assert packages.package_findings(project / "requirements.txt") == [
        Finding("ok", "packages", "3 tested versions, as requirements.txt pins them")
    ]


def test_a_version_within_a_range_is_tested_newer_or_neither(project, monkeypatch):
    (project / "requirements.txt").write_text("psutil>=1,<9999\n")
    found = metadata.version("psutil")

    def finding(tested):
        monkeypatch.setitem(packages.TESTED, "psutil", tested)
        return packages.package_findings(project / "requirements.txt")

    assert [each.level for each in finding(["0.1", found])] == ["ok"]
    newer, other = finding(["0.1", "0.2"])[1], finding(["0.1", "9998"])[1]
    assert newer.found == f"{found}, newer than tested: tested is 0.1 and 0.2"
    assert other.found == f"{found}, not tested: tested is 0.1 and 9998"


def test_the_versions_that_were_tested_are_those_of_the_lock_and_newer_ones():
    lock = (ROOT / "requirements.lock").read_text()
    for name, (locked, *newer) in packages.TESTED.items():
        assert f"\n{name}=={locked}\n" in lock
        assert all(Version(each) > Version(locked) for each in newer)


def test_a_line_that_is_no_requirement_is_named_by_its_number(project):
    (project / "requirements.txt").write_text("psutil>0\nfoo bar\n")
    finding = packages.package_findings(project / "requirements.txt")[1]
    assert (finding.level, finding.fix) == ("warn", "correct requirements.txt:2")


def test_the_unsloth_extra_is_optional(project):
    extra = project / "requirements-unsloth.txt"
    assert packages.optional_findings(extra, True) == []
    extra.write_text("-r requirements.txt\nno-such-package==1\n")
    (finding,) = packages.optional_findings(extra, True)
    assert finding.level == "ok" and "make install-unsloth" in finding.found
    extra.write_text("psutil>0\nno-such-package==1\n")
    assert [finding.level for finding in packages.optional_findings(extra, True)] == ["ok", "warn"]


def test_kernels_for_gpus_are_asked_for_on_a_gpu_alone(project):
    kernels = project / "requirements-gpu.txt"
    kernels.write_text("no-such-kernels==1\n")
    assert packages.gpu_kernel_findings(kernels, has_gpu=False) == []
    (finding,) = packages.gpu_kernel_findings(kernels, has_gpu=True)
    assert finding.level == "warn" and "many times slower" in finding.found
    assert finding.fix == "python -m tools.install add requirements-gpu.txt"
    kernels.write_text("psutil>0\n")
    (finding,) = packages.gpu_kernel_findings(kernels, has_gpu=True)
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10), "missing"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "warn")],
)
def test_python_is_supported_from_3_11_to_3_14(version, level):
    assert packages.python_finding(version).level == level


@pytest.mark.parametrize(
    ("version", "cuda", "found", "nvidia", "levels"),
    [
        ("2.13.0+cpu", None, (), None, ["ok"]),
        ("2.11.0+cu130", (13, 0), ONE_GPU, Driver("580.95", (13, 0)), ["ok"]),
        ("2.10.0", None, (), None, ["warn"]),
        ("2.14.0", None, (), None, ["warn"]),
        ("2.13.0+cpu", None, ONE_GPU, Driver("580.95", (13, 0)), ["warn"]),
        ("2.13.0", (13, 0), ONE_GPU, Driver("550.54", (12, 4)), ["ok", "warn"]),
    ],
)
def test_torch_is_judged_by_version_build_and_driver(version, cuda, found, nvidia, levels):
    findings = list(packages.torch_findings(TorchBuild(version, cuda), found, nvidia))
    assert [finding.level for finding in findings] == levels
    assert all(finding.fix for finding in findings if finding.level != "ok")


@pytest.mark.parametrize(
    ("text", "version", "build"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
            "2.13.0",
            TorchBuild("2.13.0+cpu", None),
        ),
        (
            "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n",
            "2.11.0",
            TorchBuild("2.11.0+cu130", (13, 0)),
        ),
        ("", "2.11.0+cu126", TorchBuild("2.11.0+cu126", (12, 6))),
        ("", "2.13.0", TorchBuild("2.13.0", None)),
    ],
)
def test_the_torch_build_is_read_from_its_files(text, version, build):
    assert packages.parse_torch_version(text, version) == build


def test_the_installed_torch_build_is_what_torch_says():
    torch = pytest.importorskip("torch")
    cuda = tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else None
    assert packages.torch_build() == TorchBuild(torch.__version__, cuda)
