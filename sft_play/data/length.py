"""What becomes of samples that are longer than the model may see. Pure: no tokenizer, no files.

Legend: T tokens of a sample.
"""

from dataclasses import dataclass
from typing import Literal

from sft_play.data.render import IGNORE_INDEX, RenderedSample

LengthPolicy = Literal["drop", "truncate_left", "split"]


@dataclass(frozen=True, slots=True)
class FittedSample:
    """What the length policy keeps of a sample, and what it loses."""

    samples: tuple[RenderedSample, ...]
    lost_trained_tokens: int = 0
    cut_tokens: int = 0  # trained or not, that are in no sample
    reason: Literal["too_long", "truncated", "split"] | None = None  # None: it was short enough


def fit_sample(
    rendered: RenderedSample, max_tokens: int, policy: LengthPolicy, bos_id: int | None = None
) -> FittedSample:
    """Return what is left of a sample under a limit in tokens.

    drop: nothing. truncate_left: the last `max_tokens` tokens, of which the first is bos if the
    sample began with it. split: consecutive pieces of `max_tokens` tokens; bos is not repeated,
    since it tells the model that a text begins, and a piece continues one. The first token of a
    piece carries no loss, since nothing in the piece predicts it. Pieces without a trained token
    are dropped. A sample of which nothing is left is too_long.

    >>> answered = RenderedSample([1, 5, 6, 7, 8], [-100, -100, -100, 7, 8], answer_start=3)
    >>> fit_sample(answered, 4, "truncate_left", bos_id=1).samples
    (RenderedSample(ids=[1, 6, 7, 8], labels=[-100, -100, 7, 8], answer_start=2),)
    >>> text = RenderedSample([5, 6, 7, 8], [-100, 6, 7, 8])
    >>> [piece.ids for piece in fit_sample(text, 2, "split").samples]
    [[5, 6], [7, 8]]
    """
    assert max_tokens > 1, f"a sample of {max_tokens} tokens has nothing to learn"
    if len(rendered.ids) <= max_tokens:
        return FittedSample((rendered,))
    pieces = _cut(rendered, max_tokens, policy, bos_id)
    kept = tuple(piece for piece in pieces if piece.trained_tokens)
    lost = rendered.trained_tokens - sum(piece.trained_tokens for piece in kept)
    cut = len(rendered.ids) - sum(len(piece.ids) for piece in kept)
    if not kept:
        return FittedSample((), lost, cut, "too_long")
    return FittedSample(kept, lost, cut, "truncated" if policy == "truncate_left" else "split")


def _cut(
    rendered: RenderedSample, max_tokens: int, policy: LengthPolicy, bos_id: int | None
) -> list[RenderedSample]:
    if policy == "drop":
        return []
    if policy == "truncate_left":
        return [_last_tokens(rendered, max_tokens, bos_id)]
    starts = range(0, len(rendered.ids), max_tokens)
    return [_piece(rendered, start, start + max_tokens) for start in starts]


def _last_tokens(rendered: RenderedSample, max_tokens: int, bos_id: int | None) -> RenderedSample:
    total = len(rendered.ids)
    if bos_id is None or rendered.ids[0] != bos_id:
        return _piece(rendered, total - max_tokens, total)
    piece = _piece(rendered, total - max_tokens + 1, total)
    answer_start = piece.answer_start + 1 if piece.answer_start else 0
    return RenderedSample([bos_id, *piece.ids], [IGNORE_INDEX, *piece.labels], answer_start)


def _piece(rendered: RenderedSample, start: int, end: int) -> RenderedSample:
    """Return the tokens [start, end); answer_start is 0 if the last prompt ends outside of them."""
    ids = rendered.ids[start:end]
    labels = [IGNORE_INDEX, *rendered.labels[start + 1 : end]]
    holds_prompt_end = start < rendered.answer_start < start + len(ids)
    answer_start = rendered.answer_start - start if holds_prompt_end else 0
    return RenderedSample(ids, labels, answer_start)
