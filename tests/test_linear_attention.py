"""Kernels of packages for linear attention: on GPUs alone, and not where they compute wrongly."""

import functools
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from published_models import published_model
from tiny_models import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_kernels import linear_attention
from sft_kernels.linear_attention import bind_by_device, torch_code, uses_fla, why_no_fla
from sft_kernels.triton_kernels import tracing_gpu
from sft_play.models.architecture import encoders_of


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, major: int, triton: str) -> None:
    why_no_fla.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))


@pytest.fixture(autouse=True)
def forget() -> None:
    yield
    why_no_fla.cache_clear()


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.7.0"])
def test_a_triton_that_computes_wrongly_is_not_used(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, 9, version)
    assert why_no_fla() == (
        f"Triton {version} computes gradients of flash-linear-attention wrongly on this GPU "
        "(Triton 3.7.1, which torch 2.13 brings, does not)"
    )


@pytest.mark.parametrize(("major", "version"), [(9, "3.3.1"), (9, "3.7.1"), (8, "3.6.0")])
def test_others_are(major: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, major, version)
    assert why_no_fla() is None


def test_where_the_package_is_missing_the_reason_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why_no_fla.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "python -m tools.install add requirements-gpu.txt" in why_no_fla()


def test_a_plan_for_another_machine_counts_on_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "why_no_fla", lambda: "not installed")
    monkeypatch.setattr(linear_attention, "_has_driver", lambda: False)
    with tracing_gpu(True):
        assert uses_fla(torch.ones(1))
    monkeypatch.setattr(linear_attention, "_has_driver", lambda: True)
    with tracing_gpu(True):
        assert not uses_fla(torch.ones(1))


def test_on_a_cpu_a_model_runs_its_torch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_5").eval()
    tokens = torch.arange(2, 20)[None]
    expected = model(tokens).logits
    code = sys.modules[type(model).__module__]
    in_torch = inspect.unwrap(code.torch_chunk_gated_delta_rule)  # a run may have bound it

    @functools.wraps(in_torch)
    def triton_kernel(*args: object, **kwargs: object) -> None:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", triton_kernel)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(tokens)
    bind_by_device(model)
    assert torch.equal(model(tokens).logits, expected)
    bound = code.torch_chunk_gated_delta_rule
    bind_by_device(model)
    assert code.torch_chunk_gated_delta_rule is bound


def test_encoders_are_found_without_a_package_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = published_model("qwen3_5")
    code = sys.modules[type(model).__module__]

    @functools.wraps(inspect.unwrap(code.torch_chunk_gated_delta_rule))
    def triton_kernel(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel wrote where a tensor without data has none")

    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", triton_kernel)
    assert list(encoders_of(model)) == ["model.visual"]


def test_a_proof_may_ask_for_torch_code_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "why_no_fla", lambda: None)
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    assert uses_fla(on_gpu)
    with torch_code():
        assert not uses_fla(on_gpu)
        with torch_code(False):
            assert uses_fla(on_gpu)
        assert not uses_fla(on_gpu)
    assert uses_fla(on_gpu)
