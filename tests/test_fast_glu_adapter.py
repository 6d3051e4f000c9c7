"""A gated MLP's h with the products of the adapter behind it, in Triton's interpreter."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")

import triton.language as tl
from interpreted_kernels import interpreted

from sft_play.models.fast.linears import glu, glu_adapter
from sft_play.models.fast.linears.activations import GELU_CUBE, GELU_SLOPE
from sft_play.models.fast.linears.glu import glu_backward, glu_forward

CLOSE = {"rtol": 1e-5, "atol": 1e-4}


@pytest.fixture(scope="module")
def kernels():
    """The kernels as Triton's interpreter runs them, with small tiles: several of every kind."""
    elementwise, kernels = interpreted(glu), interpreted(glu_adapter)
    elementwise._SLOPE, elementwise._CUBE = GELU_SLOPE, GELU_CUBE  # it multiplies by numbers alone
    kernels.gradients = elementwise.gradients
    kernels.argument_and_slope = elementwise.argument_and_slope
    kernels._once = lambda tile: tile  # machine code, which the interpreter does not run
    kernels.FORWARD_ROWS, kernels.BACKWARD_ROWS, kernels.COLUMNS = 16, 16, 32
    kernels.processors, kernels.PROGRAMS = lambda device: 2, 3  # regions of several tiles
    with pytest.MonkeyPatch.context() as patch:  # Triton's own is no primitive either
        patch.setattr(tl, "sigmoid", lambda tile: 1 / (1 + tl.exp(-tile)))
        yield kernels


def operands(rows: int, features: int) -> list[torch.Tensor]:
    """Return gate, up and dh (N, I); rows do not follow one another, at three distances."""
    torch.manual_seed(0)
    return [torch.randn(rows, features + gap)[:, :features] for gap in (3, 6, 2)]


# rows: fewer than a tile, several tiles, several regions
CASES = list(itertools.product((1, 40, 100), (32, 70), (16, 5), ("silu", "gelu_tanh")))


@pytest.mark.parametrize("rows, features, rank, activation", CASES)
def test_forward_is_h_and_its_product(kernels, rows, features, rank, activation):
    gate, up, _ = operands(rows, features)
    a = torch.randn(rank, features)
    h, ha = kernels.launch_forward(gate, up, activation, a)
    wanted = glu_forward(gate, up, activation)
    torch.testing.assert_close(h, wanted, **CLOSE)
    torch.testing.assert_close(ha.double(), wanted.double() @ a.double().t(), **CLOSE)


@pytest.mark.parametrize("rows, features, rank, activation", CASES)
def test_backward_is_both_gradients_and_that_of_a(kernels, rows, features, rank, activation):
    gate, up, dh = operands(rows, features)
    du = torch.randn(rows, rank)
    before = [each.clone() for each in (gate, up, dh, du)]
    dgate, dup = (torch.full((rows, features + gap), 9.0)[:, :features] for gap in (16, 0))
    da = kernels.launch_backward(dh, gate, up, activation, dgate, dup, du)
    assert da.dtype == torch.float32 and da.is_contiguous()
    assert all(map(torch.equal, (gate, up, dh, du), before))
    wanted = [torch.empty_like(dh) for _ in range(3)]
    glu_backward(dh, gate, up, activation, wanted[0], wanted[1], h=wanted[2])
    torch.testing.assert_close([dgate, dup], wanted[:2], **CLOSE)
    torch.testing.assert_close(da.double(), du.double().t() @ wanted[2].double(), **CLOSE)


def test_rows_may_lie_further_apart_than_32_bits_count(kernels):
    """Forward; the interpreter counts loops in 32 bits: test_kernels_compile.py looks backward."""
    gate, up = torch.randn(2, 40, 32).half()
    far = torch.empty(40, 2**26, dtype=gate.dtype)  # 5 GiB, of which the host gives what is used
    far_gate, far_up = far[:, :32].copy_(gate), far[:, 32:64].copy_(up)
    a = torch.randn(5, 32).half()
    found = kernels.launch_forward(far_gate, far_up, "silu", a)
    assert all(map(torch.equal, found, kernels.launch_forward(gate, up, "silu", a)))


