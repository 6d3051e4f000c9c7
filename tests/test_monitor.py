"""sft_play.monitor: gpu-info, memory-check, doctor and TensorBoard. NVML's answers are planted, processes and ports are real."""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import psutil
import pynvml
import pytest
from test_devices import card, plant_cards

from sft_play.errors import ConfigError, EnvironmentFault, ExitClass
from sft_play.monitor import doctor, gpus, installed, memory, tensorboard
from sft_play.monitor.doctor import Finding
from sft_play.monitor.gpus import Driver, gpu_info_lines
from sft_play.monitor.installed import TorchBuild
from sft_play.monitor.memory import memory_check_lines
from sft_play.plan.devices import GIB, Gpu
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder

NO_DRIVER = {"init_error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
ONE_GPU = (Gpu(0, "NVIDIA H200", 139 * GIB, 139 * GIB, (9, 0), "GPU-a"),)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch):
    return functools.partial(plant_cards, monkeypatch)


# gpu-info


def test_gpu_info_counts_no_gpus_without_any_nvidia_software(plant):
    plant(**NO_DRIVER)
    first, second, *rest = gpu_info_lines({})
    assert first == "Number of GPUs: 0"
    assert second.startswith("no GPU: no NVIDIA driver here") and "install the driver" in second
    assert re.match(r"CPU: \d+ cores, \d+\.\d of \d+\.\d GiB RAM available", rest[0])
    assert "bnb backend on the CPU: lora, qlora, full in float32" in rest
    assert "unsloth backend: not here, it needs an NVIDIA GPU" in rest


def test_gpu_info_describes_each_gpu_and_the_driver(plant):
    plant(card("GPU-a", nvlinked=("GPU-b",)), card("GPU-b"))
    assert gpu_info_lines({})[:5] == [
        "Number of GPUs: 2",
        "cuda:0 NVIDIA H200: 129.0 of 139.0 GiB free, capability 9.0, bf16 yes",
        "cuda:1 NVIDIA H200: 129.0 of 139.0 GiB free, capability 9.0, bf16 yes",
        "driver: 580.95.05, runs CUDA up to 13.0",
        "links: NVLink between the two GPUs",
    ]


def test_gpu_info_draws_the_links_as_a_table(plant):
    ends = ["a switch"] * 18
    plant(
        card("GPU-a", nvlinked=("GPU-b",), link_ends=ends, pcie=(5, 16, 16)),
        card("GPU-b", link_ends=ends, pcie=(5, 8, 16)),
    )
    lines = gpu_info_lines({})
    begin = lines.index("links: NVLink between the two GPUs") + 1
    assert lines[begin : begin + 4] == [
        "        cuda:0  cuda:1  PCIe to the host",
        "cuda:0  -       NV18    generation 5, 16 lanes",
        "cuda:1  NV18    -       generation 5, 8 of 16 lanes",
        "NV18 is 18 NVLinks; those of NVIDIA H200 are of generation 4",
    ]


def test_links_between_a_pair_count_where_no_switch_is_between(plant):
    plant(
        card(
            "GPU-a",
            nvlinked=("GPU-b", "GPU-c"),
            link_ends=["GPU-b", "GPU-c", "GPU-b"],
            pcie=(3, 16, 16),
        ),
        card("GPU-b", level=pynvml.NVML_TOPOLOGY_SINGLE),
        card("GPU-c", level=None),
    )
    assert [line for line in gpu_info_lines({}) if re.match(r"cuda:\d  ", line)] == [
        "cuda:0  -       NV2     NV1     generation 3, 16 lanes",
        "cuda:1  NV2     -       PIX     unknown",
        "cuda:2  NV1     PIX     -       unknown",
    ]


def test_one_gpu_has_its_slot_and_no_table(plant):
    plant(card(pcie=(4, 16, 16)))
    assert [line for line in gpu_info_lines({}) if "lanes" in line or "link" in line] == [
        "cuda:0  generation 4, 16 lanes"
    ]


