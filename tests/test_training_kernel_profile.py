"""Where a step's time goes: kinds of kernels, times that add up, and what a run writes of it."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from sft_play.process import Process
from sft_play.training.kernel_profile import (
    StepProfile,
    busy_seconds,
    find_kind,
    kinds_table,
)

ALONE = Process.alone(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>", "products"),
        ("aten::addmm_", "products"),
        ("aten::_scaled_mm", "products"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        (
            "void at::native::(anonymous)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>",
            "element by element",
        ),
        ("aten::mul_", "element by element"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("_rms_norm_backward_kernel", "fused by Triton"),
        ("kernel_of_nobody", "other"),
    ],
)
def test_a_kernel_has_a_kind(name: str, kind: str) -> None:
    assert find_kind(name) == kind


def test_times_are_those_of_a_step_the_longest_kind_first() -> None:
    kernels = [
        averages("memcpy", 20e3, 2),
        averages("aten::mm", 60e3, 4),
        averages("gemm", 40e3, 2),
    ]
    lines = kinds_table(kernels, steps=2, step_seconds=0.1).splitlines()
    assert lines == [
        "    50.00 ms  50.0%         3 x  products",
        "    10.00 ms  10.0%         1 x  copies",
    ]


def averages(name: str, microseconds: float, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        key=name, device_type=DeviceType.CPU, self_cpu_time_total=microseconds, count=count
    )


def test_what_overlaps_is_busy_once() -> None:
    assert busy_seconds([(300, 400), (0, 100), (50, 150), (310, 320)]) == pytest.approx(250e-6)


def test_an_annotation_is_no_kernel(tmp_path: Path) -> None:
    annotated = torch.profiler.record_function("flash of the code")
    profile = StepProfile(tmp_path / "profile", 1, ALONE)
    with annotated:
        steps_of(profile, 6)
    assert "attention" not in (tmp_path / "profile" / "kernels.txt").read_text()


def steps_of(profile: StepProfile, count: int, begun: int = 0) -> None:
    """Call a callback as a run of so many steps does, resumed from step `begun`."""
    state = SimpleNamespace(global_step=begun)
    for _ in range(count):
        profile.on_step_begin(None, state, None)
        torch.ones(32, 32) @ torch.ones(32, 32)
        state.global_step += 1
        profile.on_step_end(None, state, None)
    profile.on_train_end(None, state, None)


@pytest.mark.parametrize(("count", "last"), [(12, 8), (7, 7)], ids=["whole", "cut by the end"])
def test_the_sixth_step_and_later_ones_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, last: int
) -> None:
    caplog.set_level("INFO")
    steps_of(StepProfile(tmp_path / "profile", 3, ALONE), count)
    head, _, kinds = (tmp_path / "profile" / "kernels.txt").read_text().partition("\n\n")
    assert head.startswith(f"profile of steps 6 to {last}: ")
    assert "1 x  products" in kinds.partition("\n\n")[0], "a product a step"
    assert "aten::mm" in kinds and head in caplog.text
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))
    assert sum(event["name"] == "aten::mm" for event in trace["traceEvents"]) == last - 5


def test_a_resumed_run_compiles_its_kernels_before_it_is_recorded(tmp_path: Path) -> None:
    steps_of(StepProfile(tmp_path / "profile", 2, ALONE), 12, begun=100)
    head = (tmp_path / "profile" / "kernels.txt").read_text().partition("\n")[0]
    assert head.startswith("profile of steps 106 to 107: ")


def test_a_run_that_ends_before_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps_of(StepProfile(tmp_path / "profile", 3, ALONE), 4)
    assert "train.profile_steps=3: nothing is recorded" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_nothing_is_recorded_unless_asked_for_and_by_one_rank(tmp_path: Path) -> None:
    for steps, process in ((0, ALONE), (3, Process(1, 1, 2, torch.device("cpu")))):
        steps_of(StepProfile(tmp_path / "profile", steps, process), 10)
    assert not (tmp_path / "profile").exists()
