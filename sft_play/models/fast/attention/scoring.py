"""How attention weighs its values. Imports nothing of the kernels."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a token weighs the tokens that it attends to.

    softmax(cap(scale * q k^T)), where cap(s) = softcap * tanh(s / softcap). A sink takes part in
    the softmax of its head, and has no value.
    """

    scale: float
    window: int | None = None  # tokens that a token attends to, itself included; None for all
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,), a logit for each query head

    @property
    def is_plain(self) -> bool:
        """Whether a token sees all tokens before it, without cap and sinks."""
        return self.window is None and self.softcap is None and self.sinks is None

    def within(self, tokens: int) -> "Scoring":
        """Return the same for documents of at most `tokens` tokens: a longer window is none."""
        if self.window is None or self.window < tokens:
            return self
        return replace(self, window=None)
