"""The grouped products of GPUs, as Triton's interpreter runs them."""

import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from bitsandbytes.nn import Params4bit
from marks import long
from torch import Tensor

pytest.importorskip("triton", reason="there is no Triton for this system")

from interpreted_kernels import interpreted
from test_four_bit import interpreted_unpacking
from test_mxfp4 import numbers_of_mxfp4

from sft_kernels import mxfp4
from sft_kernels.experts import grouped_kernels, products
from sft_kernels.experts.products import Routing, Term, sort_by_expert
from sft_kernels.linears import four_bit

TOKENS, CHOICES, EXPERTS, RANK = 40, 2, 5, 3
EXACT = 1e-3  # float16, in which the interpreter multiplies; it cannot in bfloat16


PLAIN_SCALES = (("nf4", False), ("fp4", False))


@pytest.fixture(scope="module")
def kernels():
    """The kernels, interpreted."""
    found = interpreted(grouped_kernels)
    with patch.object(found, "_shared_memory", lambda device: 1 << 20):
        yield found


def routing(kernels: ModuleType, choices: Tensor) -> Routing:
    found = sort_by_expert(choices, EXPERTS)
    return found._replace(tiles=kernels.tiles_of(found.ends, len(found.order)))


def place_of(by_expert: Routing) -> tuple[Tensor, Tensor, Tensor]:
    return by_expert.order, by_expert.ends, by_expert.tiles


def some_choices(kind: str) -> Tensor:
    """Return experts of tokens; in every case one of them gets no token."""
    torch.manual_seed(0)
    natural = torch.rand(TOKENS, EXPERTS - 1).topk(CHOICES).indices
    if kind == "elsewhere":
        natural[::3, 0] = EXPERTS
    return torch.full_like(natural, 2) if kind == "skewed" else natural


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kind", ["natural", "elsewhere", long("skewed")])
@pytest.mark.parametrize("summed, features", [(72, 40), (64, 300)])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_a_grouped_product_is_that_of_each_expert(kernels, kind, summed, features, of_tokens):
    """Of skewed choices a program computes two tiles: it is launched for an even share of the rows."""
    by_expert = routing(kernels, some_choices(kind))
    rows = int(by_expert.ends[-1])
    x = torch.randn(TOKENS if of_tokens else TOKENS * CHOICES, summed).half()
    ranks = torch.randn(TOKENS * CHOICES, RANK).half()
    term = Term(ranks, torch.randn(EXPERTS, RANK, features), 0.5)
    bias = torch.randn(EXPERTS, features)
    by_lines = torch.randn(EXPERTS, features, summed).half().transpose(1, 2)
    for matrices in (by_lines, torch.randn(EXPERTS, summed, features).half()):
        lines_are_summed = matrices.stride(2) == 1
        added = (term, bias) if lines_are_summed == of_tokens else (None, None)
        wanted = products.rows_times(x, matrices, by_expert, *added, of_tokens)
        lines = matrices if lines_are_summed else matrices.transpose(1, 2)
        found = torch.full((len(by_expert.order), features), torch.nan, dtype=torch.half)
        parts = [(0, lines[:2]), (2, lines[2:])]
        kernels.grouped_product(
            *(x, parts, lines_are_summed, None, *place_of(by_expert), found),
            *(CHOICES if of_tokens else None, *added),
        )
        assert relative(found[:rows], wanted[:rows]) < EXACT


@pytest.mark.parametrize("kind", ["natural", "elsewhere", long("skewed")])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_an_outer_product_sums_the_rows_of_each_expert(kernels, kind, of_tokens):
    by_expert = routing(kernels, some_choices(kind))
    x = torch.randn(TOKENS * CHOICES, RANK).half()
    y = torch.randn(TOKENS if of_tokens else TOKENS * CHOICES, 200).half()
    weights = torch.rand(TOKENS * CHOICES)
    wanted = torch.empty(EXPERTS, RANK, 200)
    arguments = (x.float(), y.float(), by_expert, wanted, 0.25, weights)
    products.rows_outer(*arguments, of_tokens)
    made = torch.full((200, RANK, EXPERTS), torch.nan)
    y_choices = CHOICES if of_tokens else None
    found = made.permute(2, 1, 0)
    ends = (by_expert.order, by_expert.ends)
    kernels.outer(x, y, *ends, found, 0.25, y_choices, weights)
    assert relative(found, wanted) < EXACT
    assert not found[EXPERTS - 1].any()


