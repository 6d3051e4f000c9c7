"""Convert one chunk of records to samples, in any process. Loads no torch.

Legend: T tokens of a sample.
"""

import json
import mmap
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

from sft_play.config.schema import Config
from sft_play.data.cache import LongRow
from sft_play.data.files import Chunk
from sft_play.data.images import State
from sft_play.data.ledger import Tally
from sft_play.data.limits import (
    CHARACTER_BYTES,
    CHARACTER_SECONDS,
    CPU_SECONDS,
    GROWN_BYTES,
    TEMPLATE_REMEDY,
    TOKENIZER_REMEDY,
    find_excess,
    limited_resources,
)
from sft_play.data.processor import Processor
from sft_play.data.render import IGNORE_INDEX, RenderedSample, Renderer, RenderError
from sft_play.data.row_detection import ChunkTask
from sft_play.data.row_hashes import forget_images, hash_piece, hash_row, hash_rows
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows
from sft_play.data.rows import MAX_COLUMNS_CHARACTERS, BadRow, InvalidRowError, Row, shorten
from sft_play.data.store import SampleArrays, StoredSample, to_arrays
from sft_play.data.template_checks import fit_greeting
from sft_play.data.templates import ChatTemplate
from sft_play.data.training_text import Samples, is_trained
from sft_play.errors import DataError

STEPS = (("the chat template", TEMPLATE_REMEDY), ("the tokenizer", TOKENIZER_REMEDY))
CUT = {"truncate_left": "truncated", "split": "split"}  # how a policy changes rows


def fit_sample(
    rendered: RenderedSample,
    max_tokens: int,
    policy: Literal["drop", "truncate_left", "split"],
    bos_id: int | None = None,
) -> Samples:
    """Return the samples, each with a trained token, that fit into a limit in tokens.

    drop: none, also for a sample with images, because a cut could go through an image.
    truncate_left: the last `max_tokens` tokens; first bos if the sample began with it. split:
    consecutive pieces of `max_tokens` tokens. bos is not repeated: it tells the model that a text
    begins, but a piece continues one. The first token of a piece carries no loss, since
    nothing in the piece predicts it.

    >>> answered = RenderedSample([1, 5, 6, 7, 8], [-100, -100, -100, 7, 8], answer_start=3)
    >>> fit_sample(answered, 4, "truncate_left", bos_id=1)
    [RenderedSample(ids=[1, 6, 7, 8], labels=[-100, -100, 7, 8], answer_start=2, as_text=())]
    >>> text = RenderedSample([5, 6, 7, 8], [-100, 6, 7, 8])
    >>> [piece.ids for piece in fit_sample(text, 2, "split")]
    [[5, 6], [7, 8]]
    """
    assert max_tokens > 1, f"a sample of {max_tokens} tokens has nothing to learn"
    total = len(rendered.ids)
    pieces: Samples = []
    if total <= max_tokens:
        pieces.append(rendered)
    elif policy == "split" and not rendered.images:
        for start in range(0, total, max_tokens):
            pieces.append(_cut_piece(rendered, start, start + max_tokens))
    elif policy == "truncate_left" and not rendered.images:
        keeps_bos = rendered.ids[0] == bos_id
        piece = _cut_piece(rendered, total - max_tokens + keeps_bos, total)
        if keeps_bos:
            piece.ids.insert(0, bos_id)
            piece.labels.insert(0, IGNORE_INDEX)
            piece.answer_start += piece.answer_start > 0
            if piece.weights:
                piece.weights.insert(0, 1.0)
        pieces.append(piece)
    return [piece for piece in pieces if piece.trained_tokens]


def _cut_piece(rendered: RenderedSample, start: int, end: int) -> RenderedSample:
    """Return the tokens [start, end); answer_start is 0 if the last prompt ends outside of them."""
    ids = rendered.ids[start:end]
    labels = [IGNORE_INDEX, *rendered.labels[start + 1 : end]]
    has_prompt_end = start < rendered.answer_start < start + len(ids)
    answer_start = rendered.answer_start - start if has_prompt_end else 0
    weights = rendered.weights and rendered.weights[start:end]
    return RenderedSample(ids, labels, answer_start, weights=weights)


# What answers of a scraped or exported table look like: the words of the note, and the pattern
DOUBTS = {
    "have HTML tags in an answer": re.compile(
        r"</?(?:p|br|div|span|li|ul|td|b|i|a)\b[^<>]*>"
    ).search,
    "have an answer like N/A, NULL or -": re.compile(
        r"\s*(?i:n/?a|null|none|nan|-+)\.?\s*"
    ).fullmatch,
}
REFUSALS = "an answer is the text in `refusal`, as its content is null or empty"
WEIGHTS = "some of their tokens weigh other than 1 in the loss, as a weight says"  # a note


