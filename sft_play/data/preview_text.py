"""`make preview` in a terminal: in colour, or with marks where there is none.

Loads no torch at import.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from sft_play.data.preview import PreviewSequence, TokenSpan, counts
from sft_play.data.visible_text import make_visible

MAX_TOKENS = 400  # of a document; the page shows them all
MAX_DOCUMENTS = 4  # of a sequence
# rich's names of styles
TRAINED = "bold green"
SPECIAL = "cyan"
TRAINED_SPECIAL = "bold green reverse"
FAINT = "dim"
HEADING = "bold"


class Fragment(NamedTuple):
    """A piece of text in one of rich's styles."""

    text: str
    style: str


def print_sequences(sequences: Iterable[PreviewSequence], no_color: bool) -> None:
    """Print sequences in colour, or with marks where the terminal shows none."""
    from rich.console import Console
    from rich.text import Text

    console = Console(color_system=None) if no_color else Console()
    has_color = console.color_system is not None and not console.no_color
    for sequence in sequences:
        if has_color:
            text = Text.assemble(*in_color(sequence))
        else:
            text = Text(in_marks(sequence))
        console.print(text, soft_wrap=True)


def in_color(sequence: PreviewSequence) -> list[Fragment]:
    """Return a sequence for a terminal in which trained tokens have a colour."""
    return list(_fragments(sequence, _color_spans))


def in_marks(sequence: PreviewSequence) -> str:
    """Return a sequence as text without colours: trained tokens are between ⟦ and ⟧."""
    return "".join(fragment.text for fragment in _fragments(sequence, _mark_spans))


def _fragments(
    sequence: PreviewSequence, style_spans: Callable[[Sequence[TokenSpan]], list[Fragment]]
) -> Iterator[Fragment]:
    yield Fragment(f"── {make_visible(sequence.heading)}\n", HEADING)
    for number, document in enumerate(sequence.documents[:MAX_DOCUMENTS], 1):
        if len(sequence.documents) > 1:
            origin = make_visible(document.origin)
            yield Fragment(f"┄┄ document {number}: {origin}  {counts([document])}\n", FAINT)
        if document.note:
            yield Fragment(f"┄┄ {document.note}\n", FAINT)
        if len(document.spans) <= MAX_TOKENS:
            yield from style_spans(document.spans)
        else:
            half = MAX_TOKENS // 2
            left_out = sum(len(span.ids) for span in document.spans[half:-half])
            yield from style_spans(document.spans[:half])
            yield Fragment(f"\n┄┄ {left_out:,} tokens more, on the page ┄┄\n", FAINT)
            yield from style_spans(document.spans[-half:])
        yield Fragment("\n", "")
    more = len(sequence.documents) - MAX_DOCUMENTS
    if more > 0:
        yield Fragment(f"┄┄ {more} documents more, on the page\n", FAINT)


def _color_spans(spans: Sequence[TokenSpan]) -> list[Fragment]:
    runs = groupby(spans, key=_style_of)
    return [Fragment(_terminal_text(run), style) for style, run in runs]


def _style_of(span: TokenSpan) -> str:
    if span.is_trained:
        return TRAINED_SPECIAL if span.is_special else TRAINED
    return SPECIAL if span.is_special else ""


def _mark_spans(spans: Sequence[TokenSpan]) -> list[Fragment]:
    fragments = []
    for is_trained, run in groupby(spans, key=lambda span: span.is_trained):
        text = _terminal_text(run)
        fragments.append(Fragment(f"⟦{text}⟧" if is_trained else text, ""))
    return fragments


def _terminal_text(spans: Iterable[TokenSpan]) -> str:
    text = "".join(span.text for span in spans)
    return make_visible(text).replace("\t", "⇥\t").replace("\n", "↵\n")
