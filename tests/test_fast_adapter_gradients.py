"""Gradients of adapters: one pass over dy gives what two products give, in Triton's interpreter."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")

from interpreted_kernels import interpreted
from marks import long

from sft_kernels.linears import adapter_gradients
from sft_kernels.linears.products import AdaptedLinear, BoundLinears, FrozenLinear, LinearAdapter

SCALE = 2.5


@pytest.fixture(scope="module")
def kernels():
    """The kernels as Triton's interpreter runs them, with small tiles: several of every kind."""
    kernels = interpreted(adapter_gradients)
    kernels.ROWS, kernels.COLUMNS, kernels.SUM_ROWS = 16, 32, 16
    kernels.processors = lambda device: 12
    return kernels


def operands(rows: int, outs: tuple[int, ...], rank: int, gap: int = 0) -> tuple[Any, ...]:
    """Return dy_i, whose rows may lie apart, B_i and x A^T."""
    torch.manual_seed(0)
    dy = [torch.randn(rows, out + gap)[:, :out] for out in outs]
    b = [torch.randn(out, rank) for out in outs]
    return dy, b, torch.randn(rows, len(outs) * rank)


def expected(
    dy: list[torch.Tensor], b: list[torch.Tensor], xa: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dU and all dB as their formulas say, in float64."""
    rank = b[0].shape[1]
    du, db = [], []
    for index, (grad, each) in enumerate(zip(dy, b, strict=True)):
        own = xa[:, index * rank : (index + 1) * rank].double()
        du.append(SCALE * grad.double() @ each.double())
        db.append(SCALE * grad.double().t() @ own)
    return torch.cat(du, 1), torch.cat(db)


# rows: fewer than a tile, several regions of one tile, several regions of several tiles
ROWS, OUTS, RANKS = (1, 40, 56), ((40,), (64, 16, 16), (1, 5, 40)), (16, 5)
QUICK = [(1, (1, 5, 40), 5), (40, (64, 16, 16), 16), (56, (40,), 5), (56, (1, 5, 40), 16)]
LONG = [long(*case) for case in itertools.product(ROWS, OUTS, RANKS) if case not in QUICK]


@pytest.mark.parametrize("rows, outs, rank", [*QUICK, *LONG])
def test_one_pass_gives_both_gradients(kernels, rows, outs, rank):
    dy, b, xa = operands(rows, outs, rank, gap=rank)
    before = [grad.clone() for grad in dy]
    du, db = kernels.launch_adapter_gradients(dy, b, xa, SCALE, torch.float64)
    db = torch.cat(db)
    assert db.dtype == torch.float64
    wanted_du, wanted_db = expected(dy, b, xa)
    torch.testing.assert_close(du.double(), wanted_du, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(db, wanted_db, rtol=1e-5, atol=1e-4)
    assert all(map(torch.equal, dy, before))


def test_one_number_that_is_not_finite_shows(kernels):
    dy, b, xa = operands(40, (64, 32), 16)
    dy[1][39, 31] = torch.nan
    du, db = kernels.launch_adapter_gradients(dy, b, xa, SCALE, torch.float32)
    db = torch.cat(db)
    assert du[39, 16:].isnan().all() and not du[:39].isnan().any() and not du[:, :16].isnan().any()
    assert db[-1].isnan().all() and not db[:-1].isnan().any()


def bound(b: list[torch.Tensor | None], scales: tuple[float, ...] = ()) -> BoundLinears:
    """Return linears with these B; None for one without an adapter."""
    scales = scales or (SCALE,) * len(b)
    linears, number, end = [], 0, 0
    for each, scale in zip(b, scales, strict=True):
        base = torch.nn.Linear(1, 1)
        if each is None:
            linears.append(FrozenLinear(base))
            continue
        rank = each.shape[1]
        adapter = LinearAdapter(
            torch.empty(rank, 1), each, scale, rank, number, slice(end, end + rank)
        )
        linears.append(AdaptedLinear(base, adapter))
        number, end = number + 1, end + rank
    return BoundLinears(linears)


def half(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.bfloat16() for each in tensors]


def test_a_hopper_gpu_reads_dy_once_where_ranks_and_scales_are_equal_and_small(monkeypatch):
    fits = adapter_gradients.fit_one_pass
    dy, b, _ = operands(40, (64, 32, 32), 16)
    dy, b = half(dy), half(b)
    assert not fits(dy, b)  # a CPU
    monkeypatch.setattr(adapter_gradients, "is_hopper", lambda device: True)
    assert fits(dy, b) and bound(b).are_equal
    assert not bound(b, (1.0, 1.0, 2.0)).are_equal
    assert not bound([b[0][:, :8], *b[1:]]).are_equal
    shifted = torch.empty(dy[0].numel() + 1, dtype=torch.bfloat16)[1:].view_as(dy[0])
    for wrong, factors in (
        ([*dy, dy[0]], [*b, b[0]]),
        ([grad.float() for grad in dy], b),
        ([dy[0].t().contiguous().t(), *dy[1:]], b),
        ([grad[:0] for grad in dy], b),  # no token has chosen an expert
        ([shifted, *dy[1:]], b),
    ):
        assert not fits(wrong, factors)
    for rank, is_small in ((16, True), (24, False)):
        own = half(operands(40, (64,), rank, 0)[1])
        assert fits(dy[:1], own) == is_small


@pytest.mark.parametrize("without", [(), (1,), (0, 2)])
def test_both_ways_agree_where_some_linears_have_no_adapter(kernels, without, monkeypatch):
    dy, b, _ = operands(20, (40, 16, 24), 16, gap=16)
    adapters = [None if index in without else each for index, each in enumerate(b)]
    xa = torch.randn(20, 16 * (3 - len(without)))
    factors = (xa, *(each for each in adapters if each is not None))
    found = []
    for is_one_pass in (False, True):
        monkeypatch.setattr(adapter_gradients, "fit_one_pass", lambda *_, is_so=is_one_pass: is_so)
        monkeypatch.setattr(
            adapter_gradients, "launch_adapter_gradients", kernels.launch_adapter_gradients
        )
        found.append(bound(adapters).rank_and_output_gradients(dy, xa, factors))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-4)
    assert len(found[1][1]) == 3 - len(without)