def test_gpu_info_names_torch_and_what_it_computes_in_without_loading_it(plant, monkeypatch):
    plant(card("GPU-a"), card("GPU-b", capability=(7, 5)))
    monkeypatch.setattr(gpus, "torch_build", lambda: TorchBuild("2.11.0+cu130", (13, 0)))
    monkeypatch.setattr(gpus, "nccl", lambda: "2.28.9 (nvidia-nccl-cu13)")
    lines = gpu_info_lines({})
    assert "torch: 2.11.0+cu130, built for CUDA 13.0, NCCL 2.28.9 (nvidia-nccl-cu13)" in lines
    assert "precision: float16, float32; NF4 weights under qlora" in lines, (
        "the older card has no bfloat16"
    )
    plant(card(capability=(5, 2)))
    assert "precision: float16, float32; no NF4, which needs capability 6.0" in gpu_info_lines({})
    monkeypatch.setattr(gpus, "torch_build", lambda: None)
    assert "torch: not installed; run `make install`" in gpu_info_lines({})


def test_gpu_info_lists_the_pairs_when_links_differ(plant):
    plant(card("GPU-a", nvlinked=("GPU-b",)), card("GPU-b", level=None), card("GPU-c"))
    assert [line for line in gpu_info_lines({}) if line.startswith("link")] == [
        "link cuda:0 - cuda:1: NVLink",
        "link cuda:0 - cuda:2: PCIe across CPU sockets (SYS)",
        "link cuda:1 - cuda:2: unknown",
    ]


def test_gpu_info_says_what_an_old_gpu_cannot_do(plant):
    plant(card(name="Tesla P100", capability=(6, 0)))
    lines = gpu_info_lines({})
    assert lines[1].endswith("capability 6.0, bf16 no")
    assert "unsloth backend: not here, it needs capability 7.0 and finds 6.0" in lines


def test_gpu_info_names_the_variable_that_hides_gpus(plant):
    plant(card("GPU-a"), card("GPU-b"))
    lines = gpu_info_lines({"CUDA_VISIBLE_DEVICES": "1"})
    assert lines[0] == "Number of GPUs: 1"
    assert "CUDA_VISIBLE_DEVICES=1 is set: cuda:0 is the first GPU that it names" in lines


