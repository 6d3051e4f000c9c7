"""Rows to token ids and labels, through the tokenizer's own chat template, for training and for use alike. Loads no torch.

Nothing is believed of a template: what of a text is trained is found by `answers`, and here proven on the tokens. Training
equals use: the ids before an answer are those that `render_prompt` gives the model when it is to answer.
Legend: T tokens of one sample.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.answers import Answer, AnswerFinder, Draft
from sft_play.data.rows import Message, Row
from sft_play.data.templates import (
    DEFAULT_TEMPLATE,
    ChatTemplate,
    RenderError,
    stop_ids,
    template_of,
    turns_of,
)

__all__ = [
    "DEFAULT_TEMPLATE",
    "IGNORE_INDEX",
    "RenderError",
    "Rendered",
    "Renderer",
    "render_prompt",
    "stop_ids",
    "template_of",
]

IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default
SEAM_CHARACTERS = 64  # looked back from the end of a prompt for a token that texts are split at; then 16 times as far


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sequence as the model sees it: ids (T,) and labels (T,), IGNORE_INDEX where no loss."""

    ids: list[int]
    labels: list[int]
    answer_start: int = (
        0  # where the last answer begins, behind its prompt; 0: no prompt, as in plain text
    )

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


@dataclass(frozen=True, slots=True)
class _Tokenised:
    """A draft's tokens, and for each of its answers the end of its prompt, and which token that begins at."""

    draft: Draft
    ids: list[int]
    seams: list[tuple[int, str]]


class Renderer:
    """Rows to samples, a batch at a time; what belongs to the tokenizer is found once."""

    def __init__(self, tokenizer: Any, train_on: Literal["all", "last"] = "all"):
        self._finder = AnswerFinder(tokenizer, train_on)
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()  # what an earlier user of the tokenizer left set
        self._tokenizer.no_padding()
        self._stops, self._bos, self._eos = (
            stop_ids(tokenizer),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
        self._splitting = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }
        self._splits = re.compile(
            "|".join(map(re.escape, sorted(self._splitting, key=len, reverse=True)))
        )
        with_special, without = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False)
        )
        self._text_begins = (
            with_special[:1] if with_special[:1] == [self._bos] != without[:1] else []
        )

    def render(self, rows: Sequence[Row]) -> list[tuple[Rendered, ...] | RenderError]:
        """Return the samples of each row, or why it cannot be proven.

        A conversation is one sample, or several where the template writes an answer otherwise once the conversation has gone on;
        every trained answer is in one of them, behind the prompt that use would give, with the stop token behind it. A plain text
        is one sample, trained but for its first token, with bos before it if the tokenizer adds one, and eos behind it.
        """
        found = [self._drafts(row) for row in rows]
        drafts = [
            draft for of_row in found if not isinstance(of_row, RenderError) for draft in of_row
        ]
        texts = [
            self._tokenised(draft, ids)
            for draft, ids in zip(
                drafts, self._ids_of([draft.text for draft in drafts]), strict=True
            )
        ]
        seams = list({seam for text in texts for _, seam in text.seams})
        seam_ids = dict(zip(seams, self._ids_of(seams), strict=True))
        waiting = iter(texts)
        return [
            of_row
            if isinstance(of_row, RenderError)
            else self._samples(row, [next(waiting) for _ in of_row], seam_ids)
            for row, of_row in zip(rows, found, strict=True)
        ]

    def _drafts(self, row: Row) -> list[Draft] | RenderError:
        if row.text is not None:
            return [Draft(row.text)]
        try:
            return self._finder.drafts(row)
        except RenderError as error:
            return RenderError(f"{row.origin}: {error}")

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]  # fast: without offsets

    def _tokenised(self, draft: Draft, ids: list[int]) -> _Tokenised:
        return _Tokenised(
            draft, ids, [self._seam(draft.text, answer.start, ids) for answer in draft.answers]
        )

    def _seam(self, text: str, start: int, ids: list[int]) -> tuple[int, str]:
        """Return (token, text from it to the end of a prompt), which, tokenised alone, proves that the prompt's ids begin the sample's.

        Tokenizers split texts at their added tokens first, so that what is before one does not depend on what is behind it: it is
        enough to compare from the last one in the prompt (`<|im_start|>assistant\n`). Without one, the whole prompt is compared.
        """
        found, reach = None, SEAM_CHARACTERS
        while found is None and reach < 16 * start:
            *_, found = None, *self._splits.finditer(text, max(0, start - reach), start)
            reach *= 16
        if found is not None:
            number = self._splitting[found[0]]
            if ids.count(number) == text.count(
                found[0]
            ):  # then its n-th place in the text is its n-th among the tokens
                token = -1
                for _ in range(text.count(found[0], 0, found.end())):
                    token = ids.index(number, token + 1)
                return token, text[found.start() : start]
        return 0, text[:start]

    def _samples(
        self, row: Row, texts: list[_Tokenised], seam_ids: dict[str, list[int]]
    ) -> tuple[Rendered, ...] | RenderError:
        try:
            return tuple(
                self._plain(text.ids) if row.text is not None else self._labelled(text, seam_ids)
                for text in texts
            )
        except RenderError as error:
            return RenderError(f"{row.origin}: {error}")

    def _plain(self, ids: list[int]) -> Rendered:
        ids = [*self._text_begins, *ids, *([] if ids[-1:] == [self._eos] else [self._eos])]
        self._refuse_two_beginnings(ids)
        return Rendered(ids, [IGNORE_INDEX, *ids[1:]])

    def _labelled(self, text: _Tokenised, seam_ids: dict[str, list[int]]) -> Rendered:
        ids = text.ids
        self._refuse_two_beginnings(ids)
        labels = [IGNORE_INDEX] * len(ids)
        spans = [
            self._span(text, answer, before, seam_ids[seam])
            for answer, (before, seam) in zip(text.draft.answers, text.seams, strict=True)
        ]
        for first, behind in spans:
            labels[first:behind] = ids[first:behind]
        if text.draft.marks is not None and not _marks_are_answers(text.draft):
            check_marks(
                text.draft, spans, self._tokenizer.encode(text.draft.text, add_special_tokens=False)
            )
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
        return Rendered(ids, labels, spans[-1][0])

    def _span(
        self, text: _Tokenised, answer: Answer, before: int, seam_ids: list[int]
    ) -> tuple[int, int]:
        """Return the tokens of an answer as (first, behind the stop token). Raises RenderError unless they are just its text."""
        ids, first = text.ids, before + len(seam_ids)
        if ids[before:first] != seam_ids:
            straddling = next(
                index
                for index, number in enumerate(seam_ids, before)
                if ids[index : index + 1] != [number]
            )
            token = self._tokenizer.decode(
                ids[straddling : straddling + 1], skip_special_tokens=False
            )
            raise RenderError(
                f"the token {token!r} straddles the end of the prompt of messages[{answer.number}]"
            )
        rest, written = ids[first:], text.draft.text
        ends = [rest.index(stop) for stop in self._stops if stop in rest]
        if not ends:
            raise RenderError(
                f"the tokenizer does not read {written[answer.stop : answer.end]!r} behind messages[{answer.number}] as its stop token"
            )
        behind = first + 1 + min(ends)
        self._check_read_back(ids[first:behind], written[answer.start : answer.end], answer.number)
        return first, behind

    def _check_read_back(self, ids: list[int], piece: str, number: int) -> None:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != piece and self._spelled(decoded) != self._spelled(piece):
            raise RenderError(
                f"the tokens of messages[{number}] read {decoded[:80]!r}, not the answer; the tokenizer lacks characters of it"
            )

    def _spelled(self, text: str) -> str:
        """Return a text as the tokenizer reads it, without blanks: some decoders put them between tokens or drop the first."""
        normalizer = self._tokenizer.normalizer
        return "".join(
            (normalizer.normalize_str(text) if normalizer else text).replace("\u2581", " ").split()
        )

    def _refuse_two_beginnings(self, ids: list[int]) -> None:
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise RenderError(
                "the text begins with the beginning-of-text token twice: the row brings one that is written anyway"
            )


