"""`make preview`: which samples are worth a look, and each as spans of text that are trained or not. Reads the mapped samples alone.

The text is decoded from the very ids that a run trains on, never taken from the rows. Legend: T tokens of one sample.
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from sft_play.data.assemble import PreparedData
from sft_play.data.order import Layout, StepSampler
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample, Split

SCANNED = 10_000  # samples that are searched for one with several answers
TERMINAL_TOKENS, TERMINAL_DOCUMENTS = (
    400,
    4,
)  # of a sample, of a sequence, that a terminal shows; the page shows them all
UNDECODED = "\N{REPLACEMENT CHARACTER}"
TRAINED, SPECIAL, TRAINED_SPECIAL, FAINT, HEADING = (
    "bold green",
    "cyan",
    "bold green reverse",
    "dim",
    "bold",
)  # rich's words for styles
SHOWN_BLANKS = " \n\t\u3000"
JOINERS = {
    "\u200c",
    "\u200d",
    *map(chr, range(0xE0020, 0xE0080)),
}  # of Persian and Indic letters, of emoji and flags

Fragments = list[tuple[str, str]]  # (text, style)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that are one piece of text: one token mostly, several where a character is split over them."""

    text: str
    ids: tuple[int, ...]
    index: int  # of the first token in its sample
    is_trained: bool
    is_special: bool


@dataclass(frozen=True)
class Document:
    """One sample: where its row stands, its spans, and what the length policy took from it."""

    place: str
    spans: tuple[Span, ...]
    note: str | None = None

    @property
    def tokens(self) -> int:
        return sum(len(span.ids) for span in self.spans)

    @property
    def trained_tokens(self) -> int:
        return sum(len(span.ids) for span in self.spans if span.is_trained)


@dataclass(frozen=True)
class Shown:
    """One sequence as the model sees it, and why it is shown; several documents where the run packs."""

    split: str
    reasons: tuple[str, ...]
    documents: tuple[Document, ...]

    @property
    def heading(self) -> str:
        """Where it comes from, why it is shown, and its counts."""
        place = (
            self.documents[0].place
            if len(self.documents) == 1
            else f"{len(self.documents)} documents"
        )
        return f"{self.split}  {place}  {counts(self.documents)}  ({', '.join(self.reasons)})"


def counts(documents: Sequence[Document]) -> str:
    """Return the tokens of documents, and how many of them are trained."""
    tokens, trained = (
        sum(getattr(document, name) for document in documents)
        for name in ("tokens", "trained_tokens")
    )
    return f"{tokens:,} tokens, {trained:,} trained"


def show(
    data: PreparedData, tokenizer: Any, first: int, too_long: str, packed: Sequence[int] = ()
) -> list[Shown]:
    """Return the first training samples, those that show most, and with `packed` the sequence of these samples."""
    spans_of = SpanFinder(tokenizer)

    def document(index: int) -> Document:
        record, source = (
            data.train.records[index],
            data.sources["train"][data.train.store_of[index]],
        )
        return Document(
            source.place(int(record["file"]), int(record["number"])),
            spans_of(data.train[index]),
            cut_note(int(record["cut"]), too_long),
        )

    found = [
        Shown("train", tuple(reasons), (document(index),))
        for index, reasons in choose(data.train, first).items()
    ]
    return (
        [*found, Shown("train", ("packed into one sequence",), tuple(map(document, packed)))]
        if len(packed)
        else found
    )


def choose(split: Split, first: int) -> dict[int, list[str]]:
    """Return indices of samples, each with why it is shown: the first ones, and one of each kind that is easily got wrong."""
    records, chosen = (
        split.records,
        {index: [f"sample {index + 1}"] for index in range(min(first, len(split)))},
    )
    pieces = np.zeros(len(split), dtype=bool)
    pieces[1:] = (
        (np.diff(split.index_in) == 1)
        & (np.diff(split.store_of) == 0)
        & (np.diff(records["file"]) == 0)
        & (np.diff(records["number"]) == 0)
    )
    kinds = {
        "longest": split.lengths == split.lengths.max(),
        "shortest": split.lengths == split.lengths.min(),
        "shortened": records["cut"] > 0,
        "goes on with a row": pieces,
    }
    for reason, mask in kinds.items():
        for index in np.flatnonzero(mask)[:1].tolist():
            chosen.setdefault(index, []).append(reason)
    for index in [index for index in range(min(SCANNED, len(split))) if answers(split[index]) > 1][
        :1
    ]:
        chosen.setdefault(index, []).append("several answers")
    return chosen


def answers(sample: Sample) -> int:
    """Return how many stretches of a sample are trained."""
    trained = sample.labels != IGNORE_INDEX
    return int(np.count_nonzero(trained[1:] & ~trained[:-1]) + trained[0])


