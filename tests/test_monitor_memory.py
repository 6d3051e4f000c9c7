"""`make memory-check`, on NVML answers that are planted and processes that are real."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import NO_DRIVER, card
from run_files import GONE, write_holder

from sft_play.monitor import memory
from sft_play.monitor.memory import memory_check_lines
from sft_play.plan.devices import GIB
from sft_play.process_id import ProcessId
from sft_play.runs import lock
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

THIS = ProcessId.read()


def test_memory_check_names_who_holds_gpu_memory(plant, tmp_path):
    plant(
        card("GPU-a", processes={os.getpid(): 9 * GIB, 2**22 + 1: None}), card("GPU-b", busy=None)
    )  # Linux has no pid over 2**22
    lines = memory_check_lines({}, tmp_path)
    assert lines[0] == "cuda:0 NVIDIA H200: 10.0 of 139.0 GiB used, 97 % busy"
    assert re.fullmatch(rf"  pid {os.getpid()} \S.*: 9\.0 GiB", lines[1])
    assert lines[2] == f"  pid {2**22 + 1} (of another container): memory not available"
    assert lines[3] == "cuda:1 NVIDIA H200: 10.0 of 139.0 GiB used, utilization not available"
    assert lines[4].startswith("RAM: ")


def test_memory_check_of_a_cpu_host_lists_python_processes(plant, monkeypatch, tmp_path):
    plant(**NO_DRIVER)
    monkeypatch.setattr(memory, "PROCESSES_SHOWN", 10_000)  # others on this host may be larger
    code = (
        "import sys; block = bytearray(b'x') * (100 << 20); "
        "print('ready', flush=True); sys.stdin.read()"
    )
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

    def write(name: str, device: str, holder=THIS, **facts: object) -> Path:
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
        report = {"status": "running", "peak_bytes": {"predicted": 43 * GIB}, **own, **facts}
        folder.write_report(RunReport.from_json(report))
        if holder != GONE:
            lock.take(folder.path, print)
        write_holder(folder.path, holder)
        return tmp_path

    return write


def runs_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("run ")]


def test_memory_check_shows_what_a_run_holds_beside_what_was_predicted(plant, running):
    plant(card("GPU-a", processes={os.getpid(): 41 * GIB, 1: GIB}), card("GPU-b"))
    running("over", "cuda", status="done")
    running("died", "cuda", GONE)
    running("in a container", "cuda", replace(THIS, namespace="another"))
    lines = memory_check_lines({}, running("now", "cuda"))
    assert runs_in(lines) == [
        f"run now: predicted peak 43.0 GiB, 41.0 GiB in use on cuda:0 (pid {os.getpid()})"
    ]
    assert lines[-1] == "live: make watch RUN=now follows a run until it ends"


def test_memory_check_finds_all_ranks_of_a_run(plant, running):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        plant(
            card("GPU-a", processes={child.pid: 40 * GIB, os.getpid(): GIB}),
            card("GPU-b", processes={child.pid: None}),
        )
        lines = memory_check_lines({}, running("now", "cuda", world_size=2))
        child.communicate(b"\n")
    assert runs_in(lines) == [
        f"run now: predicted peak 43.0 GiB, 40.0 GiB in use on cuda:0 (pid {child.pid})",
        f"run now: predicted peak 43.0 GiB, an unknown part in use on cuda:1 (pid {child.pid})",
    ]


def test_memory_check_says_when_nvml_hides_the_processes_of_a_run(plant, running):
    plant(card("GPU-a", processes={1: GIB}))
    (line,) = runs_in(memory_check_lines({}, running("now", "cuda")))
    assert "predicted peak 43.0 GiB" in line and "container" in line


def test_memory_check_of_a_run_on_a_cpu_shows_its_ram(plant, running):
    plant(**NO_DRIVER)
    (line,) = runs_in(memory_check_lines({}, running("now", "cpu")))
    assert re.fullmatch(
        rf"run now: predicted peak 43\.0 GiB, \d+\.\d GiB of RAM in use \(pid {os.getpid()}\)", line
    )
