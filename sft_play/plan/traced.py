"""The bytes of a step of any layout, from traced steps of a few sizes. Pure: no torch, no I/O.

Legend: R rows of a micro-batch, T tokens of a row, L checkpointed layers of N.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self


class TracedSize(NamedTuple):
    """Rows and tokens of a row of a traced step."""

    rows: int
    tokens: int


# Three sizes for three coefficients. Rows are long enough for a fused loss to work in chunks. One
# row, as several may be laid out with fewer copies (gpt-oss), which is no matter of their length.
SIZES = (TracedSize(1, 2048), TracedSize(1, 4096), TracedSize(1, 8192))


@dataclass(frozen=True)
class ActivationGrowth:
    """Bytes of a micro-batch: fixed + R (by_token T + by_pair T^2).

    Attention without a fused kernel stores its scores or its mask: bytes per pair of tokens.
    """

    fixed: float
    by_token: float
    by_pair: float

    @classmethod
    def through(cls, sizes: Mapping[TracedSize, int], has_pairs: bool) -> Self:
        """Return the growth from T, 2T and 4T tokens of one row; `has_pairs`: plain attention.

        Without pairs it has the slope of the last two points, and is below no point: a peak may
        move from weights to tokens between them. With pairs it goes through all three: 4T minus
        2T, minus twice the difference of 2T and T, is 6 by_pair T^2.
        """
        one, two, four = (sizes[size] for size in SIZES)
        tokens = SIZES[0].tokens
        if not has_pairs:
            by_token = (four - two) / (2 * tokens)
            fixed = max(size - by_token * at.tokens for at, size in sizes.items())
            return cls(fixed, by_token, 0.0)
        by_pair = max(0.0, (four - two - 2 * (two - one)) / (6 * tokens**2))
        by_token = (four - one) / (3 * tokens) - 5 * by_pair * tokens
        return cls(one - tokens * (by_token + by_pair * tokens), by_token, by_pair)

    def at(self, rows: int, tokens: int) -> float:
        """Return the bytes of a micro-batch."""
        return self.fixed + rows * tokens * (self.by_token + self.by_pair * tokens)

    def plus(self, other: Self, times: float) -> Self:
        """Return the sum of this growth and another one, times a number."""
        return type(self)(
            self.fixed + times * other.fixed,
            self.by_token + times * other.by_token,
            self.by_pair + times * other.by_pair,
        )


@dataclass(frozen=True)
class LayersGrowth:
    """Bytes with no layer checkpointed, or with all of them."""

    kept: ActivationGrowth  # activations, when the output head begins
    layers: ActivationGrowth  # the peak before the head begins
    backward: ActivationGrowth  # the peak of the backward pass until the layers are done

    def with_kept_share(self, share: float) -> Self:
        """Return the growth if only a share of the kept bytes is saved, with equal work."""
        less = share - 1
        return type(self)(
            self.kept.plus(self.kept, less),
            self.layers.plus(self.kept, less),
            self.backward.plus(self.kept, less),
        )


@dataclass(frozen=True)
class TracedStep:
    """A traced model: how the bytes of its step grow beyond those between steps."""

    plain: LayersGrowth
    checkpointed: LayersGrowth
    logits: ActivationGrowth  # the peak that head and loss add
    logits_kept: ActivationGrowth  # what they keep for the backward pass
    end: (
        ActivationGrowth  # the peak of the backward pass after the layers: the embedding's gradient
    )
    on: tuple[str, ...] = ()  # fused parts
    off: Mapping[str, str] = field(default_factory=dict)  # why others are not
    in_one_row: bool = False  # whether packed documents may be one long row

    @property
    def is_fused(self) -> bool:
        """Whether the layers use all fused kernels that they can."""
        has_mlp = "mlp" in self.on or "experts" in self.on
        return has_mlp and {"attention", "norms", "loss"} <= set(self.on)

    def kept(self, rows: int, tokens: int, share: float) -> float:
        """Return the activations with a `share` of the layers checkpointed."""
        plain = self.plain.kept.at(rows, tokens)
        checkpointed = self.checkpointed.kept.at(rows, tokens)
        return plain + share * (checkpointed - plain)

    def layers_peak(self, rows: int, tokens: int, share: float) -> float:
        """Return the peak of the forward pass before the head.

        A layer that is not checkpointed works while all saved activations are allocated.
        """
        if share == 1:
            return self.checkpointed.layers.at(rows, tokens)
        plain = self.plain
        working = plain.layers.at(rows, tokens) - plain.kept.at(rows, tokens)
        return self.kept(rows, tokens, share) + working

    def backward_peak(self, rows: int, tokens: int, share: float) -> float:
        """Return the peak of the backward pass.

        It is at the start, with all saved activations; later, in a recomputed layer with no more
        than if all layers are recomputed; or at the end.
        """
        moments = [self.end.at(rows, tokens)]
        if share > 0:
            moments.append(self.checkpointed.backward.at(rows, tokens))
        if share < 1:
            working = self.plain.backward.at(rows, tokens) - self.plain.kept.at(rows, tokens)
            moments.append(self.kept(rows, tokens, share) + working)
        return max(moments)

    def backward_end(self, rows: int, tokens: int) -> float:
        """Return the bytes of the backward pass in its last layer, which is recomputed."""
        checkpointed = self.checkpointed
        return checkpointed.backward.at(rows, tokens) - checkpointed.kept.at(rows, tokens)
