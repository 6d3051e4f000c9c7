"""`make gpu-info`, on NVML answers that are planted."""

import re

import pynvml
from fake_nvml import NO_DRIVER, card

from sft_play.monitor import gpus
from sft_play.monitor.gpus import gpu_info_lines
from sft_play.monitor.packages import TorchBuild


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
