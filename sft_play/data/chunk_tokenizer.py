"""One chunk of records to samples, as any process may do it. Loads no torch.

Legend: T tokens of a sample.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Self

from sft_play.config.schema import Config
from sft_play.data.files import Chunk, columns_with_values
from sft_play.data.ledger import Tally
from sft_play.data.render import IGNORE_INDEX, RenderedSample, Renderer, RenderError
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import SystemPrompt, UnusedKeys, parse_record_rows
from sft_play.data.rows import MAX_LISTED_ROWS, BadRow, Message, Row
from sft_play.data.special_text import TokensInText
from sft_play.data.store import (
    LongRow,
    RowIdentity,
    SampleArrays,
    StoredBadRow,
    StoredSample,
    to_arrays,
)
from sft_play.data.template_checks import GreetingPolicy

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


@dataclass(frozen=True)
class TokenizePolicy:
    """What is done with every row; a part of the cache's key."""

    max_seq_len: int
    too_long: Literal["drop", "truncate_left", "split"]
    train_on: Literal["all", "last"]
    reasoning: Literal["keep", "drop", "empty"]
    system_prompt: str | None
    replaces_system: bool
    on_bad_row: Literal["fail", "quarantine"]
    special_tokens_in_text: TokensInText = "as_text"

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return what the settings say."""
        data = config.data
        return cls(
            max_seq_len=config.model.max_seq_len,
            too_long=data.too_long,
            train_on=data.train_on,
            reasoning=data.reasoning,
            system_prompt=data.system_prompt,
            replaces_system=data.system_prompt_mode == "replace",
            on_bad_row=data.on_bad_row,
            special_tokens_in_text=data.special_tokens_in_text,
        )


@dataclass(frozen=True)
class ChunkTask:
    """A chunk of the source's file number `file`, and the format of that file."""

    file: int
    chunk: Chunk
    row_format: RowFormat


@dataclass
class TokenizedChunk:
    """The samples of a chunk, and what became of its rows."""

    samples: SampleArrays
    tally: Tally
    bad_rows: list[StoredBadRow]
    long_rows: list[LongRow]  # the longest rows over the limit
    bytes_read: int  # size of the chunk in its file on disk


class RowHashes(NamedTuple):
    """64-bit hashes of a row.

    `exact` is of all its text; `normalized`, of its words without case, punctuation and spacing.
    """

    exact: int
    normalized: int


class _RecordRows(NamedTuple):
    """The rows of a record: mostly one."""

    number: int  # of the record in its file
    rows: list[Row]


@dataclass
class _Progress:
    """What became of the rows of a chunk so far."""

    tally: Tally
    samples: list[StoredSample] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    long_rows: list[LongRow] = field(default_factory=list)

    def drop(self, row: BadRow, reason: str) -> None:
        self.tally.dropped[reason] += 1
        self.bad_rows.append(row)