class PlainLines(NamedTuple):
    """Lines of weights that are not packed."""

    shape: torch.Size
    is_turned: bool = False

    def unpack(self, weight: Tensor, experts: slice) -> Tensor:
        return weight[experts]


@pytest.mark.parametrize("limit, sizes", [(8, [6, 6]), (12, [12]), (0.5, [1] * 12)])
def test_experts_are_unpacked_in_equal_parts_within_the_limit(monkeypatch, limit, sizes):
    weight = torch.arange(12.0).view(12, 1, 1).expand(12, 4, 8)
    matrices = products.Packed(weight, PlainLines(weight.shape), is_transposed=False)
    monkeypatch.setattr(products, "UNPACKED_BYTES", limit * 2 * 4 * 8)
    parts = list(products._unpacked_parts(matrices))
    assert [len(part) for _, part in parts] == sizes
    assert all(part[0, 0, 0] == first for first, part in parts)


def few_at_a_time(
    packed: Params4bit, unpacking: ModuleType, made: list[weakref.ref]
) -> Iterator[tuple[int, Tensor]]:
    """Yield two unpacked experts, two more and the last; only one of these parts exists at a time."""

    def part(first: int) -> tuple[int, Tensor]:
        assert not any(weight() is not None for weight in made)
        own = slice(first, min(first + 2, EXPERTS))
        weight = unpacking.launch_unpacking(packed, packed.quant_state, own)
        made.append(weakref.ref(weight))
        return first, weight

    return (part(first) for first in (0, 2, 4))


@pytest.mark.parametrize(
    "quant_type, is_nested", [("nf4", True), *(long(*each) for each in PLAIN_SCALES)]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_packed_weights_are_unpacked_tile_by_tile(kernels, quant_type, is_nested, is_transposed):
    weight = torch.randn(EXPERTS, 70, 192).half()
    packed = Params4bit(
        weight, requires_grad=False, quant_type=quant_type, compress_statistics=is_nested
    ).to("cpu")
    linear = products.ExpertLinear(packed, None, is_transposed, EXPERTS, 0.0)
    matrices = linear.matrices(torch.half).unpacked(torch.half)
    unpacked = four_bit.unpack_with_kernel(packed)
    assert torch.equal(matrices, unpacked if is_transposed else unpacked.transpose(1, 2))
    compare_packed(kernels, linear)


@pytest.mark.parametrize("is_turned", [False, True])
def test_mxfp4_is_unpacked_tile_by_tile(kernels, is_turned):
    weight = numbers_of_mxfp4(EXPERTS, 96, 64, is_turned=is_turned).half()
    linear = products.ExpertLinear(mxfp4.pack_mxfp4(weight, is_turned), None, True, EXPERTS, 0.0)
    assert torch.equal(linear.matrices(torch.half).unpacked(torch.half), weight)
    compare_packed(kernels, linear)


def compare_packed(kernels: ModuleType, linear: products.ExpertLinear) -> None:
    """Compare products over packed weights, and over their transposes, with those of plain ones."""
    unpacking = interpreted_unpacking()
    by_expert = routing(kernels, some_choices("natural"))
    for matrices in (linear.matrices(torch.half), linear.matrices(torch.half).transpose(1, 2)):
        x = torch.randn(TOKENS, matrices.shape[1]).half()
        wanted = products.rows_times(x, matrices, by_expert, of_tokens=True)
        state = linear.weight.quant_state
        scales = unpacking.unpack_scales(state)
        experts, lines, features = matrices.lines.shape
        codes = linear.weight.detach().view(experts, lines, features // 2)
        packing = (scales, state.blocksize, state.quant_type)
        out = torch.full(wanted.shape, torch.nan, dtype=torch.half)
        are_summed, place = not matrices.is_transposed, (*place_of(by_expert), out, CHOICES)
        kernels.grouped_product(x, [(0, codes)], are_summed, packing, *place)
        assert relative(out, wanted) < EXACT
        out.fill_(torch.nan)
        made: list[weakref.ref] = []
        parts = few_at_a_time(linear.weight, unpacking, made)
        kernels.grouped_product(x, parts, are_summed, None, *place)
        assert len(made) == 3 and relative(out, wanted) < EXACT
