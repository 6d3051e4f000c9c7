"""Rows to token ids and labels, with the tokenizer's chat template. Loads no torch.

No template is trusted: `training_text` finds the trained characters of a text, and this module
checks them on the tokens. Training matches inference: the ids before an answer are those that
`render_prompt` gives the model when it has to answer.
Legend: T tokens of one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

from sft_play.data.rows import Json, Message, PromptIds, Row, Segment
from sft_play.data.special_text import TokensInText, encode, join_ids, special_text
from sft_play.data.templates import ChatTemplate, RenderError, stop_ids, template_messages
from sft_play.data.thoughts import Reasoning, ThoughtPolicy
from sft_play.data.training_text import (
    IGNORE_INDEX,
    AnswerSpan,
    RenderedSample,
    Samples,
    TrainingTextBuilder,
    TrainOn,
    images_of,
)

TWO_BOS = (
    "the text begins with the beginning-of-text token twice: "
    "the row brings one that is written anyway"
)
MAX_DECODED_CHARACTERS = 80  # of decoded tokens that an error quotes


class _JoinedLineBreaks(RenderError):
    """A token of line breaks belongs to both the prompt and the answer, e.g. in Qwen."""


class Renderer:
    """Renders rows to samples, one batch at a time, with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = "all",
        reasoning: Reasoning = "keep",
        tokens_in_text: TokensInText = "as_text",
    ):
        self._texts = TrainingTextBuilder(tokenizer, train_on, reasoning)
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = special_text(tokenizer, tokens_in_text)
        self._stop_ids = stop_ids(tokenizer)
        self._two_bos = [tokenizer.bos_token_id] * 2
        self._decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        self._eos = tokenizer.eos_token_id
        (with_special,) = encode(self._tokenizer, ["a"], add_special_tokens=True)
        (without,) = encode(self._tokenizer, ["a"])
        bos = self._two_bos[:1]
        self._text_prefix = bos if with_special[:1] == bos != without[:1] else []

    def render(
        self, rows: Sequence[Row], written: Sequence[Samples | RenderError] = ()
    ) -> list[tuple[RenderedSample, ...] | RenderError]:
        """Return the samples of each row, or why its trained tokens cannot be proven.

        A conversation is one sample, or several if the template writes an answer differently once
        the conversation continues. Every trained answer is in one of them, after the prompt of
        inference and with its stop token. A plain text is one sample, trained except for its
        first token, with bos before it if the tokenizer adds one, and eos after it. Segments are
        tokenized one by one, with their special tokens. A row without trained tokens has no
        sample.
        """
        written = written or self.write_texts(rows)
        texts: Samples = []
        for found in written:
            if not isinstance(found, RenderError):
                texts += found
        tails: dict[str, list[int]] = {}
        for text, parts in zip(
            texts, self._special.encode_parts([text.text for text in texts]), strict=True
        ):
            text.ids = join_ids(parts)
            for answer in text.answers:
                *others, last = [part for part in parts if part.begin <= answer.start]
                answer.tail_token = len(join_ids(others))
                answer.tail = text.text[last.begin : answer.start]
                tails[answer.tail] = []
        tails = dict(zip(tails, self._special.encode(list(tails)), strict=True))
        return [
            found if isinstance(found, RenderError) else self._label(row, found, tails)
            for row, found in zip(rows, written, strict=True)
        ]

    def write_texts(self, rows: Sequence[Row]) -> list[Samples | RenderError]:
        """Return the texts of each row, or why its trained tokens cannot be proven."""
        return [self._write(row) for row in rows]

    def _write(self, row: Row) -> Samples | RenderError:
        if row.segments:
            return [RenderedSample([], [], text=segment.text) for segment in row.segments]
        if row.text is not None:
            return [RenderedSample([], [], text=row.text)]
        try:
            if self._is_plain(row):
                return self._texts.build(row)
            builder = self._texts.for_row(row)
            arranged, notes = builder.thoughts.apply(row)
            escaped, as_text = self._special.escape(arranged)
            texts = builder.for_row(escaped).build(escaped)
            notes += builder.describe_unread(arranged)
        except RenderError as error:
            return RenderError(self._special.plain(f"{row.origin}: {error}"))
        for text in texts:
            text.notes += notes
            text.as_text = as_text
        return texts

    def _is_plain(self, row: Row) -> bool:
        """Return whether a conversation has only contents, and none of them could be a mark."""
        if row.tools or row.variables:
            return False
        for message in row.messages:
            if message.reasoning is not None or message.tool_calls:
                return False
            if (
                self._special.unusual.search(message.content)
                or message.name
                or message.tool_call_id
            ):
                return False
        return True

    def _label(
        self, row: Row, texts: Sequence[RenderedSample], tails: Mapping[str, list[int]]
    ) -> tuple[RenderedSample, ...] | RenderError:
        if row.segments:
            return (_join_segments(row.segments, texts),)
        samples: Samples = []
        try:
            for text in texts:
                if row.text is None:
                    samples += self._label_answers(text, tails, row.messages)
                elif row.weight:
                    samples.append(self._label_text(text, row.weight))
        except RenderError as error:
            return RenderError(self._special.plain(f"{row.origin}: {error}"))
        return tuple(samples)

    def _label_text(self, text: RenderedSample, weight: float) -> RenderedSample:
        """Return the sample of a plain text."""
        ids = text.ids
        if ids[:1] != self._text_prefix:
            ids = [*self._text_prefix, *ids]
        if not self._has_end(text):
            ids = [*ids, self._eos]
        if ids[:2] == self._two_bos:
            raise RenderError(TWO_BOS)
        weights = None if weight == 1 else [weight] * len(ids)
        return RenderedSample(ids, [IGNORE_INDEX, *ids[1:]], weights=weights)

    def _has_end(self, text: RenderedSample) -> bool:
        """Return whether a plain text ends with an end-of-answer token, as rendered texts do."""
        blanks = len(text.text) - len(text.text.rstrip())
        ends = text.ids[-1 - blanks :]  # a blank has one token at most
        return any(
            token_id in self._stop_ids and not self._decode(ends[place + 1 :]).strip()
            for place, token_id in enumerate(ends)
        )

    def _label_answers(
        self, text: RenderedSample, tails: Mapping[str, list[int]], messages: Sequence[Message]
    ) -> Samples:
        """Return the sample of a text, and one per answer whose line breaks join its prompt.

        Such an answer is tokenized separately, because it follows the prompt's tokens at inference.
        """
        ids = text.ids
        if ids[:2] == self._two_bos:
            raise RenderError(TWO_BOS)
        labels = [IGNORE_INDEX] * len(ids)
        weights = [1.0] * len(ids)
        apart: Samples = []
        last: AnswerSpan | None = None
        for answer in text.answers:
            weight = messages[answer.message].weight
            try:
                start, end = self._find_answer(text, answer, tails[answer.tail])
            except _JoinedLineBreaks:
                apart.append(self._label_apart(text, answer, weight))
                continue
            last = answer
            labels[start:end] = ids[start:end]
            weights[start:end] = [weight] * (end - start)
        if last is None:
            return apart
        if apart:
            ids, labels, weights = ids[:end], labels[:end], weights[:end]
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
        sample = replace(
            text,
            ids=ids,
            labels=labels,
            answer_start=start,
            weights=weights if weights.count(1.0) < len(ids) else None,
            images=last.images,
        )
        return [*apart, sample]

    def _label_apart(
        self, text: RenderedSample, answer: AnswerSpan, weight: float
    ) -> RenderedSample:
        """Return the sample of one answer, its tokens after those of the prompt."""
        written = text.text[answer.start : answer.end]
        prompt, ids = self._special.encode([text.text[: answer.start], written])
        if self._decode(ids) != self._special.plain(written) or ids[-1] not in self._stop_ids:
            raise RenderError(
                f"the tokenizer does not read messages[{answer.message}] by itself as the answer"
            )
        labels = [*[IGNORE_INDEX] * len(prompt), *ids]
        weights = None if weight == 1 else [weight] * len(labels)
        return replace(
            text,
            ids=[*prompt, *ids],
            labels=labels,
            answer_start=len(prompt),
            weights=weights,
            images=answer.images,
        )

    def _find_answer(
        self, text: RenderedSample, answer: AnswerSpan, tail_ids: list[int]
    ) -> tuple[int, int]:
        """Return the start and end of the tokens of an answer with its stop token.

        Raises RenderError unless they decode to exactly its text.
        """
        ids = text.ids
        where = f"messages[{answer.message}]"
        tail_start = answer.tail_token
        start = tail_start + len(tail_ids)
        if ids[tail_start:start] != tail_ids:
            same = len(commonprefix((ids[tail_start:start], tail_ids)))  # noqa: RUF071 - of ids
            token = self._decode(ids[tail_start + same :][:1])
            is_line_breaks = "\n" in token and not token.strip()
            kind = _JoinedLineBreaks if is_line_breaks else RenderError
            raise kind(f"the token {token!r} straddles the end of the prompt of {where}")
        following = ids[start:]
        stops = [following.index(stop) for stop in self._stop_ids if stop in following]
        if not stops:
            raise RenderError(
                f"the tokenizer does not read {text.text[answer.stop : answer.end]!r} "
                f"after {where} as its stop token"
            )
        end = start + min(stops) + 1
        decoded = self._decode(ids[start:end])
        written = self._special.plain(text.text[answer.start : answer.end])
        if decoded != written and self._normalize(decoded) != self._normalize(written):
            raise RenderError(
                f"the tokens of {where} read {decoded[:MAX_DECODED_CHARACTERS]!r}, "
                "not the answer; the tokenizer lacks characters of it"
            )
        return start, end

    def _normalize(self, text: str) -> str:
        """Return a text as the tokenizer reads it, without whitespace.

        Some decoders add whitespace between tokens or drop the first.
        """
        if self._tokenizer.normalizer:
            text = self._tokenizer.normalizer.normalize_str(text)
        return "".join(text.replace("\u2581", " ").split())


