"""Cross-entropy over labelled tokens alone, whose logits never exist as a whole.

A head of V = 128,256 turns 8,192 tokens into 2 GiB of logits in bfloat16, which the plain loss copies to float32 and
differentiates there: 10 GiB for a number. Here the head runs over a chunk of tokens at a time, and the chunk's logits
become their gradient in place; tokens without a label, prompts and padding, are left out altogether.

Per token, with logits z = hidden @ weight.T, softmax p and target y:
    nll = logsumexp(z) - z[y],  d nll / d z = p - onehot(y),
and with a cap, z = cap * tanh(s / cap), also d z / d s = 1 - (z / cap)^2.

Legend: B rows, T tokens, H hidden features, V vocabulary, N labelled tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

CHUNK_BYTES = (
    256 * 2**20
)  # of logits: as much as keeps the GPU's matrix units busy (1,024 tokens of the largest heads)
# float16 ends at 6e-8, where a probability among 100,000 tokens is near it; times this, gradients of hidden states stay under 512 |weight|
FLOAT16_SCALE = 256.0
PROBE_TOKENS = 8


def linear_nll(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return the sum of -log p(target) in nats, a float32 scalar; softmax in float32, matmuls in the type of `hidden`.

    hidden (N, H) and weight (V, H) of one type, targets (N,) int64 in [0, V). Without tokens it is 0, with a gradient of zeros.
    """
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    assert len(hidden) == len(targets), f"{len(hidden)} tokens, {len(targets)} targets"
    return _LinearNll.apply(hidden, weight, targets, softcap)