def test_mixed_models_warn_of_cudas_own_order(plant):
    plant(card("GPU-a"), card("GPU-b", name="NVIDIA L4"))
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in line for line in gpu_info_lines({}))
    assert not any(
        "CUDA_DEVICE_ORDER" in line for line in gpu_info_lines({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    )


# memory-check


def test_memory_check_names_who_holds_gpu_memory(plant, tmp_path):
    plant(
        card("GPU-a", processes={os.getpid(): 9 * GIB, 2**22 + 1: None}), card("GPU-b", busy=None)
    )  # Linux has no pid over 2**22
    lines = memory_check_lines({}, tmp_path)
    assert lines[0] == "cuda:0 NVIDIA H200: 10.0 of 139.0 GiB used, 97 % busy"
    assert re.fullmatch(rf"  pid {os.getpid()} \S.*: 9\.0 GiB", lines[1])
    assert lines[2] == f"  pid {2**22 + 1} (of another container): memory not available"
    assert lines[3] == "cuda:1 NVIDIA H200: 10.0 of 139.0 GiB used, utilisation not available"
    assert lines[4].startswith("RAM: ")


def test_memory_check_of_a_cpu_host_lists_python_processes(plant, monkeypatch, tmp_path):
    plant(**NO_DRIVER)
    monkeypatch.setattr(memory, "PROCESSES_SHOWN", 10_000)  # others on this host may be larger
    code = "import sys; block = bytearray(b'x') * (100 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "--token", "hf_secret"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        lines = memory_check_lines({}, tmp_path)
        child.stdin.close()
    assert re.fullmatch(r"RAM: \d+\.\d of \d+\.\d GiB used", lines[0])
    assert any(re.fullmatch(rf"  pid {child.pid} python\S* -c: 0\.1 GiB", line) for line in lines)
    assert "hf_secret" not in "\n".join(lines)
    assert lines[-1].startswith("no GPU: ")


def test_memory_check_shows_power_and_temperature_where_nvml_gives_them(plant, tmp_path):
    plant(card("GPU-a", watts=412, most_watts=700, celsius=54), card("GPU-b", watts=90))
    first, second, *_ = memory_check_lines({}, tmp_path)
    assert first == "cuda:0 NVIDIA H200: 10.0 of 139.0 GiB used, 97 % busy, 412 of 700 W, 54 °C"
    assert second == "cuda:1 NVIDIA H200: 10.0 of 139.0 GiB used, 97 % busy, 90 W"


@pytest.fixture
def running(tmp_path):
    """A function that writes down a run that this process trains, and what else its report says."""

    def write(name: str, device: str, **facts: object) -> Path:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        write_json(folder.path / "plan.json", {})
        own = {
            "pid": os.getpid(),
            "launcher_pid": os.getpid(),
            "started_at": "2999-01-01T00:00:00+0000",
            "world_size": 1,
            "device": device,
        }
        folder.write_report(
            {"status": "running", "peak_bytes": {"predicted": 43 * GIB}, **own, **facts}
        )
        return tmp_path

    return write


def test_memory_check_shows_what_a_run_holds_beside_what_was_predicted(plant, running):
    plant(card("GPU-a", processes={os.getpid(): 41 * GIB, 1: GIB}), card("GPU-b"))
    running("over", "cuda", status="done")
    running("died", "cuda", pid=2**22 + 1)
    lines = memory_check_lines({}, running("now", "cuda"))
    assert [line for line in lines if line.startswith("run ")] == [
        f"run now: predicted peak 43.0 GiB, 41.0 GiB in use on cuda:0 (pid {os.getpid()})"
    ]


def test_memory_check_finds_all_ranks_of_a_run(plant, running):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        plant(
            card("GPU-a", processes={child.pid: 40 * GIB, os.getpid(): GIB}),
            card("GPU-b", processes={child.pid: None}),
        )
        lines = memory_check_lines({}, running("now", "cuda", world_size=2))
        child.communicate(b"\n")
    assert [line for line in lines if line.startswith("run ")] == [
        f"run now: predicted peak 43.0 GiB, 40.0 GiB in use on cuda:0 (pid {child.pid})",
        f"run now: predicted peak 43.0 GiB, an unknown part in use on cuda:1 (pid {child.pid})",
    ]


def test_memory_check_says_when_nvml_hides_the_processes_of_a_run(plant, running):
    plant(card("GPU-a", processes={1: GIB}))
    (line,) = [
        line for line in memory_check_lines({}, running("now", "cuda")) if line.startswith("run ")
    ]
    assert (
        line
        == "run now: predicted peak 43.0 GiB; NVML lists none of its processes, as in a container: the GPUs above say what is in use"
    )


def test_memory_check_of_a_run_on_a_cpu_shows_its_ram(plant, running):
    plant(**NO_DRIVER)
    (line,) = [
        line for line in memory_check_lines({}, running("now", "cpu")) if line.startswith("run ")
    ]
    assert re.fullmatch(
        rf"run now: predicted peak 43\.0 GiB, \d+\.\d GiB of RAM in use \(pid {os.getpid()}\)", line
    )


# doctor


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text(f"psutil=={metadata.version('psutil')}\n")
    return tmp_path


def test_doctor_passes_a_host_that_has_its_pins(project, plant):
    plant(**NO_DRIVER)
    findings = doctor.examine(project, project / "outputs", {"PATH": os.environ["PATH"]})
    assert Finding("ok", "packages", "1 installed as requirements.txt pins them") in findings
    assert [finding for finding in findings if finding.level == "missing"] == []
    assert doctor.exit_class(findings) == ExitClass.DONE


def test_doctor_fails_when_a_pinned_package_is_missing(project):
    (project / "requirements.txt").write_text("no-such-package==1.0\n")
    findings = doctor.package_findings(project / "requirements.txt")
    assert findings[1] == Finding(
        "missing", "no-such-package", "not installed, the pin is ==1.0", "make -B install"
    )
    assert doctor.exit_class(findings) == ExitClass.ENVIRONMENT == 13


def test_another_version_than_the_pin_warns(project):
    (project / "requirements.txt").write_text("psutil==0.1\n")
    assert doctor.package_findings(project / "requirements.txt")[1:] == [
        Finding(
            "warn", "psutil", f"{metadata.version('psutil')}, the pin is ==0.1", "make -B install"
        )
    ]


def test_requirements_may_hold_comments_options_markers_and_continuations(project):
    psutil_version = metadata.version("psutil")
    (project / "requirements.txt").write_text(
        "# pins\n\n-r other.txt\n-c constraints.txt\n--extra-index-url https://example.org/#a\n"
        f"psutil=={psutil_version}  # why\nPyYAML>=6 \\\n  --hash=sha256:00\npywin32==1; sys_platform == 'win32'\n"
        "typer[all]>0 --no-binary typer\ntorch==0.1\n"
    )
    assert doctor.package_findings(project / "requirements.txt") == [
        Finding("ok", "packages", "3 installed as requirements.txt pins them")
    ]


def test_a_line_that_is_no_requirement_is_named_by_its_number(project):
    (project / "requirements.txt").write_text("psutil>0\nfoo bar\n")
    finding = doctor.package_findings(project / "requirements.txt")[1]
    assert (finding.level, finding.fix) == ("warn", "correct requirements.txt:2")


def test_without_requirements_txt_the_doctor_fails(tmp_path):
    assert (
        doctor.exit_class(doctor.package_findings(tmp_path / "requirements.txt"))
        == ExitClass.ENVIRONMENT
    )


def test_the_unsloth_extra_is_optional(project):
    extra = project / "requirements-unsloth.txt"
    assert doctor.optional_findings(extra, True) == []
    extra.write_text("-r requirements.txt\nno-such-package==1\n")
    (finding,) = doctor.optional_findings(extra, True)
    assert (finding.level, finding.found) == (
        "ok",
        "not installed; optional, `make install-unsloth` adds it",
    )
    extra.write_text("psutil>0\nno-such-package==1\n")
    assert [finding.level for finding in doctor.optional_findings(extra, True)] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10), "missing"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "warn")],
)
def test_python_is_supported_from_3_11_to_3_12(version, level):
    assert doctor.python_finding(version).level == level


