"""plan.devices, with planted NVML answers, so that no host needs a GPU; the rest is real."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pynvml
import pytest
from fake_nvml import card

from sft_play.errors import ConfigError, EnvironmentFault, ExitClass
from sft_play.plan.cards import parse_hardware
from sft_play.plan.devices import (
    GIB,
    Gpu,
    cpu_count,
    detect,
    host_memory,
    nvml_gpus,
    visible_numbers,
)

UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")


VISIBLE = {
    "0,2": [0, 2],
    "2,0": [2, 0],
    " 1 , 2": [1, 2],
    "": [],
    "-1": [],
    "1,-1,2": [1],
    "0,3,1": [0],
    "1a,2b": [1, 2],
    "x": [],
    "0,0": [],
    "GPU-bbbb3333,GPU-aaaa1111": [2, 0],
    "GPU-bbbb": [2],
    "GPU-aaaa": [],  # the beginning of two
    "GPU-bbbb,0": [2],
    "0,GPU-bbbb": [0],
    "GPU-cccc,GPU-bbbb": [],
    "GPU-bbbb,GPU-bbbb3333": [],
}


def test_visible_devices_are_read_as_torch_reads_them(monkeypatch):
    cuda = pytest.importorskip("torch").cuda
    for visible, numbers in VISIBLE.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        listed = cuda._parse_visible_devices()
        if listed and isinstance(listed[0], str):
            listed = cuda._transform_uuid_to_ordinals(listed, list(UUIDS))
        usable = [number if 0 <= number < len(UUIDS) else None for number in listed] + [None]
        assert visible_numbers(visible, UUIDS) == usable[: usable.index(None)] == numbers, visible
    assert visible_numbers(None, UUIDS) == [0, 1, 2]


def test_gpus_are_numbered_as_torch_numbers_them(plant):
    plant(card(UUIDS[0]), card(UUIDS[1], name="NVIDIA L4", capability=(8, 9)), card(UUIDS[2]))
    gpus, reason = nvml_gpus({"CUDA_VISIBLE_DEVICES": "2,1"})
    assert [(gpu.index, gpu.uuid, gpu.capability) for gpu in gpus] == [
        (0, UUIDS[2], (9, 0)),
        (1, UUIDS[1], (8, 9)),
    ]
    assert reason is None


@pytest.mark.parametrize(
    ("version", "total", "free"), [(2, 139 * GIB, 129 * GIB), (1, 140 * GIB, 129 * GIB), (0, 0, 0)]
)
def test_memory_leaves_out_what_the_driver_keeps_or_is_the_hosts(plant, version, total, free):
    plant(card(memory_version=version))
    (gpu,), _ = nvml_gpus({})
    assert gpu.total_bytes == (total or host_memory().total_bytes)
    assert not free or gpu.free_bytes == free


def test_a_mig_instance_that_is_named_is_one_gpu(plant):
    instance = card(
        "MIG-1", name="NVIDIA H200 MIG 1g.18gb", total=18 * GIB, reserved=0, used=0, capability=None
    )
    plant(card(instances=[instance]))
    (gpu,), _ = nvml_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert gpu == Gpu(0, "NVIDIA H200 MIG 1g.18gb", 18 * GIB, 18 * GIB, (9, 0), "MIG-1")


def test_auto_takes_the_gpus_or_else_the_cpu(plant):
    plant(card(UUIDS[0]), card(UUIDS[1]))
    hardware = detect("auto", {})
    assert (hardware.kind, hardware.count, hardware.supports_bf16) == ("cuda", 2, True)
    plant(card(UUIDS[0]), card(UUIDS[1], name="Tesla T4", capability=(7, 5)))
    assert not detect("cuda", {}).supports_bf16, "every GPU must"
    plant(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    hardware = detect("auto", {})
    assert (hardware.kind, hardware.gpus, hardware.supports_bf16) == ("cpu", (), False)
    assert hardware.cpu_count == cpu_count() >= 1
    assert 0 < hardware.ram_available_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("error", "environ", "words"),
    [
        ("LIBRARY_NOT_FOUND", {}, "libnvidia-ml.so.1 not found"),
        ("DRIVER_NOT_LOADED", {}, "modprobe nvidia"),
        ("LIB_RM_VERSION_MISMATCH", {}, "reboot"),
        ("GPU_IS_LOST", {}, "GPU is lost"),
        ("", {}, "no GPU"),
        ("", {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES=-1"),
    ],
)
def test_cuda_without_a_gpu_says_what_is_missing(plant, error, environ, words):
    cards = [card()] if environ else []
    plant(*cards, **({"init_error": getattr(pynvml, f"NVML_ERROR_{error}")} if error else {}))
    with pytest.raises(EnvironmentFault) as caught:
        detect("cuda", environ)
    assert caught.value.exit_class == ExitClass.ENVIRONMENT
    assert words in str(caught.value) and "`make doctor`" in str(caught.value)


def test_a_missing_pynvml_is_a_reason_and_no_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what import raises ImportError for
    gpus, reason = nvml_gpus({})
    assert gpus == ()
    assert "nvidia-ml-py is not installed" in reason


@pytest.mark.parametrize(
    ("words", "count", "name", "gib", "capability"),
    [
        ("2xH200", 2, "NVIDIA H200", 139.72, (9, 0)),
        ("8xA100-80", 8, "NVIDIA A100-SXM4-80GB", 79.14, (8, 0)),
        ("4 x RTX 4090", 4, "NVIDIA GeForce RTX 4090", 23.64, (8, 9)),
        ("1xT4", 1, "Tesla T4", 14.56, (7, 5)),
        ("RTX 4090", 1, "NVIDIA GeForce RTX 4090", 23.64, (8, 9)),
        ("3090x2", 2, "NVIDIA GeForce RTX 3090", 23.67, (8, 6)),
        ("NVIDIA H100 80GB HBM3", 1, "NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
        ("DGX Spark", 1, "NVIDIA GB10", 119.18, (12, 1)),
        ("5070Ti", 1, "NVIDIA GeForce RTX 5070 Ti", 15.45, (12, 0)),
        ("2x24GiB", 2, "GPU of 24 GiB", 24, (8, 0)),
        ("1x79.5gib", 1, "GPU of 79.5 GiB", 79.5, (8, 0)),
    ],
)
def test_hardware_words_name_empty_gpus(words, count, name, gib, capability):
    hardware = parse_hardware(words)
    assert (hardware.kind, hardware.count) == ("cuda", count)
    size_bytes = int(gib * GIB)
    assert hardware.gpus == tuple(
        Gpu(index, name, size_bytes, size_bytes, capability) for index in range(count)
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("2xH2000", "did you mean 2xH200?"),
        ("3xA100", "did you mean 3xA100-80 or 3xA100-40?"),
        ("2x24GB", "did you mean 2x24GiB?"),
        ("1xMI300X", "AMD GPUs are not supported"),
        ("M3", "Apple GPUs are not supported"),
        ("RX 7900", "TRL train on ROCm"),
        ("8xGaudi3", "optimum-habana"),
        ("M60", "B200, H200"),
        ("0xH200", "GPUS=2xH200"),
        ("", "H200"),
        ("99999xH200", "no GPU of that name"),
        ("1xh200+2x4090", "count them all as the smallest"),
    ],
)
def test_other_words_are_a_config_error_with_the_nearest(words, hint):
    with pytest.raises(ConfigError) as caught:
        parse_hardware(words)
    assert f"GPUS={words}" in str(caught.value)
    assert hint in str(caught.value)


def _cgroup(folder: Path, limit: str, used_bytes: int, cache_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache_bytes}\n")


def test_the_tightest_of_nested_limits_counts(tmp_path):
    mib = 2**20
    (tmp_path / "self").write_text("0::/job/step\n")
    _cgroup(tmp_path / "fs" / "job", str(64 * mib), used_bytes=40 * mib, cache_bytes=16 * mib)
    _cgroup(tmp_path / "fs" / "job" / "step", "max", used_bytes=0, cache_bytes=0)
    memory = host_memory(tmp_path / "fs", tmp_path / "self")
    assert (memory.total_bytes, memory.available_bytes) == (64 * mib, 40 * mib)


def test_version_1_cgroups_bound_the_ram_too(tmp_path):
    (tmp_path / "self").write_text("5:cpu:/\n4:memory:/of/the/host\n0::/\n")
    folder = tmp_path / "fs" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("1048576\n")
    (folder / "memory.usage_in_bytes").write_text("1000000\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    memory = host_memory(tmp_path / "fs", tmp_path / "self")
    assert (memory.total_bytes, memory.available_bytes) == (1048576, 48576)


def test_devices_and_monitor_load_neither_torch_nor_nvml_nor_psutil():
    code = (
        "import sys, sft_play.plan.devices, sft_play.monitor.gpus, sft_play.monitor.doctor, "
        "sft_play.monitor.tensorboard;"
        "print(sorted({'torch', 'transformers', 'pynvml', 'psutil', 'tensorboard'} & "
        "set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/a\n", {"a/cpu.max": "max 100000", "cpu.max": "50000 100000"}, 1),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
    ],
)  # fmt: skip
def test_a_containers_share_bounds_the_cores(tmp_path, membership, files, cores):
    (tmp_path / "self").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    expected = cores or len(os.sched_getaffinity(0))
    assert cpu_count(tmp_path / "fs", tmp_path / "self") == expected
