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


class TracedBytes(NamedTuple):
    """Bytes of a micro-batch."""

    kept: int  # activations, when the output head begins
    layers: int  # the peak of the forward pass before the head
    backward: int  # the peak of the backward pass
    last_layer: int  # of the backward pass in its last layer, which is recomputed


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

    def at(self, rows: int, tokens: int, share: float) -> TracedBytes:
        """Return the bytes of a micro-batch with a `share` of the layers checkpointed.

        A layer that is not checkpointed works while all saved activations are allocated. The
        backward pass peaks at its start, with all of these; later, in a recomputed layer with no
        more than if all layers are recomputed; or at its end.
        """
        plain, checkpointed = self.plain, self.checkpointed
        all_kept = plain.kept.at(rows, tokens)
        recomputing = checkpointed.kept.at(rows, tokens)
        kept = all_kept + share * (recomputing - all_kept)
        layers = checkpointed.layers.at(rows, tokens)
        recomputed = checkpointed.backward.at(rows, tokens)
        backward = [self.end.at(rows, tokens)]
        if share > 0:
            backward.append(recomputed)
        if share < 1:
            layers = kept + (plain.layers.at(rows, tokens) - all_kept)
            backward.append(kept + (plain.backward.at(rows, tokens) - all_kept))
        return TracedBytes(
            int(kept), int(layers), int(max(backward)), int(recomputed - recomputing)
        )