@pytest.mark.parametrize(
    ("version", "cuda", "found", "nvidia", "levels"),
    [
        ("2.13.0+cpu", None, (), None, ["ok"]),
        ("2.11.0+cu130", (13, 0), ONE_GPU, Driver("580.95", (13, 0)), ["ok"]),
        ("2.12.1", (12, 8), ONE_GPU, Driver("580.95", (13, 0)), ["ok"]),
        ("2.10.0", None, (), None, ["warn"]),
        ("2.14.0", None, (), None, ["warn"]),
        ("2.13.0+cpu", None, ONE_GPU, Driver("580.95", (13, 0)), ["warn"]),
        ("2.13.0", (13, 0), ONE_GPU, Driver("550.54", (12, 4)), ["ok", "warn"]),
    ],
)
def test_torch_is_judged_by_version_build_and_driver(version, cuda, found, nvidia, levels):
    findings = list(doctor.torch_findings(TorchBuild(version, cuda), found, nvidia))
    assert [finding.level for finding in findings] == levels
    assert all(finding.fix for finding in findings if finding.level != "ok")


def test_missing_torch_fails_the_doctor():
    assert doctor.exit_class(list(doctor.torch_findings(None, (), None))) == ExitClass.ENVIRONMENT


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
    assert installed.parse_torch_version(text, version) == build


def test_the_installed_torch_build_is_what_torch_says():
    torch = pytest.importorskip("torch")
    cuda = tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else None
    assert installed.torch_build() == TorchBuild(torch.__version__, cuda)


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


def test_the_master_address_must_resolve():
    assert [finding.level for finding in doctor.network_findings({"MASTER_ADDR": "127.0.0.1"})] == [
        "ok"
    ]
    assert [finding.level for finding in doctor.network_findings({"MASTER_ADDR": "m" * 64})] == [
        "missing"
    ]


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
    environ, python = {"PATH": str(tmp_path)}, str(tmp_path / "bin" / "python")
    assert [finding.level for finding in doctor.compiler_findings(environ, python)] == [
        "warn",
        "warn",
    ]
    (tmp_path / "g++").touch(mode=0o755)
    (tmp_path / "bin" / "ninja").touch(mode=0o755)
    assert [finding.level for finding in doctor.compiler_findings(environ, python)] == ["ok", "ok"]


def test_the_report_puts_each_fix_below_its_finding():
    assert doctor.report_lines(
        [Finding("ok", "gpu", "none"), Finding("missing", "torch", "not installed", "make install")]
    ) == [
        "ok       gpu    none",
        "missing  torch  not installed",
        "                fix: make install",
    ]


# TensorBoard


@pytest.fixture
def pid_file(tmp_path: Path):
    """Where the pid file of a test goes; what it names is stopped afterwards."""
    path = tmp_path / "outputs" / ".tensorboard.json"
    yield path
    tensorboard.stop(path)