def _join_segments(segments: Sequence[Segment], texts: Sequence[RenderedSample]) -> RenderedSample:
    ids: list[int] = []
    labels: list[int] = []
    weights: list[float] = []
    answer_start = 0
    was_trained = False
    for segment, text in zip(segments, texts, strict=True):
        if segment.is_trained and not was_trained:
            answer_start = len(ids)
        was_trained = segment.is_trained
        labels += text.ids if was_trained else [IGNORE_INDEX] * len(text.ids)
        ids += text.ids
        weights += [segment.weight] * len(text.ids)
    labels[:1] = [IGNORE_INDEX]  # nothing predicts the first token
    has_weights = any(segment.weight != 1 for segment in segments)
    return RenderedSample(ids, labels, answer_start, weights=weights if has_weights else None)


@dataclass(frozen=True)
class TemplateSpace:
    """The whitespace that a chat template writes before and after an answer."""

    before: str = ""
    after: str = ""

    def without(self, text: str) -> str:
        """Return an answer as the model wrote it, without the template's whitespace."""
        return text.removeprefix(self.before).removesuffix(self.after)


MARK = "zqanswerqz"


def template_space(tokenizer: Any) -> TemplateSpace:
    """Return the whitespace around an answer; none if the template writes anything else there."""
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    try:
        prompt, text = ChatTemplate(tokenizer).render_both(asked)
    except RenderError:
        return TemplateSpace()
    before, _, after = text.removeprefix(prompt).partition(MARK)
    after = after[: len(after) - len(after.lstrip())]
    return TemplateSpace(before if not before.strip() else "", after)


def render_prompt(
    messages: Sequence[Message],
    tokenizer: Any,
    tools: Sequence[Json] = (),
    tokens_in_text: TokensInText = "as_text",
    variables: Json | None = None,
) -> PromptIds:
    """Return the ids of a prompt that the model has to answer. Raises RenderError.

    `variables` are chat template variables for this prompt only. The model's processor has
    already written the images of the messages.
    """
    special = special_text(tokenizer, tokens_in_text)
    asked = Row(tuple(messages), "the prompt", tools=tuple(tools), variables=variables)
    template = ChatTemplate(tokenizer)
    asked, _ = ThoughtPolicy(template.for_row(variables), "keep").apply(asked)
    row, _ = special.escape(asked)
    text = template.for_row(row.variables).render_prompt(template_messages(row.messages), row.tools)
    return PromptIds(special.encode([text])[0], images_of(messages))