def test_one_number_that_is_not_finite_shows(kernels):
    gate, up, dh = operands(40, 70)
    gate[39, 69] = torch.nan
    _, ha = kernels.launch_forward(gate, up, "silu", torch.randn(16, 70))
    assert ha[39].isnan().all() and not ha[:39].isnan().any()
    dgate, dup = torch.empty_like(dh), torch.empty_like(dh)
    da = kernels.launch_backward(dh, gate, up, "silu", dgate, dup, torch.randn(40, 16))
    assert da[:, 69].isnan().all() and not da[:, :69].isnan().any()


def test_a_hopper_gpu_needs_one_kernel_for_16_bits_and_small_ranks(monkeypatch):
    fits = glu_adapter.fit_one_kernel
    gate, up, _ = operands(40, 70)
    gate, up = gate.bfloat16(), up.bfloat16()
    assert not fits(gate, up, 16, 1)  # a CPU
    monkeypatch.setattr(glu_adapter, "is_hopper", lambda device: True)
    assert fits(gate, up, 16, 40) and not fits(gate, up, 16, 41)
    assert not fits(gate, up, 17, 1)
    assert not fits(gate.float(), up.float(), 16, 1)
    assert not fits(gate, up.t().contiguous().t(), 16, 1)
    assert not fits(gate.t().contiguous().t(), up, 16, 1)
    assert not fits(gate[:0], up[:0], 16, 1)  # an expert that no token has chosen


def test_both_ways_agree(kernels, monkeypatch):
    gate, up, dh = operands(40, 70)
    a, du = torch.randn(16, 70), torch.randn(40, 16)
    monkeypatch.setattr(glu_adapter, "launch_forward", kernels.launch_forward)
    monkeypatch.setattr(glu_adapter, "launch_backward", kernels.launch_backward)
    found = []
    for is_one_kernel in (False, True):
        monkeypatch.setattr(glu_adapter, "fit_one_kernel", lambda *_, is_so=is_one_kernel: is_so)
        h, ha = glu_adapter.forward_with_adapter(gate, up, "silu", (a,))
        assert (ha is not None) == is_one_kernel
        dgate, dup = torch.empty_like(dh), torch.empty_like(dh)
        product = dh.clone()
        da = glu_adapter.backward_with_adapter(product, gate, up, "silu", dgate, dup, du)
        assert (da is not None) == is_one_kernel
        da = du.t() @ product if da is None else da
        found.append([h, h @ a.t() if ha is None else ha, dgate, dup, da])
    torch.testing.assert_close(*found, **CLOSE)


def test_forward_alone_needs_many_rows(kernels, monkeypatch):
    monkeypatch.setattr(glu_adapter, "is_hopper", lambda device: True)
    monkeypatch.setattr(glu_adapter, "launch_forward", kernels.launch_forward)
    monkeypatch.setattr(glu_adapter, "launch_backward", kernels.launch_backward)
    gate, up, dh = (each.half() for each in operands(40, 32))
    a, du = torch.randn(5, 32).half(), torch.randn(40, 5).half()
    for least_rows in (40, 41):
        monkeypatch.setattr(glu_adapter, "LEAST_ROWS", least_rows)
        _, ha = glu_adapter.forward_with_adapter(gate, up, "silu", (a,))
        assert (ha is None) == (least_rows > 40)
    for rows in (1, 0):
        few = [each[:rows].clone() for each in (dh, gate, up, dh, dh, du)]
        da = glu_adapter.backward_with_adapter(*few[:3], "silu", *few[3:])
        assert (da is not None) == bool(rows)


def test_without_an_adapter_there_is_no_product(monkeypatch):
    monkeypatch.setattr(glu_adapter, "is_hopper", lambda device: True)
    gate, up, dh = operands(40, 70)
    h, ha = glu_adapter.forward_with_adapter(gate, up, "silu", ())
    assert ha is None and torch.equal(h, glu_forward(gate, up, "silu"))
    before = dh.clone()
    grads = torch.empty_like(dh), torch.empty_like(dh)
    none = glu_adapter.backward_with_adapter(dh, gate, up, "silu", *grads, None)
    assert none is None and torch.equal(dh, before)