def _record(pid_file: Path, pid: int, started_at: float) -> None:
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    pid_file.write_text(
        json.dumps({"pid": pid, "port": 6006, "logdir": "/somewhere", "started_at": started_at})
    )


def _interpreter(path: Path, script: str) -> Path:
    """A stand-in for Python that a TensorBoard can fail in."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_recycled_pid_is_never_stopped(pid_file):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        _record(pid_file, child.pid, psutil.Process(child.pid).create_time() - 60)
        assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"
        assert child.poll() is None
        assert not pid_file.exists()
        child.communicate(b"\n")


@pytest.mark.parametrize("text", [None, "", "[1]", '{"pid": 1}'])
def test_without_a_readable_pid_file_none_is_running(pid_file, text):
    if text is not None:
        pid_file.parent.mkdir()
        pid_file.write_text(text)
    assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"


def test_a_process_that_ignores_sigterm_is_killed(pid_file):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        _record(pid_file, child.pid, psutil.Process(child.pid).create_time())
        said = tensorboard.stop(pid_file, grace_seconds=0.1)
        survived = psutil.pid_exists(child.pid)
        child.kill()  # or a failure would hang here
    assert said == f"stopped the TensorBoard of /somewhere on port 6006 (pid {child.pid})"
    assert not survived
    assert not pid_file.exists()


def test_a_tensorboard_that_dies_at_once_is_an_environment_fault_with_its_words(pid_file, tmp_path):
    interpreter = _interpreter(tmp_path / "python", "echo No module named tensorboard >&2; exit 1")
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(EnvironmentFault, match="No module named tensorboard"),
    ):
        tensorboard.start(tmp_path, busy.getsockname()[1], str(interpreter), {}, pid_file)
    assert not pid_file.exists()


def test_a_missing_interpreter_is_an_environment_fault(pid_file, tmp_path):
    with pytest.raises(EnvironmentFault, match="make install"):
        tensorboard.start(tmp_path, tensorboard._any_port(), str(tmp_path / "none"), {}, pid_file)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_a_config_error(pid_file, tmp_path, port):
    with pytest.raises(ConfigError, match=f"TB_PORT={port}: write a port of 1 to 65535"):
        tensorboard.start(tmp_path, port, sys.executable, {}, pid_file)


def test_no_free_port_is_an_environment_fault(pid_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "PORTS_TRIED", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(EnvironmentFault, match="no free port"),
    ):
        tensorboard.start(tmp_path, busy.getsockname()[1], sys.executable, {}, pid_file)


def test_a_tensorboard_that_never_answers_is_stopped(pid_file, tmp_path, monkeypatch):
    interpreter = _interpreter(
        tmp_path / "python",
        f"echo importing; echo $$ > {tmp_path}/pid; exec {shutil.which('tail')} -f /dev/null",
    )
    monkeypatch.setattr(tensorboard, "START_SECONDS", 0.3)
    with pytest.raises(EnvironmentFault, match=r"did not answer on port (?s:.*)importing"):
        tensorboard.start(tmp_path, tensorboard._any_port(), str(interpreter), {}, pid_file)
    assert not pid_file.exists()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_tensorboard_starts_once_beside_a_busy_port_and_stops(pid_file, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        first = tensorboard.start(tmp_path / "logs", port, sys.executable, os.environ, pid_file)
    assert first.port > port
    assert f"port {port} is taken, it uses {first.port}" in first.message
    assert json.loads(pid_file.read_text())["pid"] == first.pid
    with urllib.request.urlopen(f"{first.url}/data/environment") as answer:
        assert json.load(answer)["data_location"] == str(tmp_path / "logs")
    again = tensorboard.start(tmp_path / "logs", port, sys.executable, os.environ, pid_file)
    assert (again.pid, again.port) == (first.pid, first.port)
    other = tensorboard.start(tmp_path / "other", port, sys.executable, os.environ, pid_file)
    assert other.pid != first.pid and not psutil.pid_exists(first.pid)
    assert f"stopped the TensorBoard of {tmp_path / 'logs'}" in other.message
    assert tensorboard.stop(pid_file).startswith(f"stopped the TensorBoard of {tmp_path / 'other'}")
    assert not psutil.pid_exists(other.pid) and tensorboard._is_free(other.port)
    assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"
