"""`make preview`: choose samples, mark their trained text, and print both in a terminal.

The text is decoded from the stored ids that a run trains on, not read from the rows. Legend: T
tokens of one sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft_play.config.schema import Config
from sft_play.data.assemble import RunData
from sft_play.data.order import Layout, StepSampler
from sft_play.data.processor import Processor
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.rows import ImageFile, make_visible
from sft_play.data.splits import continues_row
from sft_play.data.store import Sample, Split
from sft_play.data.trees import Units
from sft_play.progress import drawing

SEARCHED_SAMPLES = 10_000  # samples searched for one with several answers
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from a part of a character
MAX_TOKENS = 400  # of a document; the page shows all tokens
MAX_DOCUMENTS = 4  # of a sequence
Fragment = tuple[str, str]  # a text and its style
# rich's names of styles
TRAINED = "bold green"
FAINT = "dim"
HEADING = "bold"


class TokenSpan(NamedTuple):
    """One piece of text: usually one token, or several that share a character."""

    text: str
    ids: tuple[int, ...]
    index: int  # of the first token in its sample
    is_trained: bool
    is_special: bool
    image: ImageFile | None = None  # that it represents


@dataclass(frozen=True)
class PreviewDocument:
    """One sample: the location of its row, its spans, and the tokens that the length policy cut."""

    origin: str
    spans: tuple[TokenSpan, ...]
    note: str | None = None


@dataclass(frozen=True)
class PreviewSequence:
    """One sequence as the model sees it, and why it is shown; packed, it has several documents."""

    split: str
    reasons: tuple[str, ...]
    documents: tuple[PreviewDocument, ...]

    @property
    def heading(self) -> str:
        """Its origin, its counts, and why it is shown."""
        origin = f"{len(self.documents)} documents"
        if len(self.documents) == 1:
            origin = self.documents[0].origin
        return (
            f"{self.split}  {origin}  {token_counts(self.documents)}  ({', '.join(self.reasons)})"
        )


def token_counts(documents: Sequence[PreviewDocument]) -> str:
    """Return the tokens of documents, and how many of them are trained."""
    tokens = trained = 0
    for span in chain.from_iterable(document.spans for document in documents):
        tokens += len(span.ids)
        trained += len(span.ids) * span.is_trained
    return f"{tokens:,} tokens, {trained:,} trained"


def preview_sequences(
    data: RunData, tokenizer: Any, first: int, config: Config, packed: Sequence[int] = ()
) -> list[PreviewSequence]:
    """Return the first training samples, and one of each kind that often has mistakes.

    The last sequence has the samples `packed`, if there are any.
    """
    find_spans = SpanFinder(tokenizer, Processor(config, tokenizer))

    def document(index: int) -> PreviewDocument:
        sample = data.train[index]
        cut = cut_note(int(data.train.records["cut"][index]), config.data.too_long)
        shared = int(data.train.shared[index])
        beginning = f"its first {shared:,} tokens are those of sample {index}, too" * bool(shared)
        note = "; ".join(filter(None, (cut, weight_note(sample), beginning))) or None
        return PreviewDocument(data.train.origin(index), find_spans(sample), note)

    sequences = [
        PreviewSequence("train", tuple(reasons), (document(index),))
        for index, reasons in choose_samples(data.train, first).items()
    ]
    if len(packed):
        documents = tuple(document(index) for index in packed)
        sequences.append(PreviewSequence("train", ("packed into one sequence",), documents))
    return sequences


def choose_samples(split: Split, first: int) -> dict[int, list[str]]:
    """Return indices of samples, each with the reasons why it is shown.

    These are the first samples, and one of each kind that often has mistakes.
    """
    chosen = {index: [f"sample {index + 1}"] for index in range(min(first, len(split)))}
    masks = {
        "longest": split.lengths == split.lengths.max(),
        "shortest": split.lengths == split.lengths.min(),
        "shortened": split.records["cut"] > 0,
        "continues with a row": continues_row(split),
        "weighed": split.records["weights"] >= 0,
        "has images": split.image_counts > 0,
    }
    for reason, mask in masks.items():
        if mask.any():
            chosen.setdefault(int(mask.argmax()), []).append(reason)
    for index in range(min(SEARCHED_SAMPLES, len(split))):
        if count_answers(split[index]) > 1:
            chosen.setdefault(index, []).append("several answers")
            break
    return chosen


def count_answers(sample: Sample) -> int:
    """Return how many separate parts of a sample are trained."""
    trained = sample.labels != IGNORE_INDEX
    return int(np.count_nonzero(trained[1:] & ~trained[:-1]) + trained[0])


def cut_note(cut_tokens: int, too_long: str) -> str | None:
    """Return as text what the length policy cut from a sample's row."""
    if not cut_tokens:
        return None
    where = "of this row are in no sample"
    if too_long == "truncate_left":
        where = "before this text were cut off"
    return f"{cut_tokens:,} tokens {where} (data.too_long={too_long})"


def weight_note(sample: Sample) -> str | None:
    """Return the weights of a sample's answers, in order; None if each is 1."""
    if sample.weights is None:
        return None
    of_answers = sample.weights[sample.labels != IGNORE_INDEX]
    changes = np.flatnonzero(np.diff(of_answers, prepend=np.nan) != 0)
    words = ", ".join(f"{weight:g}" for weight in of_answers[changes])
    return f"its trained tokens weigh {words} in the loss"