class ChunkTokenizer:
    """Tokenizes chunks. Holds what a process needs for it, and nothing that changes."""

    def __init__(self, policy: TokenizePolicy, tokenizer: Any):
        self.policy = policy
        self.renderer = Renderer(
            tokenizer, policy.train_on, policy.reasoning, policy.special_tokens_in_text
        )
        self.greetings = GreetingPolicy(tokenizer)
        self.bos_id = tokenizer.bos_token_id
        self.system_prompt = SystemPrompt(policy.system_prompt, policy.replaces_system)

    def __call__(self, task: ChunkTask) -> TokenizedChunk:
        """Return the samples of a chunk."""
        progress = _Progress(Tally(rows_in=len(task.chunk.records)))
        records = self._parse(task, progress)
        rows = [row for record in records for row in record.rows]
        rendered = iter(self.renderer.render(rows))
        for record in records:
            samples: list[RenderedSample] = []
            refused: RenderError | None = None
            for row, result in zip(record.rows, rendered, strict=False):
                if isinstance(result, RenderError):
                    refused = refused or result
                else:
                    samples += result
                    progress.tally.untrained.update(_excluded_answers(row))
            if refused is not None:
                progress.drop(_unproven(record, refused), "unproven")
                continue
            progress.tally.as_text.update({name for sample in samples for name in sample.as_text})
            tokens = max((len(sample.ids) for sample in samples), default=0)
            if tokens > self.policy.max_seq_len:
                progress.long_rows.append(LongRow(task.file, record.number, tokens))
            identity = RowIdentity(task.file, record.number, *hash_rows(record.rows))
            progress.samples.extend(self._fit(samples, identity, progress.tally))
        return _finish(progress, task)

    def _parse(self, task: ChunkTask, progress: "_Progress") -> list["_RecordRows"]:
        """Return the records that are rows, and count what is not used."""
        unused = UnusedKeys(task.row_format)
        unused.add_columns(columns_with_values(task.chunk))
        parsed = parse_record_rows(task.chunk, task.row_format, self.system_prompt, unused)
        records: list[_RecordRows] = []
        for number, rows in zip(task.chunk.numbers, parsed, strict=True):
            if isinstance(rows, BadRow):
                progress.drop(rows, "bad_row")
            else:
                fitted = [self._fit_greeting(row, progress.tally) for row in rows]
                records.append(_RecordRows(number, fitted))
        progress.tally.unused.update(unused.rows)
        return records

    def _fit_greeting(self, row: Row, tally: Tally) -> Row:
        """Return the row as the template takes it, and count a first turn of the assistant."""
        if not row.begins_with_answer:
            return row
        fitted = self.greetings.fit(row)
        tally.untrained["greeting" if fitted is row else "greeting_left_out"] += 1
        return fitted

    def _fit(
        self, rendered: Sequence[RenderedSample], identity: RowIdentity, tally: Tally
    ) -> Iterator[StoredSample]:
        """Yield a row's samples within the limit, and count the row."""
        kept = 0
        reasons: list[str] = []
        for sample in rendered:
            fitted = fit_sample(sample, self.policy.max_seq_len, self.policy.too_long, self.bos_id)
            tally.lost_trained_tokens += fitted.lost_trained_tokens
            if fitted.reason:
                reasons.append(fitted.reason)
            for part in fitted.samples:
                if part.trained_tokens:  # else the model learns nothing from it
                    kept += 1
                    yield StoredSample(part, identity, fitted.cut_tokens)
        if kept:
            tally.rows_used += 1
            tally.shortened.update(set(reasons))
        elif not rendered:
            tally.dropped["all_excluded"] += 1
        else:
            tally.dropped[reasons[0] if reasons else "nothing_to_train"] += 1


def hash_rows(rows: Sequence[Row]) -> RowHashes:
    """Return hashes of a record's rows, which are trained or evaluated on together."""
    hashes = [hash_row(row) for row in rows]
    if len(hashes) == 1:
        return hashes[0]
    return RowHashes(*(_hash(repr(values)) for values in zip(*hashes, strict=True)))


def hash_row(row: Row) -> RowHashes:
    """Return hashes of a row without its system message."""
    if row.text is not None:
        exact = row.text
        content = row.text
    elif row.segments:
        content = "".join(segment.text for segment in row.segments)
        exact = content
    else:
        exact = repr([_message_fields(message) for message in row.messages])
        content = "\n".join(message.content for message in row.messages if message.role != "system")
    words = " ".join(re.findall(r"\w+", content.casefold()))
    return RowHashes(_hash(exact), _hash(words or content))  # a text may have no words


def _unproven(record: _RecordRows, error: RenderError) -> BadRow:
    origin = record.rows[0].origin
    facts = [asdict(row) for row in record.rows]
    text = json.dumps(facts[0] if len(facts) == 1 else facts, ensure_ascii=False)
    return BadRow(origin, str(error).removeprefix(f"{origin}: "), text)


def _excluded_answers(row: Row) -> dict[str, int]:
    """Return how many answers a flag excludes from loss."""
    excluded = sum(not message.is_trained for message in row.messages) - row.begins_with_answer
    return {"excluded": excluded} if excluded > 0 else {}


def _message_fields(message: Message) -> tuple[Any, ...]:
    return (
        message.role,
        message.content,
        message.reasoning,
        message.tool_calls,
        message.name,
        message.tool_call_id,
    )


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _finish(progress: _Progress, task: ChunkTask) -> TokenizedChunk:
    samples = to_arrays(progress.samples)
    tally = progress.tally
    tally.samples = len(samples.records)
    tally.tokens = len(samples.ids)
    tally.trained_tokens = int(samples.trained.sum())
    tally.check()
    path = str(task.chunk.path)
    bad_rows = [
        StoredBadRow(task.file, row.origin.removeprefix(path), row.reason, row.raw)
        for row in progress.bad_rows
    ]
    long_rows = longest_first(progress.long_rows)
    return TokenizedChunk(samples, tally, bad_rows, long_rows, task.chunk.bytes_read)


def longest_first(rows: Sequence[LongRow]) -> list[LongRow]:
    """Return the longest rows, as many as an error lists."""
    return sorted(rows, key=lambda row: -row.tokens)[:MAX_LISTED_ROWS]
