"""What becomes of samples that are longer than the model may see. Pure: no tokenizer, no files.

Legend: T tokens of a sample. The trained tokens of a sample are those of what is left of it and the lost ones.
"""

from dataclasses import dataclass
from typing import Literal

from sft_play.data.render import IGNORE_INDEX, Rendered

LengthPolicy = Literal["drop", "truncate_left", "split"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is left of a sample, and what is not."""

    samples: tuple[Rendered, ...]
    lost_trained_tokens: int = 0
    cut: int = 0  # tokens, trained or not, that no sample holds any more
    reason: Literal["too_long", "truncated", "split"] | None = None  # None: it fitted


def fit(rendered: Rendered, limit: int, policy: LengthPolicy, bos_id: int | None = None) -> Fitted:
    """Return what is left of a sample under a limit in tokens.

    drop: nothing. truncate_left: the last `limit` tokens, the first of them bos if the sample began with it. split: consecutive
    pieces of `limit` tokens; bos is not repeated, since it tells the model that a text begins, and a piece goes on with one.
    Nothing is learned of a piece's first token, which its own beginning cannot predict, and a piece without a trained token is
    dropped. A sample that comes out empty is too_long.

    >>> fit(Rendered([1, 5, 6, 7, 8], [-100, -100, -100, 7, 8], 3), 4, "truncate_left", bos_id=1).samples
    (Rendered(ids=[1, 6, 7, 8], labels=[-100, -100, 7, 8], answer_start=2),)
    >>> fit(Rendered([5, 6, 7, 8], [-100, 6, 7, 8]), 2, "split")
    Fitted(samples=(Rendered(ids=[5, 6], labels=[-100, 6], answer_start=0), Rendered(ids=[7, 8], labels=[-100, 8], answer_start=0)), \
lost_trained_tokens=1, cut=0, reason='split')
    """
    assert limit > 1, f"a sample of {limit} tokens has nothing to learn"
    if len(rendered.ids) <= limit:
        return Fitted((rendered,))
    if policy == "drop":
        pieces = []
    elif policy == "truncate_left":
        pieces = [_last(rendered, limit, bos_id)]
    else:
        pieces = [
            _piece(rendered, start, start + limit) for start in range(0, len(rendered.ids), limit)
        ]
    kept = tuple(piece for piece in pieces if piece.trained_tokens)
    lost = rendered.trained_tokens - sum(piece.trained_tokens for piece in kept)
    cut = len(rendered.ids) - sum(len(piece.ids) for piece in kept)
    if not kept:
        return Fitted((), lost, cut, "too_long")
    return Fitted(kept, lost, cut, "truncated" if policy == "truncate_left" else "split")


def _last(rendered: Rendered, limit: int, bos_id: int | None) -> Rendered:
    head = 1 if bos_id is not None and rendered.ids[0] == bos_id else 0
    piece = _piece(rendered, len(rendered.ids) - limit + head, len(rendered.ids))
    if not head:
        return piece
    start = piece.answer_start + head if piece.answer_start else 0
    return Rendered([rendered.ids[0], *piece.ids], [IGNORE_INDEX, *piece.labels], start)


def _piece(rendered: Rendered, start: int, end: int) -> Rendered:
    """Return the tokens [start, end); its prompt is what is left of the last answer's, none if the answer begins elsewhere or with it."""
    begins = rendered.answer_start
    ids = rendered.ids[start:end]
    return Rendered(
        ids,
        [IGNORE_INDEX, *rendered.labels[start + 1 : end]],
        begins - start if start < begins < start + len(ids) else 0,
    )