class _LinearNll(torch.autograd.Function):
    """Gradients are those of the bare sum, of the size of a probability; only then comes the factor of the loss.

    A factor such as 1 / tokens of a step, applied to logits in float16, would push most of them under its smallest number.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        softcap: float | None,
    ) -> torch.Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # summed over tokens, float16 may overflow before a loss scaler could shrink it
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32 if weight.dtype == torch.float16 else None)
            if needs_weight
            else None
        )
        scale = FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0
        rows = chunk_rows(len(hidden), len(weight), weight.element_size())
        buffer = hidden.new_empty(min(rows, len(hidden)), len(weight))  # one for all chunks
        with torch.autocast(hidden.device.type, enabled=False):  # types are settled
            for start in range(0, len(hidden), rows):
                tokens, wanted = hidden[start : start + rows], targets[start : start + rows]
                logits = torch.mm(tokens, weight.t(), out=buffer[: len(tokens)])
                nll += nll_to_gradient_(logits, wanted, softcap, scale)
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[start : start + rows])
                if grad_weight is not None:
                    grad_weight.addmm_(
                        logits.t().to(grad_weight.dtype), tokens.to(grad_weight.dtype)
                    )
        ctx.gradients, ctx.scale, ctx.dtype = (grad_hidden, grad_weight), scale, hidden.dtype
        return nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nll: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert ctx.gradients is not None, (
            "a second backward pass: the first one has scaled the gradients in place"
        )
        gradients, ctx.gradients = (
            ctx.gradients,
            None,
        )  # let go of, so that they become .grad without a copy
        factor = (grad_nll / ctx.scale)[
            None
        ]  # of one dimension: without any, it would be rounded to 16 bits itself, and all gradients with it
        return (
            *(
                None if gradient is None else gradient.mul_(factor).to(ctx.dtype)
                for gradient in gradients
            ),
            None,
            None,
        )


def chunk_rows(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the tokens of a chunk: equal chunks of whole tiles of 128 rows, of about CHUNK_BYTES of logits each."""
    most = max(128, CHUNK_BYTES // (vocabulary * itemsize) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    return -(-max(1, tokens) // chunks // 128) * 128 if chunks > 1 else max(1, tokens)


def nll_to_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return the summed nll (float32 scalar) of logits (N, V), uncapped, and overwrite them with its gradient times `scale`."""
    if logits.is_cuda:
        from sft_play.models.fast.loss_kernel import nll_to_gradient_ as on_gpu

        return on_gpu(logits, targets, softcap, scale)
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
    """The forward pass of an output head: logits as ever, and in place of them the loss while labels are announced.

    It lies on the instance of a Linear, so that parameters, names and saved files are what they were. The loss is computed
    here, inside the model's forward pass, since only there DDP sees the head's weight at work and autocast says its type.
    """

    def __init__(self, head: nn.Linear, softcap: float | None):
        self.head, self.softcap = head, softcap
        self._labels: tuple[torch.Tensor, torch.Tensor] | None = None
        self._nll: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._labels is None:
            return type(self.head).forward(self.head, hidden)
        positions, targets = self._labels
        hidden, weight = (
            hidden.flatten(0, 1).index_select(0, positions),
            self.head.weight,
        )  # (N, H), (V, H)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        self._nll = linear_nll(hidden, weight, targets, self.softcap)
        # in the place of logits; a model may cap it, nobody reads it, and what looks for the graph of the pass (DDP) finds it
        return self._nll.reshape(1, 1, 1)

    @contextlib.contextmanager
    def expecting(self, positions: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
        """Compute the loss of the one forward pass inside."""
        self._labels, self._nll = (positions, targets), None
        try:
            yield
        finally:
            self._labels = None

    def take_nll(self) -> torch.Tensor:
        """Return the loss of the last pass, and keep nothing of its graph."""
        assert self._nll is not None, "the model has not called its head"
        nll, self._nll = self._nll, None
        return nll


def fuse_loss(model: nn.Module) -> None:
    """Let `fused_nll` compute the model's loss. Ask `can_fuse_loss` first, and do it before the model is wrapped."""
    head = model.get_output_embeddings()
    head.forward = FusedHead(head, _softcap(model))


def is_loss_fused(model: nn.Module) -> bool:
    """Return whether `fuse_loss` was called."""
    return isinstance(_forward_of_head(model), FusedHead)


def fused_nll(
    model: nn.Module,
    wrapped: nn.Module,
    inputs: dict[str, Any],
    positions: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Return the summed nll in nats of a forward pass, a float32 scalar.

    `wrapped` is what is called with `inputs`: the model itself, DDP or DeepSpeed around it. positions (N,) int64 are those of
    the hidden states that predict, in the flattened (B * T), targets (N,) int64 the tokens that follow.
    """
    fused = _forward_of_head(model)
    assert isinstance(fused, FusedHead), "fuse_loss comes first"
    with fused.expecting(positions, targets):
        wrapped(**inputs)
    return fused.take_nll()


def can_fuse_loss(model: nn.Module, zero_stage: int) -> str | None:
    """Return why the loss has to be computed from whole logits, None where it need not be. Runs the model on a few tokens."""
    if zero_stage == 3:
        return "ZeRO-3 partitions the output head"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return f"the output head is {type(head).__name__}{' with a bias' if getattr(head, 'bias', None) is not None else ''}, not a plain Linear"
    if "forward" in vars(head):
        return "the output head is patched already"
    return (
        None
        if _logits_are_the_heads(model, head)
        else "the logits are not those of the output head (scaled or changed behind it)"
    )


@torch.no_grad()
def _logits_are_the_heads(model: nn.Module, head: nn.Linear) -> bool:
    """Whether the model's logits are its head's, capped as its config says: asked of the model, since names promise nothing."""
    seen: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    was_training = model.training
    try:
        model.eval()
        ids = torch.arange(PROBE_TOKENS, device=head.weight.device)[None] % len(head.weight)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        model.train(was_training)
        hook.remove()
    if (
        len(seen) != 1
        or seen[0].shape != (1, PROBE_TOKENS, len(head.weight))
        or logits.shape != seen[0].shape
    ):
        return False
    expected, cap = seen[0].float(), _softcap(model)
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    difference = (logits.float() - expected).abs().max().item()
    # a cap rounds to 2^-8 of a logit in bfloat16, and a scale that matters changes more; weights that give NaN are for the evaluation to refuse
    return not difference > 2**-7 * expected.abs().max().item()


def _softcap(model: nn.Module) -> float | None:
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def _forward_of_head(model: nn.Module) -> Any:
    head = model.get_output_embeddings()
    return None if head is None else vars(head).get("forward")
