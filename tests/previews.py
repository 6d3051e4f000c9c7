"""Samples, sequences and pages that the tests of `make preview` show."""

import numpy as np

from sft_play.data.ledger import EqualRows, Ledger, LengthPercentiles, SplitLedger, Tally
from sft_play.data.preview import PreviewDocument, PreviewSequence, SpanFinder, TokenSpan
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample

TEXTS = [
    "Plain words, two  blanks.\n\tA tab; naïve café",
    "Family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿, faces 🙂🙃🙂",
    "请用中文回答。 日本語 한국어",
    "ما هو الوقت الآن؟ מה השעה?",
    " begins and ends blank ",
    "\n\n",
    "🙂",
]


def sample_of(ids: list[int], trained: list[bool] | None = None) -> Sample:
    mask = np.array(trained if trained is not None else [False, *[True] * (len(ids) - 1)])
    return Sample(np.array(ids, dtype=np.int32), np.where(mask, ids, IGNORE_INDEX), answer_start=0)


def text_of(spans: tuple[TokenSpan, ...]) -> str:
    return "".join(span.text for span in spans)


def shown(
    tokenizer,
    prompt: str,
    answer: str,
    place: str = "rows.jsonl:1",
    note: str | None = None,
    documents: int = 1,
) -> PreviewSequence:
    """One conversation `documents` times, as the model would see it."""
    before = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    ids = [*before, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    spans = SpanFinder(tokenizer)(
        sample_of(ids, [index >= len(before) for index in range(len(ids))])
    )
    return PreviewSequence(
        "train", ("longest",), (PreviewDocument(place, spans, note),) * documents
    )


TRAIN = SplitLedger(
    Tally(rows_in=1, rows_used=1, samples=1, tokens=2, trained_tokens=1),
    lost_fraction=0.0,
    lengths=LengthPercentiles(2, 2, 2, max=2),
    duplicates=EqualRows(0, 0, 0),
    sources=(),
)
LEDGER = Ledger({"train": TRAIN}, max_seq_len=8)
