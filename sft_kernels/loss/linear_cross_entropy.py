"""Fused linear cross entropy: the loss over labeled tokens, without ever storing all logits.

Per token, with logits z = hidden @ weight.T, softmax p and target y:
    nll = logsumexp(z) - z[y],  d nll / d z = p - onehot(y),
and with a cap, z = cap * tanh(s / cap), also d z / d s = 1 - (z / cap)^2.

An output head of V = 128,256 turns 8,192 tokens into 2 GiB of logits in bfloat16. The plain loss
copies them to float32 and differentiates there: 10 GiB for one number. Here the head runs on one
chunk of tokens at a time, and the chunk's logits are overwritten with their gradient. Tokens
without a label (prompts and padding) are skipped. `nll_and_gradient_` contains the reference for
CPUs; `launch_cross_entropy` runs the kernel for GPUs.

A model may use the output of its head unchanged, scaled or capped. To find out which, the code of
its class runs on stubs, as in `recognize`; no weights are read.

Legend: H hidden features, V vocabulary, N labeled tokens.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from sft_kernels import triton_kernels
from sft_kernels.recognize import Stub, numbers, own_result, real_numbers
from sft_kernels.sharded import shallow_copy
from sft_kernels.triton_kernels import load_float32, program_number, tl, triton

TOKENS = 2
SCORES = 5
FLOAT32_EPSILON = 1e-5  # models return logits in float32
LARGE = 100.0  # scores large enough to be changed by any realistic cap


@dataclass(frozen=True)
class HeadFormula:
    """The formula from the scores of an output head to logits."""

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, scores: Tensor) -> Tensor:
        """Return the logits for scores."""
        scaled = scores * self.scale
        if self.softcap is None:
            return scaled
        return torch.tanh(scaled / self.softcap) * self.softcap


class StubOutput:
    """The output of a stack of layers; every other attribute or item is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@real_numbers()
def head_formula_of(base: PreTrainedModel, head: nn.Module) -> HeadFormula | None:
    """Return the formula from the head's scores to the model's logits; None if it is unknown.

    `head` is the module that computes the scores, or a wrapper around it.
    """
    hidden = numbers(1, TOKENS, SCORES)
    scores = hidden * LARGE
    output = StubOutput(hidden)
    children: dict[str, nn.Module] = {}
    for name, child in base.named_children():
        if child is head:
            children[name] = Stub(lambda x: x * LARGE)
            children[name].weight = hidden  # models cast the head's input to its weight's dtype
        else:
            children[name] = DecoderStub(child, output)
    copied = shallow_copy(base)
    copied.config = copy.copy(base.config)
    copied.config.dtype = torch.float32  # Unsloth's models round their logits to this dtype
    result = own_result(copied, children, input_ids=torch.zeros(1, TOKENS, dtype=torch.int64))
    logits = getattr(result, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape != scores.shape:
        return None
    logits = logits.double()
    candidates = [HeadFormula(), HeadFormula(scale=float(logits[0, 0, 0] / scores[0, 0, 0]))]
    softcap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is not None:
        candidates.append(HeadFormula(softcap=softcap))
    for formula in candidates:
        if torch.allclose(logits, formula.logits(scores), rtol=FLOAT32_EPSILON, atol=0):
            return formula
    return None


class DecoderStub(nn.Module):
    """A stack of layers that returns the same output for any input, with a decoder's attributes."""

    def __init__(self, decoder: nn.Module, output: StubOutput):
        super().__init__()
        for name, value in vars(decoder).items():
            if not name.startswith("_") and name != "forward":
                vars(self)[name] = value
        self.output = output

    def forward(self, *_: Any, **__: Any) -> StubOutput:
        """Return the output."""
        return self.output


# Logits per chunk: enough to keep the GPU's matrix units busy (1,024 tokens for the largest heads)
CHUNK_BYTES = 256 * 2**20
TILE_TOKENS = 128  # the number of tokens per chunk is a multiple of this
# The smallest float16 number is 6e-8, and a probability among 100,000 tokens can be near it. With
# this factor, gradients of hidden states are still below 512 |weight|.
FLOAT16_SCALE = 256.0


def fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> Tensor:
    """Return the sum of -log p(target) in nats, a float32 scalar.

    hidden (N, H) and weight (V, H) have the same dtype, which the matrix multiplications use.
    Softmax is in float32. targets (N,) are int64 in [0, V). Without tokens, the sum is 0, with a
    gradient of zeros.
    """
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    assert len(hidden) == len(targets), f"{len(hidden)} tokens, {len(targets)} targets"
    return FusedLinearCrossEntropy.apply(hidden, weight, targets, softcap)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Compute the gradients of the unscaled sum in the forward pass; backward scales them.

    Scaling the float16 gradients of logits, e.g. by 1 / tokens per step, would push most of them
    below the smallest number of that dtype.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
    ) -> Tensor:
        """Return the summed nll."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:  # float32 for float16 weights: sums over tokens may overflow in float16
            dtype = torch.float32 if weight.dtype == torch.float16 else None
            grad_weight = torch.zeros_like(weight, dtype=dtype)
        scale = FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0
        rows = chunk_tokens(len(hidden), len(weight), weight.element_size())
        buffer = hidden.new_empty(min(rows, len(hidden)), len(weight))  # one for all chunks
        with torch.autocast(hidden.device.type, enabled=False):  # the caller has already cast
            for start in range(0, len(hidden), rows):
                chunk = hidden[start : start + rows]
                logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
                nll += nll_and_gradient_(logits, targets[start : start + rows], softcap, scale)
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[start : start + rows])
                if grad_weight is not None:
                    dtype = grad_weight.dtype
                    grad_weight.addmm_(logits.t().to(dtype), chunk.to(dtype))
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.scale = scale
        ctx.dtype = hidden.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden and weight."""
        assert ctx.gradients is not None, (
            "a second backward pass: the first one has scaled the gradients in place"
        )
        gradients = ctx.gradients
        ctx.gradients = None  # released, so that they become .grad without a copy
        # 1-D: a scalar would itself be rounded to 16 bits, which would change all gradients
        factor = (grad_nll / ctx.scale)[None]
        grad_hidden, grad_weight = gradients
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor).to(ctx.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None


def chunk_tokens(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the tokens per chunk: full tiles, in equal chunks of about CHUNK_BYTES of logits."""
    tiles = CHUNK_BYTES // (vocabulary * itemsize) // TILE_TOKENS
    most = max(TILE_TOKENS, tiles * TILE_TOKENS)
    chunks = max(1, -(-tokens // most))
    if chunks == 1:
        return max(1, tokens)
    return -(-tokens // chunks // TILE_TOKENS) * TILE_TOKENS


def nll_and_gradient_(
    logits: Tensor, targets: Tensor, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    """Return the summed nll, a float32 scalar, for logits (N, V) before the cap.

    The logits are overwritten with the sum's gradient times `scale`.
    """
    if logits.is_cuda:
        return launch_cross_entropy(logits, targets, softcap, scale)
    if triton_kernels.is_traced:
        return logits.new_empty(len(logits), dtype=torch.float32).sum()
    scores = logits.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    log_total = torch.logsumexp(scores, dim=1, keepdim=True)
    nll = (log_total - scores.gather(1, targets[:, None])).sum()
    gradient = torch.exp(scores - log_total)
    gradient.scatter_add_(1, targets[:, None], gradient.new_full((len(targets), 1), -1.0))
    if softcap is not None:
        gradient *= 1 - (scores / softcap) ** 2
    logits.copy_(gradient * scale)
    return nll


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


def launch_cross_entropy(
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
