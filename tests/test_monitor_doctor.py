"""`make doctor`: what it finds of this host, on NVML answers that are planted."""

import os
import socket
from importlib import metadata
from pathlib import Path

import pytest
from fake_nvml import NO_DRIVER, card

from sft_play.errors import ExitClass
from sft_play.monitor import doctor
from sft_play.monitor.packages import Finding, exit_class, report_lines
from sft_play.plan.devices import GIB, Gpu

ONE_GPU = (Gpu(0, "NVIDIA H200", 139 * GIB, 139 * GIB, (9, 0), "GPU-a"),)


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "requirements.txt").write_text(f"psutil=={metadata.version('psutil')}\n")
    return tmp_path


def test_doctor_passes_a_host_that_has_its_pins(project, plant):
    plant(**NO_DRIVER)
    findings = doctor.examine(project, project / "outputs", {"PATH": os.environ["PATH"]})
    assert Finding("ok", "packages", "1 tested versions, as requirements.txt pins them") in findings
    assert [finding for finding in findings if finding.level == "missing"] == []
    assert exit_class(findings) == ExitClass.DONE


def test_nvidia_hardware_that_cannot_be_used_warns(tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text("0x10de\n")
    assert doctor.gpu_finding((), "the driver is not loaded", tmp_path).level == "warn"
    assert doctor.gpu_finding((), "no driver", tmp_path / "none").level == "ok"


def test_links_over_pcie_alone_are_flagged(plant):
    plant(card("GPU-a"), card("GPU-b"))
    (finding,) = doctor.link_findings((*ONE_GPU, Gpu(1, "NVIDIA H200", GIB, GIB, (9, 0), "GPU-b")))
    assert (finding.level, finding.found) == (
        "warn",
        "links: PCIe across CPU sockets (SYS) between the two GPUs",
    )


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        ("eth0", ["eth0"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1,lo", ["lo", "eth1"]),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
        ("ib", []),
    ],
)
def test_interfaces_are_selected_as_nccl_selects_them(value, selected):
    assert doctor.interfaces_of(value, ["lo", "eth0", "eth1", "docker0"]) == selected


def test_an_interface_that_is_not_here_fails_the_doctor():
    here = socket.if_nameindex()[0][1]
    good, bad = doctor.network_findings(
        {"NCCL_SOCKET_IFNAME": here, "GLOO_SOCKET_IFNAME": "nosuch0"}
    )
    assert (good.level, bad.level) == ("ok", "missing")
    assert here in bad.fix


@pytest.mark.parametrize(("address", "level"), [("127.0.0.1", "ok"), ("m" * 64, "missing")])
def test_the_master_address_must_resolve(address, level):
    (finding,) = doctor.network_findings({"MASTER_ADDR": address})
    assert finding.level == level


def test_secrets_are_never_shown():
    environ = {
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "secret",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HTTPS_PROXY": "secret",
    }
    assert (
        doctor.environment_finding(environ).found
        == "NCCL_DEBUG=INFO, HF_TOKEN is set, WANDB_API_KEY is set"
    )


def test_little_disk_space_warns(project, monkeypatch):
    assert str(project) in doctor.disk_finding(project / "outputs" / "not yet").found
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 2**80)
    finding = doctor.disk_finding(project / "outputs")
    assert (finding.level, "TRAIN_OUTPUT_DIR" in finding.fix) == ("warn", True)


def test_compilers_are_looked_for_beside_python_and_on_path(tmp_path):
    (tmp_path / "bin").mkdir()

    def levels() -> list[str]:
        python = str(tmp_path / "bin" / "python")
        found = doctor.compiler_findings({"PATH": str(tmp_path)}, python)
        return [finding.level for finding in found]

    assert levels() == ["warn", "warn"]
    (tmp_path / "g++").touch(mode=0o755)
    (tmp_path / "bin" / "ninja").touch(mode=0o755)
    assert levels() == ["ok", "ok"]


def test_the_report_puts_each_fix_below_its_finding():
    assert report_lines(
        [Finding("ok", "gpu", "none"), Finding("missing", "torch", "not installed", "make install")]
    ) == [
        "ok       gpu    none",
        "missing  torch  not installed",
        "                fix: make install",
    ]


def gpus(*sizes: float) -> tuple[Gpu, ...]:
    sizes_of = enumerate(int(size * GIB) for size in sizes)
    return tuple(Gpu(index, "a card", size, size, (8, 0)) for index, size in sizes_of)


def test_fewer_or_smaller_gpus_than_several_need_are_named():
    (few,) = doctor.several_gpus_findings(gpus(24), 2)
    assert (few.level, few.found, few.fix[:10]) == ("warn", "NUM_GPUS=2, 1 here", "NUM_GPUS=1")
    (small,) = doctor.several_gpus_findings(gpus(24, 11.65), None)
    assert small.level == "warn" and small.found.startswith("cuda:1 has 11.6 GiB; ")
    assert not list(doctor.several_gpus_findings(gpus(14.56, 15.75), None)), "sold as 16 GB"
    assert not list(doctor.several_gpus_findings(gpus(11.65), None)), "one is enough for one"
    assert not list(doctor.several_gpus_findings((), 1))


def test_variables_that_slow_training_are_warned_of():
    findings = list(doctor.switch_findings({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_TIMEOUT": "600"}))
    assert [(finding.level, finding.fix) for finding in findings] == [
        ("warn", "unset CUDA_LAUNCH_BLOCKING"),
        ("ok", ""),
    ]
    assert "NCCL_TIMEOUT=600: no library reads it" in findings[1].found