def _marks_are_answers(draft: Draft) -> bool:
    """Return whether a draft's marks are its answers to the character, but for blanks behind them; then they are to the token."""
    joined: list[tuple[int, int]] = []
    for start, end in draft.marks or []:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return (
        draft.is_whole
        and [start for start, _ in joined] == [answer.start for answer in draft.answers]
        and all(
            end >= answer.end and not draft.text[answer.end : end].strip()
            for (_, end), answer in zip(joined, draft.answers, strict=True)
        )
    )


def check_marks(draft: Draft, spans: Sequence[tuple[int, int]], encoding: Any) -> None:
    """Raise RenderError unless `{% generation %}` marks the tokens of `spans` and no others, but for blanks behind a stop token.

    Tokens are marked as transformers marks them for a mask of the assistant's tokens.
    """
    assert draft.marks is not None, "the template has marks"
    marked = bytearray(len(encoding))
    for start, end in draft.marks:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None:
            break
        behind = last + 1 if last else len(marked)
        marked[first:behind] = b"\1" * (behind - first)
    for answer, (first, behind) in zip(draft.answers, spans, strict=True):
        where = f"messages[{answer.number}]"
        if not marked[behind - 1]:
            raise RenderError(
                f"the template's generation marks leave out the stop token of {where}"
            )
        if 0 in marked[first:behind]:
            raise RenderError(f"the template's generation marks leave out a part of {where}")
        if first and marked[first - 1]:
            raise RenderError(
                f"the template's generation marks begin before {where}, in its prompt"
            )
        after = marked.find(0, behind) if 0 in marked[behind:] else len(marked)
        if (
            after > behind
            and draft.text[answer.end : encoding.token_to_chars(after - 1)[1]].strip()
        ):
            raise RenderError(
                f"the template's generation marks go on behind the stop token of {where}"
            )
        marked[first:after] = bytes(after - first)
    if draft.is_whole and 1 in marked:
        start, end = encoding.token_to_chars(marked.find(1))
        raise RenderError(
            f"the template's generation marks hold {draft.text[start:end]!r}, which no answer holds"
        )


def render_prompt(
    messages: Sequence[Message], tokenizer: Any, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Return the ids of a prompt, ready for the model to answer. Raises RenderError when the template refuses it."""
    return tokenizer(
        ChatTemplate(tokenizer).prompt(turns_of(messages), tools), add_special_tokens=False
    )["input_ids"]
