"""Fused linear cross entropy: the loss over labelled tokens, without ever holding all logits.

Per token, with logits z = hidden @ weight.T, softmax p and target y:
    nll = logsumexp(z) - z[y],  d nll / d z = p - onehot(y),
and with a cap, z = cap * tanh(s / cap), also d z / d s = 1 - (z / cap)^2.

An output head of V = 128,256 turns 8,192 tokens into 2 GiB of logits in bfloat16, which the plain
loss copies to float32 and differentiates there: 10 GiB for one number. Here the head runs on one
chunk of tokens at a time, and the chunk's logits are overwritten with their gradient. Tokens
without a label (prompts and padding) are left out altogether. `nll_and_gradient_` has the reference
for CPUs; the kernel for GPUs is in `cross_entropy_kernel`.

Legend: B rows, T tokens, H hidden features, V vocabulary, N labelled tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_play.models.fast.capture import as_it_was
from sft_play.models.fast.head import HeadFormula, head_formula_of
from sft_play.models.fast.setup import base_model_of
from sft_play.plan.fast import TRAINED_TOKENS

# Logits of a chunk: enough to keep the GPU's matrix units busy (1,024 tokens of the largest heads)
CHUNK_BYTES = 256 * 2**20
TILE_TOKENS = 128  # the tokens of a chunk are a multiple of this
# The smallest number of float16 is 6e-8, and a probability among 100,000 tokens is near that. With
# this factor gradients of hidden states are still below 512 |weight|.
FLOAT16_SCALE = 256.0
CHECK_TOKENS = 8


def fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> Tensor:
    """Return the sum of -log p(target) in nats, a float32 scalar.

    hidden (N, H) and weight (V, H) have the same dtype, that of the products; softmax is in
    float32; targets (N,) int64 in [0, V). Without tokens the sum is 0, with a gradient of zeros.
    """
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    assert len(hidden) == len(targets), f"{len(hidden)} tokens, {len(targets)} targets"
    return FusedLinearCrossEntropy.apply(hidden, weight, targets, softcap)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the plain sum in the forward pass; backward scales them.

    A factor such as 1 / tokens of a step, applied to gradients of logits in float16, would push
    most of them below the smallest number of that dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
    ) -> Tensor:
        """Return the summed nll."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _zeros_for_sums(weight) if needs_weight else None
        scale = FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0
        rows = chunk_tokens(len(hidden), len(weight), weight.element_size())
        buffer = hidden.new_empty(min(rows, len(hidden)), len(weight))  # one for all chunks
        with torch.autocast(hidden.device.type, enabled=False):  # the caller has cast already
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
    def backward(ctx: Any, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden and weight."""
        assert ctx.gradients is not None, (
            "a second backward pass: the first one has scaled the gradients in place"
        )
        gradients = ctx.gradients
        ctx.gradients = None  # released, so that they become .grad without a copy
        # One dimension: a scalar would itself be rounded to 16 bits, and so would all gradients
        factor = (grad_nll / ctx.scale)[None]
        grad_hidden, grad_weight = gradients
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor).to(ctx.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None


def _zeros_for_sums(weight: Tensor) -> Tensor:
    """Return zeros like weight; float32 for float16, whose sums over tokens may overflow."""
    dtype = torch.float32 if weight.dtype == torch.float16 else None
    return torch.zeros_like(weight, dtype=dtype)


def chunk_tokens(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the tokens of a chunk: whole tiles, equal chunks of about CHUNK_BYTES of logits."""
    tiles = CHUNK_BYTES // (vocabulary * itemsize) // TILE_TOKENS
    most = max(TILE_TOKENS, tiles * TILE_TOKENS)
    chunks = max(1, -(-tokens // most))
    if chunks == 1:
        return max(1, tokens)
    return -(-tokens // chunks // TILE_TOKENS) * TILE_TOKENS


def nll_and_gradient_(
    logits: Tensor, targets: Tensor, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    """Return the summed nll, a float32 scalar, of logits (N, V) before the cap.

    The logits are overwritten with the sum's gradient times `scale`.
    """
    if logits.is_cuda:
        from sft_play.models.fast import cross_entropy_kernel

        return cross_entropy_kernel.nll_and_gradient_(logits, targets, softcap, scale)
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


class FusedHead:
    """The forward method of an output head: logits, or the loss if labels were set before.

    It is set on the instance of a Linear, so that parameters, names and saved files do not change.
    The loss is computed here, inside the model's forward pass, because only there DDP sees that the
    head's weight is used, and autocast is active.
    """

    def __init__(self, head: nn.Linear, formula: HeadFormula):
        self.head = head
        self.formula = formula
        self._labels: tuple[Tensor, Tensor] | None = None
        self._tokens_of_rows: Sequence[int] | None = None
        self._nll: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return type(self.head).forward(self.head, hidden)
        positions, targets = self._labels
        hidden = hidden.flatten(0, 1).index_select(0, positions)  # (N, H)
        if self.formula.scale != 1.0:
            hidden = hidden * self.formula.scale
        weight = self.head.weight  # (V, H)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
        if self._tokens_of_rows is not None:
            self._nll = self._nll_of_rows(hidden, weight, targets)
            return self._nll.sum().reshape(1, 1, 1)
        self._nll = fused_linear_cross_entropy(hidden, weight, targets, self.formula.softcap)
        # Returned in place of logits, so that DDP finds the graph. A model may scale or cap it;
        # the value is not used.
        return self._nll.reshape(1, 1, 1)

    def _nll_of_rows(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the summed nll of each row, (B,), of the hidden states (N, H) of all rows."""
        counts = list(self._tokens_of_rows)
        rows = zip(hidden.split(counts), targets.split(counts), strict=True)
        nll = [
            fused_linear_cross_entropy(row, weight, of_row, self.formula.softcap)
            for row, of_row in rows
        ]
        return torch.stack(nll)

    @contextlib.contextmanager
    def expecting(
        self, positions: Tensor, targets: Tensor, tokens_of_rows: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Compute the loss in the one forward pass inside this context.

        With `tokens_of_rows`, the labelled tokens of each row, that is the loss of each row.
        """
        self._labels = (positions, targets)
        self._tokens_of_rows = tokens_of_rows
        self._nll = None
        try:
            yield
        finally:
            self._labels = None
            self._tokens_of_rows = None

    def take_nll(self) -> Tensor:
        """Return the loss of the last pass, and drop the reference to its graph."""
        assert self._nll is not None, "the model has not called its head"
        nll = self._nll
        self._nll = None
        return nll


def fuse_loss(model: nn.Module) -> None:
    """Install the fused loss on the model's output head, for `fused_nll`.

    Check `why_loss_not_fusable` first, and call this before the model is wrapped.
    """
    head = _output_head(model)
    formula = _formula_of(model)
    assert formula is not None, "why_loss_not_fusable comes first"
    head.forward = FusedHead(head, formula)


def is_loss_fused(model: nn.Module) -> bool:
    """Return whether `fuse_loss` was called."""
    return isinstance(_forward_of_head(model), FusedHead)


def fused_nll(
    model: nn.Module, wrapped: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor
) -> Tensor:
    """Return the summed nll in nats of a forward pass, a float32 scalar.

    `wrapped` is called with `inputs`; it is the model itself, or DDP or DeepSpeed around it.
    positions (N,) int64 index the hidden states that predict, in the flattened (B * T); targets
    (N,) int64 are the tokens after them.
    """
    head = _forward_of_head(model)
    assert isinstance(head, FusedHead), "fuse_loss comes first"
    with head.expecting(positions, targets):
        wrapped(**inputs)
    return head.take_nll()


def fused_nll_of_rows(
    model: nn.Module, inputs: dict[str, Any], labels: tuple[Tensor, Tensor], counts: Sequence[int]
) -> Tensor:
    """Return the summed nll of each row of a forward pass, float32 (B,), for evaluations.

    `labels` are the positions and targets of `fused_nll`; row r has counts[r] of them.
    """
    head = _forward_of_head(model)
    assert isinstance(head, FusedHead), "fuse_loss comes first"
    with head.expecting(*labels, counts):
        model(**inputs)
    return head.take_nll()


def why_loss_not_fusable(model: nn.Module, zero_stage: int) -> str | None:
    """Return why the loss cannot be fused, None if it can. Runs the model on a few tokens."""
    if zero_stage == 3:
        return "ZeRO-3 partitions the output head"
    head = _output_head(model)
    if isinstance(head, TrainableTokensWrapper):
        return TRAINED_TOKENS
    if isinstance(head, LoraLayer):
        return "the output head has adapters"
    if type(head) is not nn.Linear or head.bias is not None:
        with_bias = " with a bias" if getattr(head, "bias", None) is not None else ""
        return f"the output head is {type(head).__name__}{with_bias}, not a plain Linear"
    if "forward" in vars(head):
        return "the output head is patched already"
    formula = _formula_of(model)
    if formula is None or not _logits_come_from_head(model, head, formula):
        return "the logits are not those of the output head (scaled or changed behind it)"
    return None


@torch.no_grad()
def _logits_come_from_head(model: nn.Module, head: nn.Linear, formula: HeadFormula) -> bool:
    """Return whether the model's logits follow from its head's scores by a formula.

    The model is run to find out, with its weights.
    """
    outputs: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with as_it_was(model, head.weight.device):
            model.eval()
            ids = torch.arange(CHECK_TOKENS, device=head.weight.device)[None] % len(head.weight)
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    expected_shape = (1, CHECK_TOKENS, len(head.weight))
    if len(outputs) != 1 or outputs[0].shape != expected_shape or logits.shape != expected_shape:
        return False
    expected = formula.logits(outputs[0].float())
    difference = (logits.float() - expected).abs().max().item()
    # The cap rounds to 2^-8 of a logit in bfloat16; a scale that matters changes more. Weights that
    # produce NaN pass here: the evaluation refuses them.
    return not difference > 2**-7 * expected.abs().max().item()


def _formula_of(model: nn.Module) -> HeadFormula | None:
    """Return how a model's logits follow from its head's scores, None if in no known way."""
    return head_formula_of(base_model_of(model), model.get_output_embeddings())


def _forward_of_head(model: nn.Module) -> Any:
    head = _output_head(model)
    return None if head is None else vars(head).get("forward")


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes the logits; a head that is trained whole is a copy."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        return head.modules_to_save[head.active_adapters[0]]
    return head
