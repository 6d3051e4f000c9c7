"""Rows to token ids and labels, with the tokenizer's own chat template. Loads no torch.

No template is trusted: `training_text` finds the trained characters of a text, and this module
checks them on the tokens. Training equals use: the ids before an answer are those that
`render_prompt` gives the model when it is to answer.
Legend: T tokens of one sample.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from sft_play.data.rows import Json, Message, Row, Segment
from sft_play.data.special_text import TokensInText, special_text
from sft_play.data.templates import (
    DEFAULT_TEMPLATE,
    ChatTemplate,
    RenderError,
    stop_ids,
    template_messages,
    template_of,
)
from sft_play.data.training_text import (
    AnswerSpan,
    TokenSpan,
    TrainingText,
    TrainingTextBuilder,
    check_generation_marks,
    marks_equal_answers,
)

__all__ = [
    "DEFAULT_TEMPLATE",
    "IGNORE_INDEX",
    "RenderError",
    "RenderedSample",
    "Renderer",
    "render_prompt",
    "stop_ids",
    "template_of",
]

IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default
TAIL_CHARACTERS = 64  # of a prompt's end searched for an added token; then 16 times as many
MAX_DECODED_CHARACTERS = 80  # of decoded tokens that an error quotes


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """One sequence as the model sees it: ids (T,) and labels (T,), IGNORE_INDEX where no loss."""

    ids: list[int]
    labels: list[int]
    answer_start: int = 0  # first token of the last answer; 0: no prompt, as in plain text
    as_text: tuple[str, ...] = ()  # special tokens in its messages that are read as plain text

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


class PromptTail(NamedTuple):
    """The end of a prompt, tokenized alone to check that the sample begins with its ids."""

    first_token: int  # at which the tail begins, in the tokens of the whole text
    text: str


@dataclass(frozen=True, slots=True)
class _TokenizedText:
    """A training text, its ids, and the prompt tail of each of its answers."""

    text: TrainingText
    ids: list[int]
    tails: list[PromptTail]


class _JoinedLineBreaks(RenderError):
    """A token of line breaks belongs to both the prompt and the answer, as under Qwen."""


class Renderer:
    """Renders rows to samples, a batch at a time, with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        train_on: Literal["all", "last"] = "all",
        reasoning: Literal["keep", "drop", "empty"] = "keep",
        tokens_in_text: TokensInText = "as_text",
    ):
        self._texts = TrainingTextBuilder(tokenizer, train_on, reasoning)
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()  # earlier code may have set these two
        self._tokenizer.no_padding()
        self._special = special_text(tokenizer, tokens_in_text)
        self._stop_ids = stop_ids(tokenizer)
        self._bos = tokenizer.bos_token_id
        self._eos = tokenizer.eos_token_id
        self._added_tokens = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }
        longest_first = sorted(self._added_tokens, key=len, reverse=True)
        self._added_token = re.compile("|".join(map(re.escape, longest_first)))
        self._text_prefix = self._beginning_of_text()

    def render(self, rows: Sequence[Row]) -> list[tuple[RenderedSample, ...] | RenderError]:
        """Return the samples of each row, or why what they train cannot be proven.

        A conversation is one sample, or several if the template writes an answer differently once
        the conversation continues. Every trained answer is in one of them, after the prompt that
        use would give and with its stop token. A plain text is one sample, trained except for its
        first token, with bos before it if the tokenizer adds one, and eos after it. Segments are
        tokenized one by one, and bring their special tokens. A row that trains nothing has no
        sample.
        """
        escaped, texts_of_rows = self._build_texts(rows)
        texts: list[TrainingText] = []
        for found in texts_of_rows:
            if not isinstance(found, RenderError):
                texts.extend(found)
        tokenized = self._tokenize_texts(texts)
        tail_texts: set[str] = set()
        for text in tokenized:
            tail_texts.update(tail.text for tail in text.tails)
        tails = list(tail_texts)
        tail_ids = dict(zip(tails, self._tokenize(tails), strict=True))
        remaining = iter(tokenized)
        results: list[tuple[RenderedSample, ...] | RenderError] = []
        for given, row, found in zip(rows, escaped, texts_of_rows, strict=True):
            if isinstance(found, RenderError):
                results.append(found)
                continue
            samples = self._label(row, list(islice(remaining, len(found))), tail_ids)
            is_escaped = row is not given
            results.append(self._name_tokens(row, samples) if is_escaped else samples)
        return results

    def _beginning_of_text(self) -> list[int]:
        """Return [bos] if the tokenizer puts it before every text, else []."""
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        without = self._tokenizer.encode("a", add_special_tokens=False).ids
        adds_bos = with_special[:1] == [self._bos] != without[:1]
        return [self._bos] if adds_bos else []

    def _build_texts(
        self, rows: Sequence[Row]
    ) -> tuple[list[Row], list[list[TrainingText] | RenderError]]:
        """Return the rows as they are rendered, and the texts of each or why it has none."""
        escaped: list[Row] = []
        texts: list[list[TrainingText] | RenderError] = []
        for row in rows:
            try:
                row = self._special.escaped(row)
                texts.append(self._training_texts(row))
            except RenderError as error:
                texts.append(RenderError(self._special.plain(f"{row.origin}: {error}")))
            escaped.append(row)
        return escaped, texts

    def _training_texts(self, row: Row) -> list[TrainingText]:
        if row.text is not None:
            return [TrainingText(row.text)]
        if row.segments:
            return [TrainingText(segment.text) for segment in row.segments]
        return self._texts.build(row)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._special.encode(texts)]

    def _tokenize_texts(self, texts: list[TrainingText]) -> list[_TokenizedText]:
        tokenized = []
        for text, ids in zip(texts, self._tokenize([text.text for text in texts]), strict=True):
            tails = [self._prompt_tail(text.text, answer.start, ids) for answer in text.answers]
            tokenized.append(_TokenizedText(text, ids, tails))
        return tokenized

    def _prompt_tail(self, text: str, prompt_end: int, ids: list[int]) -> PromptTail:
        """Return the tail of a prompt, from its last added token, such as `<|im_start|>`.

        Tokenizers split texts at their added tokens first, so the tokens before an added token do
        not depend on what follows it, and comparing from the last one is enough. Without one, the
        tail is the whole prompt.
        """
        found = self._last_added_token(text, prompt_end)
        if found is None:
            return PromptTail(0, text[:prompt_end])
        token_id = self._added_tokens[found[0]]
        if ids.count(token_id) != text.count(found[0]):
            return PromptTail(0, text[:prompt_end])
        # the n-th occurrence in the text is the n-th among the tokens
        token = -1
        for _ in range(text.count(found[0], 0, found.end())):
            token = ids.index(token_id, token + 1)
        return PromptTail(token, text[found.start() : prompt_end])

    def _last_added_token(self, text: str, end: int) -> re.Match[str] | None:
        """Return the last added token in a text before `end`."""
        searched = TAIL_CHARACTERS
        while searched < 16 * end:
            matches = list(self._added_token.finditer(text, max(0, end - searched), end))
            if matches:
                return matches[-1]
            searched *= 16
        return None

    def _label(
        self, row: Row, texts: list[_TokenizedText], tail_ids: dict[str, list[int]]
    ) -> tuple[RenderedSample, ...] | RenderError:
        if row.segments:
            return (self._join_segments(row.segments, [text.ids for text in texts]),)
        samples = []
        try:
            for text in texts:
                if row.text is not None:
                    samples.append(self._label_plain_text(text.ids))
                else:
                    samples += self._label_answers(text, tail_ids)
        except RenderError as error:
            return RenderError(self._special.plain(f"{row.origin}: {error}"))
        return tuple(samples)

    def _name_tokens(
        self, row: Row, samples: tuple[RenderedSample, ...] | RenderError
    ) -> tuple[RenderedSample, ...] | RenderError:
        """Return the samples of an escaped row with the special tokens in its text."""
        if isinstance(samples, RenderError):
            return samples
        as_text = self._special.tokens_in(row)
        return tuple(replace(sample, as_text=as_text) for sample in samples)

    def _join_segments(
        self, segments: Sequence[Segment], ids_of: Sequence[list[int]]
    ) -> RenderedSample:
        ids: list[int] = []
        labels: list[int] = []
        answer_start = 0
        was_trained = False
        for segment, segment_ids in zip(segments, ids_of, strict=True):
            if segment.is_trained and not was_trained:
                answer_start = len(ids)
            was_trained = segment.is_trained
            labels += segment_ids if was_trained else [IGNORE_INDEX] * len(segment_ids)
            ids += segment_ids
        labels[:1] = [IGNORE_INDEX]  # nothing predicts the first token
        return RenderedSample(ids, labels, answer_start)

    def _label_plain_text(self, ids: list[int]) -> RenderedSample:
        ids = [*self._text_prefix, *ids]
        if ids[-1:] != [self._eos]:
            ids.append(self._eos)
        self._refuse_second_bos(ids)
        return RenderedSample(ids, [IGNORE_INDEX, *ids[1:]])

    def _label_answers(
        self, tokenized: _TokenizedText, tail_ids: dict[str, list[int]]
    ) -> list[RenderedSample]:
        """Return the sample of a text, and one of each answer whose line breaks join its prompt's.

        Such an answer is tokenized apart, as it follows the prompt's tokens at use.
        """
        ids = tokenized.ids
        text = tokenized.text
        self._refuse_second_bos(ids)
        spans: list[TokenSpan] = []
        apart: list[RenderedSample] = []
        for answer, tail in zip(text.answers, tokenized.tails, strict=True):
            try:
                spans.append(
                    self._token_span(tokenized, answer, tail.first_token, tail_ids[tail.text])
                )
            except _JoinedLineBreaks:
                if text.generated is not None and not marks_equal_answers(text):
                    raise
                apart.append(self._label_apart(text.text, answer))
        if not spans:
            return apart
        if apart:
            ids = ids[: spans[-1].end]
        labels = [IGNORE_INDEX] * len(ids)
        for start, end in spans:
            labels[start:end] = ids[start:end]
        if text.generated is not None and not marks_equal_answers(text):
            (encoding,) = self._special.encode([text.text], with_offsets=True)
            check_generation_marks(text, spans, encoding)
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
        return [*apart, RenderedSample(ids, labels, spans[-1].start)]

    def _label_apart(self, text: str, answer: AnswerSpan) -> RenderedSample:
        """Return the sample of one answer, its tokens behind those of the prompt."""
        written = text[answer.start : answer.end]
        prompt, ids = self._tokenize([text[: answer.start], written])
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != self._special.plain(written) or ids[-1] not in self._stop_ids:
            raise RenderError(
                f"the tokenizer does not read messages[{answer.message}] by itself as the answer"
            )
        return RenderedSample([*prompt, *ids], [*[IGNORE_INDEX] * len(prompt), *ids], len(prompt))

    def _token_span(
        self, tokenized: _TokenizedText, answer: AnswerSpan, tail_start: int, tail_ids: list[int]
    ) -> TokenSpan:
        """Return the tokens of an answer with its stop token.

        Raises RenderError unless they decode to exactly its text.
        """
        ids = tokenized.ids
        text = tokenized.text.text
        start = tail_start + len(tail_ids)
        if ids[tail_start:start] != tail_ids:
            token = self._first_difference(ids[tail_start:], tail_ids)
            is_line_breaks = "\n" in token and not token.strip()
            kind = _JoinedLineBreaks if is_line_breaks else RenderError
            raise kind(
                f"the token {token!r} straddles the end of the prompt of messages[{answer.message}]"
            )
        following = ids[start:]
        stops = [following.index(stop) for stop in self._stop_ids if stop in following]
        if not stops:
            raise RenderError(
                f"the tokenizer does not read {text[answer.stop : answer.end]!r} "
                f"behind messages[{answer.message}] as its stop token"
            )
        end = start + min(stops) + 1
        self._check_decoded(ids[start:end], text[answer.start : answer.end], answer.message)
        return TokenSpan(start, end)

    def _first_difference(self, ids: list[int], expected: list[int]) -> str:
        """Return the first token of ids that is not the expected one."""
        for index, token_id in enumerate(expected):
            if ids[index : index + 1] != [token_id]:
                return self._tokenizer.decode(ids[index : index + 1], skip_special_tokens=False)
        raise AssertionError("the ids are as expected")

    def _check_decoded(self, ids: list[int], text: str, message: int) -> None:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        text = self._special.plain(text)
        if decoded != text and self._normalize(decoded) != self._normalize(text):
            raise RenderError(
                f"the tokens of messages[{message}] read {decoded[:MAX_DECODED_CHARACTERS]!r}, "
                "not the answer; the tokenizer lacks characters of it"
            )

    def _normalize(self, text: str) -> str:
        """Return a text as the tokenizer reads it, without whitespace.

        Some decoders add whitespace between tokens or drop the first.
        """
        if self._tokenizer.normalizer:
            text = self._tokenizer.normalizer.normalize_str(text)
        return "".join(text.replace("\u2581", " ").split())

    def _refuse_second_bos(self, ids: list[int]) -> None:
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise RenderError(
                "the text begins with the beginning-of-text token twice: "
                "the row brings one that is written anyway"
            )


def render_prompt(
    messages: Sequence[Message],
    tokenizer: Any,
    tools: Sequence[Json] = (),
    tokens_in_text: TokensInText = "as_text",
) -> list[int]:
    """Return the ids of a prompt that the model is to answer. Raises RenderError."""
    special = special_text(tokenizer, tokens_in_text)
    asked = Row(tuple(messages), "the prompt", tools=tuple(tools))
    row = special.escaped(asked)
    template = ChatTemplate(tokenizer)
    text = template.render_prompt(template_messages(row.messages), row.tools)
    if row is asked:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return special.encode([text])[0].ids
