"""What the plan says of recurrent layers where their kernels do not run."""

import importlib.util
from dataclasses import replace

import pytest
from plan_examples import EIGHT_B

from sft_kernels.needs import why_no_kernels
from sft_play.plan import warnings
from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.structure import LayerKind, Structure
from sft_play.plan.warnings import recurrent_warnings

H200 = Gpu(0, "NVIDIA H200", 140 << 30, 139 << 30, (9, 0), uuid="GPU-1")


def hybrid() -> ModelShape:
    layers = (LayerKind(count=24, is_recurrent=True), LayerKind(count=8, query_features=4096))
    return replace(EIGHT_B, structure=Structure(10, 10, (), layers))


def on(gpu: Gpu) -> Hardware:
    return Hardware("cuda", (gpu,), 8, 1 << 34)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(warnings, "version_of", lambda _: "3.6.0")


def test_a_triton_that_computes_wrongly_is_named_with_what_it_costs():
    (warning,) = recurrent_warnings(hybrid(), on(H200))
    assert "24 of 32 layers" in warning and "Triton 3.6.0" in warning


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (warning,) = recurrent_warnings(hybrid(), on(replace(H200, capability=(8, 0))))
    assert "python -m tools.install add requirements-gpu.txt" in warning


def test_nothing_is_said_of_other_models_cards_and_machines():
    assert recurrent_warnings(EIGHT_B, on(H200)) == []
    assert recurrent_warnings(hybrid(), on(replace(H200, capability=(8, 0)))) == []
    assert recurrent_warnings(hybrid(), on(replace(H200, uuid=""))) == []
    assert recurrent_warnings(hybrid(), Hardware("cpu", (), 8, 1 << 34)) == []


@pytest.mark.parametrize("triton, is_right", [("3.3.1", True), ("3.7.0", False), ("3.7.1", True)])
def test_the_versions_between_are_wrong_on_hopper(triton, is_right):
    assert (why_no_kernels((9, 0), triton) is None) == is_right
