"""Triton kernel of `linear_cross_entropy`: loss and gradient of logits, in place.

Imported only on a GPU: CPU builds of torch do not include Triton.

Legend: N tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from sft_play.models.float8.kernels import load_float32, program_number

BLOCK = 8192  # columns of a row that a program loads at once
WARPS = 16


@triton.jit
def _capped(scores, softcap, HAS_CAP: tl.constexpr):
    """cap * tanh(scores / cap), with tanh from exp: exact to 1e-7 of the cap, never NaN."""
    if HAS_CAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores


@triton.jit
def _rows(
    logits,
    row_stride,
    targets,
    nll,
    columns,
    softcap,
    scale,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token: log sum exp in a first pass over the row, the gradient in a second."""
    row = program_number()  # N * V exceeds 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    largest = float("-inf")
    total = 0.0  # of exp(score - largest)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        scores = _capped(load_float32(logits + offsets, inside), softcap, HAS_CAP)
        scores = tl.where(inside, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(scores - new_largest))
        largest = new_largest
    log_total = largest + tl.log(total)
    wanted = _capped(tl.load(logits + target).to(tl.float32), softcap, HAS_CAP)
    tl.store(nll + row, log_total - wanted)
    tl.debug_barrier()  # all threads must read the target's score before one overwrites it
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        scores = _capped(load_float32(logits + offsets, inside), softcap, HAS_CAP)
        gradient = tl.exp(scores - log_total) - tl.where(offsets == target, 1.0, 0.0)
        if HAS_CAP:
            gradient *= 1 - (scores / softcap) * (scores / softcap)
        tl.store(logits + offsets, (gradient * scale).to(logits.dtype.element_ty), mask=inside)


def nll_and_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return the summed nll of logits (N, V), overwritten with its gradient times `scale`.

    The arguments are those of `linear_cross_entropy.nll_and_gradient_`.
    """
    tokens, vocabulary = logits.shape
    assert logits.stride(1) == 1 and targets.stride(0) == 1, "a row's columns are adjacent"
    nll = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    arguments = (logits, logits.stride(0), targets, nll, vocabulary, softcap or 1.0, scale)
    _rows[(tokens,)](*arguments, HAS_CAP=softcap is not None, BLOCK=block, num_warps=WARPS)
    return nll.sum()
