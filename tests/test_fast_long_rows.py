"""More than 65,000 tokens: what kernels index with, and positions that float32 still tells apart."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

import sft_kernels
from sft_kernels.attention import kernels as attention_kernels
from sft_kernels.attention.flex import BLOCK, make_block_mask
from sft_kernels.attention.kernels import MAX_ELEMENTS, attend
from sft_kernels.attention.reference import Scoring
from sft_kernels.boundaries import Documents

FAST = Path(sft_kernels.__path__[0])
KERNELS = sorted(FAST.rglob("*kernel*.py"))
LONG = 131_072  # tokens of the longest row that one GPU trains an 8B model on, without offloading


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(FAST)))
def test_rows_are_numbered_with_64_bits(path):
    """131,072 tokens of 28,672 features are 3.8e9 elements, and 32 bits count to 2.1e9."""
    text = path.read_text(encoding="utf-8")
    narrow = re.findall(r"tl\.program_id\(0\)(?!\.to\(tl\.int64\))", text)
    assert not narrow, "an offset row * features would overflow"


def test_the_queries_of_long_rows_are_within_what_the_kernels_index():
    heads, features = 32, 128
    assert 2 * LONG * heads * features < MAX_ELEMENTS
    query = torch.empty(1, device="meta").expand(4 * LONG, heads, features)
    with pytest.raises(AssertionError, match="smaller batches or shorter rows"):
        attention_kernels._in_16_bits(query, query, query)


def test_gradients_at_the_end_of_a_long_row_are_finite_and_those_of_its_window():
    """Only the window of the last tokens matters to them, wherever the row began."""
    tokens, window = 70_000, 64
    draw = torch.Generator().manual_seed(0)
    row = torch.randn(1, tokens, 3, 1, 8, generator=draw)
    scoring = Scoring(0.3, window)
    blocks = -(-tokens // BLOCK)
    mask = make_block_mask(Documents.of_lengths([tokens]), blocks * BLOCK, window)
    assert mask.kv_num_blocks.shape[-1] == blocks and mask.kv_num_blocks.max() <= 2
    end = row[:, -4 * window :].clone().requires_grad_()
    alone = row[:, -2 * window :].clone().requires_grad_()
    for part in (end, alone):
        out = attend(*part.unbind(2), scoring)
        out[:, -1].sum().backward()
        assert part.grad.isfinite().all()
    assert torch.equal(end.grad[:, -2 * window :], alone.grad)


@torch.no_grad()
def test_neighbours_are_told_apart_at_the_end_of_a_long_row():
    """Angles are made in float32: in 16 bits positions beyond 256 would run together."""
    model = tiny_model("llama", dtype=torch.bfloat16, max_position_embeddings=2 * LONG)
    rotary = model.get_decoder().rotary_emb
    positions = torch.arange(2 * LONG - 4, 2 * LONG)[None]
    cos, _sin = rotary(torch.zeros(1, 4, 32, dtype=torch.float32), positions)
    exact = positions[0].double()[:, None] * rotary.inv_freq.double()
    assert (cos[0, :, : exact.shape[1]] - exact.cos()).abs().max() < 2e-2
    assert (cos[0].diff(dim=0).abs().amax(-1) > 0.1).all()
