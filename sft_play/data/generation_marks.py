"""The check that a template's `{% generation %}` marks agree with the trained answers. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sft_play.data.templates import CharacterSpan, RenderError
from sft_play.data.training_text import TrainingText


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a text."""

    start: int
    end: int


def marks_equal_answers(text: TrainingText) -> bool:
    """Return whether the marks are exactly the answers, apart from whitespace after them.

    If so, the tokens agree too.
    """
    spans = _join_adjacent(text.generated or [])
    if not text.trains_all or len(spans) != len(text.answers):
        return False
    for span, answer in zip(spans, text.answers, strict=True):
        if span.start != answer.start or span.end < answer.end:
            return False
        if text.text[answer.end : span.end].strip():
            return False
    return True


def check_generation_marks(text: TrainingText, answers: Sequence[TokenSpan], encoding: Any) -> None:
    """Raise RenderError unless the marks cover exactly the answers' tokens.

    Whitespace after a stop token may be marked. Tokens are marked as transformers marks them for a
    mask of the assistant's tokens.
    """
    marked = _marked_tokens(text, encoding)
    for answer, (start, end) in zip(text.answers, answers, strict=True):
        where = f"messages[{answer.message}]"
        if not marked[end - 1]:
            raise RenderError(
                f"the template's generation marks leave out the stop token of {where}"
            )
        if 0 in marked[start:end]:
            raise RenderError(f"the template's generation marks leave out a part of {where}")
        if start and marked[start - 1]:
            raise RenderError(
                f"the template's generation marks begin before {where}, in its prompt; "
                "MODEL_CHAT_TEMPLATE=mine.jinja takes one without the marks"
            )
        marks_end = marked.find(0, end) if 0 in marked[end:] else len(marked)
        if marks_end > end:
            last_character = encoding.token_to_chars(marks_end - 1)[1]
            if text.text[answer.end : last_character].strip():
                raise RenderError(
                    f"the template's generation marks go on behind the stop token of {where}"
                )
        marked[start:marks_end] = bytes(marks_end - start)
    if text.trains_all and 1 in marked:
        start, end = encoding.token_to_chars(marked.find(1))
        raise RenderError(
            f"the template's generation marks hold {text.text[start:end]!r}, which no answer holds"
        )


def _join_adjacent(spans: Sequence[CharacterSpan]) -> list[CharacterSpan]:
    joined: list[CharacterSpan] = []
    for start, end in spans:
        if joined and joined[-1].end == start:
            joined[-1] = CharacterSpan(joined[-1].start, end)
        else:
            joined.append(CharacterSpan(start, end))
    return joined


def _marked_tokens(text: TrainingText, encoding: Any) -> bytearray:
    """Return 1 for each token that the marks cover, else 0."""
    assert text.generated is not None, "the template has marks"
    marked = bytearray(len(encoding))
    for start, end in text.generated:
        first = encoding.char_to_token(start)
        last = encoding.char_to_token(end - 1)
        if first is None:
            break
        stop = last + 1 if last else len(marked)
        marked[first:stop] = b"\1" * (stop - first)
    return marked