def first_packed_sequence(units: Units, layout: Layout, seed: int | None) -> list[int]:
    """Return the samples of a packed sequence of the first micro-batch.

    It is the one with the fewest documents, at least two; [] if no sequence has two.
    """
    micro_batch = next(iter(StepSampler(units.lengths, layout, seed, units.row_ends)))
    packed = [sequence for sequence in micro_batch if len(sequence) > 1]
    return [*chain.from_iterable(map(units.samples, min(packed, key=len, default=[])))]


class SpanFinder:
    """Finds the spans of samples, with one tokenizer."""

    def __init__(self, tokenizer: Any, processor: Processor | None = None):
        self._processor = processor
        self._backend = tokenizer.backend_tokenizer
        self._special_ids = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens and without clean-up."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def __call__(self, sample: Sample) -> tuple[TokenSpan, ...]:
        """Return a sample's spans; their joined texts are its decoded ids, except for images.

        An image is one span. Ids that end inside a character are another exception. A single token
        has no text: the bytes of a character may be spread over several tokens, and some tokens
        start with a space only after other tokens. Tokens are therefore decoded together with the
        span before them, and get the additional text.
        """
        ids = sample.ids.tolist()
        trained = (sample.labels != IGNORE_INDEX).tolist()
        spans: list[TokenSpan] = []
        context_start = 0  # the text is decoded from this token on
        context_characters = 0  # characters of the decoded text that belong to earlier spans
        start = 0  # first token without a span
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[context_start:end])[context_characters:]
            is_special = ids[end - 1] in self._special_ids
            is_last = end == len(ids) or ids[end] in self._special_ids
            is_complete = is_special or is_last or (text and not text.endswith(INCOMPLETE))
            if not is_complete and trained[end] == trained[start]:
                continue
            span_ids = tuple(ids[start:end])
            span_text = text if is_complete else ""
            spans.append(TokenSpan(span_text, span_ids, start, trained[start], is_special))
            if is_complete:
                context_start = start
                context_characters = len(self.decode(span_ids))
            start = end
        return tuple(self._join_images(spans, sample))

    def _join_images(self, spans: Sequence[TokenSpan], sample: Sample) -> Iterator[TokenSpan]:
        """Yield spans, with one span per image."""
        owners = self._find_images(sample)
        for number, run in groupby(spans, key=lambda span: owners.get(span.index)):
            if number is None:
                yield from run
                continue
            own = list(run)
            image = sample.images[number]
            width, height = image.size
            name = " ".join(filter(None, ("image", Path(image.path).name)))
            mark = f"⟨{name} {width}x{height}, {len(own)} tokens⟩"
            ids = tuple(chain.from_iterable(span.ids for span in own))
            yield own[0]._replace(text=mark, ids=ids, image=image)

    def _find_images(self, sample: Sample) -> dict[int, int]:
        """Return by token index the number of the image that the token represents."""
        if self._processor is None or not sample.images:
            return {}
        counts = [self._processor.count((image,)) for image in sample.images]
        places = np.flatnonzero(self._processor.token_types(sample.ids.tolist()))
        numbers = np.repeat(np.arange(len(counts)), counts)
        return dict(zip(places.tolist(), numbers.tolist(), strict=True))


def print_sequences(sequences: Iterable[PreviewSequence], no_color: bool) -> None:
    """Print sequences in color, or with marks if the terminal has no color."""
    from rich.console import Console
    from rich.text import Text

    console = Console(color_system=None) if no_color else Console()
    has_color = console.color_system is not None and not console.no_color
    for sequence in sequences:
        if has_color:
            text = Text.assemble(*fragments(sequence))
        else:
            text = Text(in_marks(sequence))
        with drawing():
            console.print(text, soft_wrap=True)


def in_marks(sequence: PreviewSequence) -> str:
    """Return a sequence as text without colors: trained tokens are between ⟦ and ⟧."""
    return "".join(f"⟦{text}⟧" if style == TRAINED else text for text, style in fragments(sequence))


def fragments(sequence: PreviewSequence) -> Iterator[Fragment]:
    """Yield the pieces of a sequence for a terminal, each with its style."""
    yield f"── {make_visible(sequence.heading)}\n", HEADING
    for number, document in enumerate(sequence.documents[:MAX_DOCUMENTS], 1):
        if len(sequence.documents) > 1:
            origin = make_visible(document.origin)
            yield f"┄┄ document {number}: {origin}  {token_counts([document])}\n", FAINT
        if document.note:
            yield f"┄┄ {document.note}\n", FAINT
        spans = document.spans
        if len(spans) <= MAX_TOKENS:
            yield from _show_spans(spans)
        else:
            half = MAX_TOKENS // 2
            left_out = sum(len(span.ids) for span in spans[half:-half])
            yield from _show_spans(spans[:half])
            yield f"\n┄┄ {left_out:,} tokens more, on the page ┄┄\n", FAINT
            yield from _show_spans(spans[-half:])
        yield "\n", ""
    more = len(sequence.documents) - MAX_DOCUMENTS
    if more > 0:
        yield f"┄┄ {more} documents more, on the page\n", FAINT


def _show_spans(spans: Sequence[TokenSpan]) -> Iterator[Fragment]:
    """Yield the text of trained and untrained spans in turn."""
    for is_trained, run in groupby(spans, key=lambda span: span.is_trained):
        text = make_visible("".join(span.text for span in run))
        text = text.replace("\t", "⇥\t").replace("\n", "↵\n")
        yield text, TRAINED if is_trained else ""