@dataclass
class TokenizedChunk:
    """The samples of a chunk, and what happened to its rows."""

    file: int  # of the source
    bytes_read: int  # size of the chunk in its file on disk
    tally: Tally
    samples: SampleArrays = field(init=False)  # set after all rows are tokenized
    bad_rows: list[BadRow] = field(default_factory=list)
    long_rows: list[LongRow] = field(default_factory=list)  # the longest ones over the limit
    image_states: dict[str, State] = field(default_factory=dict)  # of the files of its images

    def drop(self, row: BadRow, reason: str) -> None:
        """Count a bad row."""
        self.tally.dropped[reason] += 1
        self.bad_rows.append(row)


class ChunkTokenizer:
    """Tokenizes chunks. Contains everything a process needs for it, and nothing that changes."""

    def __init__(self, config: Config, tokenizer: Any, decodes: bool = True):
        data = config.data
        self._max_seq_len = config.model.max_seq_len
        self._too_long = data.too_long
        self._renderer = Renderer(
            tokenizer, data.train_on, data.reasoning, data.special_tokens_in_text
        )
        self._template = ChatTemplate(tokenizer)
        self._bos_id = tokenizer.bos_token_id
        self._system_prompt = SystemPrompt.from_config(config, decodes)
        self.processor = Processor(config, tokenizer)
        self.processor.find_limits()  # reports errors in them before a row is read

    def __call__(self, task: ChunkTask) -> TokenizedChunk:
        """Return the samples of a chunk."""
        tally = Tally(rows_in=len(task.chunk.records))
        done = TokenizedChunk(task.file, task.chunk.bytes_read, tally)
        states = self._system_prompt.images.states
        states.clear()
        forget_images()
        records = self._parse(task, done)
        done.image_states = dict(states)
        parsed = [row for rows in records.values() for row in rows]
        with limited_resources(*_limits(task.chunk)):
            rendered = iter(self._renderer.render(parsed))
        stored: list[StoredSample] = []
        for number, rows in records.items():
            stored += self._store(task, number, rows, rendered, done)
        done.samples = to_arrays(stored)
        tally.samples = len(stored)
        tally.distinct_tokens = len(done.samples.ids)
        tally.tokens = tally.distinct_tokens + int(done.samples.records["shared"].sum())
        tally.images = len(done.samples.images)
        tally.image_tokens = int(done.samples.records["image_tokens"].sum())
        tally.trained_tokens = int(done.samples.trained.sum())
        tally.check()
        return done

    def _store(
        self,
        task: ChunkTask,
        number: int,
        rows: Sequence[Row],
        rendered: Iterator[tuple[RenderedSample, ...] | RenderError],
        done: TokenizedChunk,
    ) -> list[StoredSample]:
        """Return the stored samples of a record, and count the result."""
        tally = done.tally
        samples: Samples = []
        refused: list[RenderError] = []
        for row in rows:
            found = next(rendered)
            try:
                if isinstance(found, RenderError):
                    raise found
                for sample in found:
                    self.processor.check(sample)
            except RenderError as error:
                refused.append(error)
                continue
            samples += found
            answers = [message.content for message in row.messages if message.role == "assistant"]
            for words, finds in DOUBTS.items():
                if any(map(finds, answers)):
                    tally.doubtful[words] += 1
            if [message for message in row.messages if message.is_refusal]:
                tally.noted[REFUSALS] += 1
            excluded = list(map(is_trained, row.messages)).count(False)
            if excluded and excluded > row.begins_with_answer:
                tally.untrained["excluded"] += excluded - row.begins_with_answer
        if refused:
            done.drop(_bad_row(rows, str(refused[0])), "unproven")
            return []
        if not samples:
            tally.dropped["all_excluded"] += 1
            return []
        tally.as_text.update({token for sample in samples for token in sample.as_text})
        tally.noted.update({note for sample in samples for note in sample.notes})
        if [sample for sample in samples if sample.weights]:
            tally.noted[WEIGHTS] += 1
        tokens = max([len(sample.ids) for sample in samples])
        if tokens > self._max_seq_len:
            done.long_rows.append(LongRow(task.file, number, tokens))
        stored = self._fit(task.file, number, rows, samples, tally)
        if stored:
            tally.rows_used += 1
            shown = {image for part in stored for image in part.rendered.images}
            if shown:
                tally.image_rows += 1
                notes = map(self.processor.describe_scale, shown)
                tally.noted.update(set(chain.from_iterable(notes)))
        else:
            is_long = tokens > self._max_seq_len
            tally.dropped["too_long" if is_long else "nothing_to_train"] += 1
        return stored

    def _fit(
        self,
        file: int,
        number: int,
        rows: Sequence[Row],
        samples: Sequence[RenderedSample],
        tally: Tally,
    ) -> list[StoredSample]:
        """Return a record's samples after the length policy, and count what it cuts."""
        is_text = rows[0].text is not None
        policy = self._too_long
        if policy == "auto":
            policy = "split" if is_text else "drop"
        hashes = hash_row(rows[0]) if len(rows) == 1 else hash_rows(rows)
        stored: list[StoredSample] = []
        reasons: set[str] = set()
        for sample in samples:
            parts = fit_sample(sample, self._max_seq_len, policy, self._bos_id)
            cut = len(sample.ids) - sum([len(part.ids) for part in parts])
            if len(sample.ids) > self._max_seq_len:
                reasons.add(CUT[policy] if parts else "too_long")
                kept = sum([part.trained_tokens for part in parts])
                tally.lost_trained_tokens += sample.trained_tokens - kept
            for part in parts:
                own = hash_piece(hashes, len(stored)) if is_text and stored else hashes
                image_tokens = self.processor.count(part.images) if part.images else 0
                stored.append(StoredSample(part, file, number, own, cut, image_tokens))
        if stored:
            tally.shortened.update(reasons)
        return stored

    def refuse_endless_rows(self, task: ChunkTask, title: str) -> None:
        """Raise DataError for rows whose processing by the model's files exceeds a limit.

        It names the step that ran when the limit was exceeded, and the row, or all rows until then
        if none of them needed half of the time.
        """
        records = self._parse(task, TokenizedChunk(task.file, 0, Tally()))
        rows = [row for rows in records.values() for row in rows]
        seconds, grown_bytes = _limits(task.chunk)
        reached = memoryview(mmap.mmap(-1, 3 * 8)).cast("d")  # row, step, seconds before the row

        def render_rows() -> None:
            """Render the rows one by one, and note in shared memory how far it is."""
            begun = time.process_time()
            characters = 0
            for number, row in enumerate(rows):
                reached[0], reached[1], reached[2] = number, 0, time.process_time() - begun
                written = self._renderer.write_texts([row])
                for text in () if isinstance(written[0], RenderError) else written[0]:
                    characters += len(text.text)
                # else the template has written too much
                reached[1] = characters * CHARACTER_SECONDS <= seconds
                self._renderer.render([row], written)

        excess = find_excess(render_rows, seconds, grown_bytes, title)
        if excess:
            last = int(reached[0])
            first = last if 2 * reached[2] < max(1, seconds) else 0
            more = f" and {last - first} rows after it" if last > first else ""
            what, remedy = STEPS[int(reached[1])]
            raise DataError(f"{rows[first].origin}{more}: {what} {excess}; {remedy}")

    def _parse(self, task: ChunkTask, done: TokenizedChunk) -> dict[int, list[Row]]:
        """Return the rows of each record, mostly one, by its number; count what is not used."""
        chunk = task.chunk
        tally = done.tally
        parsed = parse_record_rows(chunk, task.row_format, self._system_prompt, tally.unused)
        records: dict[int, list[Row]] = {}
        for number, rows in zip(chunk.numbers, parsed, strict=True):
            if isinstance(rows, BadRow):
                done.drop(rows, "bad_row")
                continue
            try:
                rows = list(map(self.processor.write, rows))
            except InvalidRowError as error:
                done.drop(_bad_row(rows, str(error)), "bad_row")
                continue
            for index, row in enumerate(rows):
                if row.messages and row.messages[0].role != "user" and row.begins_with_answer:
                    rows[index] = fit_greeting(self._template, row)
                    is_kept = rows[index] is row
                    tally.untrained["greeting" if is_kept else "greeting_left_out"] += 1
            records[number] = rows
        names = {shorten(key, MAX_COLUMNS_CHARACTERS): key for key in tally.unused}
        tally.unused = Counter({name: tally.unused[key] for name, key in names.items()})
        return records


def _limits(chunk: Chunk) -> tuple[float, int]:
    """Return the seconds and the bytes of memory that rendering a chunk may take."""
    records = chunk.records
    if records and isinstance(records[0], bytes):
        size = sum(map(len, records))
    else:
        size = len(str(records))
    return CPU_SECONDS + size * CHARACTER_SECONDS, GROWN_BYTES + size * CHARACTER_BYTES


def _bad_row(rows: Sequence[Row], reason: str) -> BadRow:
    origin = rows[0].origin
    facts = [asdict(row) for row in rows]
    facts = facts[0] if len(facts) == 1 else facts
    text = json.dumps(facts, ensure_ascii=False, default=lambda data: f"{len(data):,} bytes")
    return BadRow(origin, reason.removeprefix(f"{origin}: "), text)