def cut_note(cut: int, too_long: str) -> str | None:
    """Return what the length policy took from a sample's row, in words."""
    if not cut:
        return None
    where = (
        "before this text were cut off"
        if too_long == "truncate_left"
        else "of this row are in no sample"
    )
    return f"{cut:,} tokens {where} (data.too_long={too_long})"


def packed_samples(lengths: np.ndarray, layout: Layout, seed: int) -> list[int]:
    """Return the samples of a sequence in the first micro-batch of a packed run: the fewest that have a seam; none where none has."""
    first = next(iter(StepSampler(lengths, layout, seed)))
    return min((sequence for sequence in first if len(sequence) > 1), key=len, default=[])


class SpanFinder:
    """Samples to spans; what belongs to the tokenizer is found once."""

    def __init__(self, tokenizer: Any):
        self._backend = tokenizer.backend_tokenizer
        self._special = {
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included and nothing tidied."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def __call__(self, sample: Sample) -> tuple[Span, ...]:
        """Return a sample's spans, whose texts one behind the other are its decoded ids, unless these end within a character.

        A token alone has no text: bytes of a character may be spread over several, and a blank before a word belongs to some
        tokens only behind others. So each is decoded behind the span before it, and what this adds is its text.
        """
        ids, trained = sample.ids.tolist(), (sample.labels != IGNORE_INDEX).tolist()
        spans: list[Span] = []
        context, start, told = (
            0,
            0,
            0,
        )  # where decoding begins, the first token without a span, characters of that text which have one
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[context:end])[told:]
            is_special, is_last = (
                ids[end - 1] in self._special,
                end == len(ids) or ids[end] in self._special,
            )
            is_whole = is_special or is_last or (text and not text.endswith(UNDECODED))
            if not is_whole and trained[end] == trained[start]:
                continue
            spans.append(
                Span(
                    text if is_whole else "",
                    tuple(ids[start:end]),
                    start,
                    trained[start],
                    is_special,
                )
            )
            if is_whole:
                context, told = start, len(self.decode(ids[start:end]))
            start = end
        return tuple(spans)


def visible(text: str) -> str:
    """Return a text in which every character shows that would hide, or command a terminal: `⟨U+202E⟩`."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in SHOWN_BLANKS or character in JOINERS:
        return character
    hides = unicodedata.category(character) in {"Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"}
    return f"⟨U+{ord(character):04X}⟩" if hides else character


def in_colour(sequence: Shown) -> Fragments:
    """Return a sequence for a terminal, in which what is trained has a colour."""
    return _told(sequence, _coloured)


def in_marks(sequence: Shown) -> str:
    """Return a sequence for a terminal or a file without colours: what is trained stands between ⟦ and ⟧."""
    return "".join(text for text, _ in _told(sequence, _marked))


def _told(sequence: Shown, body: Callable[[Sequence[Span]], Fragments]) -> Fragments:
    told: Fragments = [(f"── {visible(sequence.heading)}\n", HEADING)]
    for number, document in enumerate(sequence.documents[:TERMINAL_DOCUMENTS], 1):
        if len(sequence.documents) > 1:
            told.append(
                (f"┄┄ document {number}: {visible(document.place)}  {counts([document])}\n", FAINT)
            )
        if document.note:
            told.append((f"┄┄ {document.note}\n", FAINT))
        for part in _shortened(document.spans):
            told += body(part) if isinstance(part, tuple) else [(part, FAINT)]
        told.append(("\n", ""))
    more = len(sequence.documents) - TERMINAL_DOCUMENTS
    return [*told, (f"┄┄ {more} documents more, on the page\n", FAINT)] if more > 0 else told


def _shortened(spans: tuple[Span, ...]) -> Iterator[tuple[Span, ...] | str]:
    """Yield all spans, or the first and the last with a word on those between."""
    half = TERMINAL_TOKENS // 2
    if len(spans) <= TERMINAL_TOKENS:
        yield spans
        return
    yield spans[:half]
    yield f"\n┄┄ {sum(len(span.ids) for span in spans[half:-half]):,} tokens more, on the page ┄┄\n"
    yield spans[-half:]


def _coloured(spans: Sequence[Span]) -> Fragments:
    styles = {
        (True, True): TRAINED_SPECIAL,
        (True, False): TRAINED,
        (False, True): SPECIAL,
        (False, False): "",
    }
    runs = groupby(spans, key=lambda span: styles[span.is_trained, span.is_special])
    return [(_terminal("".join(span.text for span in run)), style) for style, run in runs]


def _marked(spans: Sequence[Span]) -> Fragments:
    told: Fragments = []
    for is_trained, run in groupby(spans, key=lambda span: span.is_trained):
        text = _terminal("".join(span.text for span in run))
        told.append((f"⟦{text}⟧" if is_trained else text, ""))
    return told


def _terminal(text: str) -> str:
    return visible(text).replace("\t", "⇥\t").replace("\n", "↵\n")
