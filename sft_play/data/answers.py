"""Where each trained answer stands in the text that a chat template writes, proven on that text. Tokenises nothing.

The *live* text of an answer is the conversation up to and with it, as the template writes it when that answer is the last: what
the model is given at use, and behind it what the model is to write. Templates write some answers otherwise once the conversation
has gone on (Qwen 3 and DeepSeek R1 leave the reasoning out of the history, gpt-oss ends the last answer with a token of its own),
so one row may become several texts: every answer is trained in a text that begins with its live text, up to its stop token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, Literal

from sft_play.data.rows import Message, Row
from sft_play.data.templates import (
    ChatTemplate,
    RenderError,
    as_object,
    stop_ids,
    strings_in,
    turns_of,
)

SHOWN_CHARACTERS = 24  # of a text that an error quotes
ASKED_MESSAGES = 16  # a longer conversation goes on as it began, and is costly to write twice
BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Answer:
    """One trained answer in a text, in characters: its prompt ends at `start`, its stop token is at `stop:end`."""

    number: int  # of its message
    start: int
    stop: int
    end: int


@dataclass(slots=True)
class Draft:
    """The text of one sample and the answers that are trained in it, in their order."""

    text: str
    answers: list[Answer] = field(default_factory=list)
    marks: list[tuple[int, int]] | None = (
        None  # what `{% generation %}` says of this text; None: nothing
    )
    is_whole: bool = False  # every answer of the text is trained in it


class AnswerFinder:
    """Rows to drafts, by one tokenizer's template and stop tokens."""

    def __init__(self, tokenizer: Any, train_on: Literal["all", "last"] = "all"):
        self._template, self._train_on, self._eos = (
            ChatTemplate(tokenizer),
            train_on,
            tokenizer.eos_token,
        )
        self._stops = sorted(tokenizer.convert_ids_to_tokens(sorted(stop_ids(tokenizer))))
        self._stop = re.compile("|".join(map(re.escape, self._stops)))
        special = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._blank_or_special = re.compile(
            "(?:" + "|".join([r"\s", *map(re.escape, special)]) + ")*"
        )
        self._faithful: set[tuple[tuple[str, bool], ...]] = (
            set()
        )  # shapes of conversations that the template was seen to write whole

    def drafts(self, row: Row) -> list[Draft]:
        """Return the texts that train a conversation's answers, each of them once. Raises RenderError."""
        numbers = [
            number for number, message in enumerate(row.messages) if message.role == "assistant"
        ]
        if not numbers:
            raise RenderError("no message is the assistant's, so there is nothing to train")
        turns = turns_of(row.messages)
        drafts: list[Draft] = []
        for live in reversed(self._lives(row, turns, numbers)):
            (answer,) = (
                live.answers
            )  # a later text may begin with this one up to its stop token, and then trains the answer too
            shared = next(
                (draft for draft in drafts if draft.text.startswith(live.text[: answer.end])), None
            )
            if shared is None:
                drafts.append(live)
            else:
                shared.answers.insert(0, answer)
        for draft in drafts:
            draft.is_whole = len(draft.answers) == sum(
                number <= draft.answers[-1].number for number in numbers
            )
        return drafts[::-1]

    def _lives(self, row: Row, turns: list[dict[str, Any]], numbers: list[int]) -> list[Draft]:
        if self._train_on == "last" or len(numbers) == 1:
            return [self._live(row, turns, numbers[-1])]
        try:
            return [self._live(row, turns, number) for number in numbers]
        except RenderError as error:
            if not self._is_trainable(row, turns, numbers[-1]):
                raise
            raise RenderError(f"{error}; DATA_TRAIN_ON=last trains the last answer alone") from None

    def _is_trainable(self, row: Row, turns: list[dict[str, Any]], number: int) -> bool:
        try:
            return bool(self._live(row, turns, number))
        except RenderError:
            return False

    def _live(self, row: Row, turns: list[dict[str, Any]], number: int) -> Draft:
        """Return the live text of the answer `messages[number]`, with its place.

        Where the template writes no stop token, eos is put behind its last character: the model must learn to end. At use it meets
        its earlier answers as the template writes them, without, so in a longer conversation such an answer has a text of its own.
        """
        messages = row.messages
        self._refuse_stop_inside(messages[number], number)
        prompt = self._template.prompt(turns[:number], row.tools)
        text, marks = self._template.answered(turns[: number + 1], row.tools)
        if not text.startswith(prompt):
            system = messages[0].content.strip() if messages[0].role == "system" else ""
            if system in prompt and system not in text:  # as Mistral's does
                raise RenderError(
                    "the chat template leaves out the system message once a question is answered; write it into the first question"
                )
            raise RenderError(
                f"the chat template writes what is before messages[{number}] otherwise once it is answered, so the answer cannot be found: "
                + _parting(prompt, text)
            )
        _check_prompt(messages[:number], prompt)
        found = self._stop.search(text, len(prompt))
        stop, end = found.span() if found else (len(text), len(text))
        _check_answer(
            text[len(prompt) : stop],
            text[end:],
            messages[number],
            number,
            self._blank_or_special if found else BLANK,
        )
        if not self._blank_or_special.fullmatch(text, end):
            raise RenderError(
                f"the chat template writes {_quoted(text[end:].strip())} behind the stop token of messages[{number}]"
            )
        self._check_places(turns[: number + 1], row.tools)
        if not found:
            text, end = text + self._eos, stop + len(self._eos)
            marks = marks and [*marks, (stop, end)]
        return Draft(text, [Answer(number, len(prompt), stop, end)], marks)

    def _refuse_stop_inside(self, message: Message, number: int) -> None:
        for text in (message.content, message.reasoning or "", *strings_in(message.tool_calls)):
            if found := self._stop.search(text):
                raise RenderError(
                    f"messages[{number}] holds {found[0]}, which ends an answer, so what stands behind it would not be learned"
                )

    def _check_places(self, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
        """Raise RenderError unless the template writes every message of such a conversation, and its answer once.

        Asked of words that no template writes of its own: a content as short as "a" stands in many places by chance.
        """
        shape = tuple((turn["role"], "tool_calls" in turn) for turn in turns)
        if len(turns) > ASKED_MESSAGES or shape in self._faithful:
            return
        asked = [
            number
            for number, (role, calls) in enumerate(shape)
            if role in ("system", "user") or (number == len(turns) - 1 and not calls)
        ]
        words = {number: f"Place{number}Of{len(turns)}Messages" for number in asked}
        worded = [
            {**turn, "content": words.get(number, turn["content"])}
            for number, turn in enumerate(turns)
        ]
        start = len(self._template.prompt(worded[:-1], tools))
        text, _ = self._template.answered(worded, tools)
        for number, word in words.items():
            if word not in text:
                raise RenderError(
                    f"the chat template leaves out or changes messages[{number}], of the role {turns[number]['role']}"
                )
        if text.count(words.get(len(turns) - 1, ""), start) > 1 and len(turns) - 1 in words:
            raise RenderError(
                f"the chat template writes messages[{len(turns) - 1}], an answer, more than once"
            )
        self._faithful.add(shape)


def _check_prompt(messages: Sequence[Message], prompt: str) -> None:
    """Raise RenderError unless every message's content stands in the prompt, but for blanks around it.

    Of earlier answers the part behind the reasoning does, which templates leave out of the history; of earlier calls of tools what
    the template likes.
    """
    position = 0
    for number, message in enumerate(messages):
        content = message.content.strip()
        forms = [content]
        if message.role == "assistant":
            forms = [""] if message.tool_calls else [content, _split_thought(content)[1]]
        elif message.role == "tool":
            forms = [
                content,
                json.dumps(content, ensure_ascii=False)[1:-1],
            ]  # Llama 3 and gpt-oss write it as JSON
        # in their order, so that a question asked twice is written twice; Mistral puts the system message into the last question
        found = next(
            (
                (place, form)
                for form in forms
                if (place := prompt.find(form, 0 if message.role == "system" else position)) >= 0
            ),
            None,
        )
        if found is None:
            raise RenderError(
                f"the chat template leaves out or changes messages[{number}], of the role {message.role}: {_quoted(content)}"
            )
        if message.role != "system":
            position = found[0] + len(found[1])


def _check_answer(
    piece: str, behind: str, message: Message, number: int, ending: re.Pattern[str]
) -> None:
    """Raise RenderError unless `piece`, what the model is to write before its stop token, is the message.

    A template may write of its own before the content (an empty think block, the name of a channel), which the model learns to write;
    between it and the stop token stand `ending` alone, or the calls of tools.
    """
    if message.reasoning and message.reasoning.strip() not in piece:
        raise RenderError(
            f"the chat template leaves out or changes the reasoning of messages[{number}]: {_quoted(message.reasoning.strip())}"
        )
    content = message.content.strip()
    if message.tool_calls:
        _check_calls(piece, message, number)
        if content in piece:
            return
    elif _ends_with(piece, content, ending) or (
        "</think>" in content and _ends_with_thought(piece, content, ending)
    ):
        return
    if content in piece:
        extra = _quoted(piece[piece.rfind(content) + len(content) :].strip())
        raise RenderError(
            f"the chat template writes {extra} behind messages[{number}]; if it ends answers, name it as eos_token in tokenizer_config.json"
        )
    if content in behind:
        raise RenderError(
            f"the chat template writes a stop token before messages[{number}], so the answer would not be learned"
        )
    raise RenderError(
        f"the chat template leaves out or changes messages[{number}], an answer: {_quoted(content)}"
    )


def _check_calls(piece: str, message: Message, number: int) -> None:
    for call in message.tool_calls:
        function = call.get("function", call)
        arguments = function.get("arguments", {}) if isinstance(function, Mapping) else {}
        for word in (function.get("name", ""), *strings_in(as_object(arguments))):
            if (
                word not in piece
                and json.dumps(word, ensure_ascii=False)[1:-1] not in piece
                and json.dumps(word)[1:-1] not in piece
            ):
                raise RenderError(
                    f"the chat template leaves out or changes a tool call of messages[{number}]: {_quoted(word)}"
                )


def _ends_with(piece: str, content: str, ending: re.Pattern[str]) -> bool:
    if piece.rstrip().endswith(content):
        return True
    place = piece.rfind(content)
    return place >= 0 and ending.fullmatch(piece, place + len(content)) is not None


def _ends_with_thought(piece: str, content: str, ending: re.Pattern[str]) -> bool:
    reasoning, answer = _split_thought(content)
    return reasoning in piece and _ends_with(piece, answer, ending)


def _split_thought(content: str) -> tuple[str, str]:
    """Return the reasoning and the answer of a content that holds both; some templates space them anew."""
    before, _, answer = content.rpartition("</think>")
    return before.strip().removeprefix("<think>").strip(), answer.strip()


def _parting(prompt: str, text: str) -> str:
    same = len(commonprefix((prompt, text)))  # noqa: RUF071 - of texts, not of paths
    return (
        f"the prompt has {_quoted(prompt[same:])} where the conversation has {_quoted(text[same:])}"
    )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")
