"""Checks that a chat template writes every message of a conversation, unchanged. Tokenizes nothing.

Conversations may begin with an answer, which carries no loss. Some templates refuse it or leave it
out (Mistral, Gemma, Llama 2): under these it is left out of the row. The ledger counts both.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft_play.data.rows import Message, Row
from sft_play.data.template_losses import REMEDY
from sft_play.data.templates import (
    ChatTemplate,
    RenderError,
    iterate_strings,
    template_messages,
)
from sft_play.data.thoughts import split_reasoning

MAX_QUOTED_CHARACTERS = 24
GREETING = "The first turn."  # words that no template writes by itself
PROBED = (
    Message("assistant", GREETING),
    Message("user", "A question."),
    Message("assistant", "An answer."),
)


def check_prompt(messages: Sequence[Message], prompt: str) -> None:
    """Raise RenderError unless the prompt has every message's content.

    Whitespace around a content does not count. Of earlier answers only the part after the reasoning
    is required, since templates leave reasoning out of the history. Earlier tool calls may be
    written in any way.
    """
    position = 0
    for index, message in enumerate(messages):
        # Messages must be found in order, so that a question asked twice is written twice. But
        # Mistral's template puts the system message into the last question.
        start = 0 if message.role == "system" else position
        places = [(prompt.find(form, start), form) for form in _accepted_forms(message)]
        ends = [place + len(form) for place, form in places if place >= 0]
        if not ends:
            raise RenderError(
                f"the chat template leaves out or changes messages[{index}], "
                f"of the role {message.role}: {quote(message.content.strip())}"
            )
        if message.role != "system":
            position = ends[0]


def check_answer(
    message: Message, where: str, text: str, after: str, ending: re.Pattern[str]
) -> None:
    """Raise RenderError unless an answer's text is its message, which errors call `where`.

    The text is what the template writes from the end of the prompt to the stop token, and `after`
    what follows that. A template may write something before the content (an empty think block, the
    name of a channel), which the model learns to write; between the content and the stop token
    there may be only `ending`, or tool calls.
    """
    reasoning = (message.reasoning or "").strip()
    if reasoning not in text:
        raise RenderError(
            f"the chat template leaves out or changes the reasoning of {where}: "
            f"{quote(reasoning)}; DATA_REASONING=drop trains the answers without it"
        )
    content = message.content.strip()
    if message.tool_calls:
        _check_calls(text, message, where)
        if content in text:
            return
    elif _ends_with(text, content, ending):
        return
    if content in text:
        extra = text[text.rfind(content) + len(content) :].strip()
        raise RenderError(
            f"the chat template writes {quote(extra)} behind {where}; "
            "if it ends answers, name it as eos_token in tokenizer_config.json"
        )
    if content in after:
        remedy = "; DATA_REASONING=drop trains the answers without it" if reasoning else ""
        behind = "behind its reasoning, " if reasoning else ""
        raise RenderError(
            f"the chat template writes a stop token before {where}, {behind}"
            f"so the answer would not be learned{remedy}"
        )
    raise RenderError(
        f"the chat template leaves out or changes {where}, an answer: {quote(content)}"
    )


def quote(text: str) -> str:
    """Return a text in quotes, shortened for an error."""
    if len(text) > MAX_QUOTED_CHARACTERS:
        text = text[:MAX_QUOTED_CHARACTERS] + "..."
    return repr(text)


def _accepted_forms(message: Message) -> list[str]:
    content = message.content.strip()
    if message.role == "assistant" and message.tool_calls:
        return [""]
    if message.role == "assistant":
        return [content, split_reasoning(message).answer.strip()]
    if message.role == "tool":  # Llama 3 and gpt-oss write it as JSON
        return [content, json_characters(content)]
    return [content]


def _check_calls(text: str, message: Message, where: str) -> None:
    """Raise RenderError unless a text has the names of the calls and all of their arguments."""
    for call in message.tool_calls:
        function = call["function"]
        for word in (function["name"], *iterate_strings(function["arguments"])):
            forms = (word, json_characters(word), json.dumps(word)[1:-1])  # the last in ASCII
            if not any(form in text for form in forms):
                raise RenderError(
                    f"the chat template leaves out or changes a tool call of {where}: "
                    f"{quote(word)}; {REMEDY}"
                )


def json_characters(text: str) -> str:
    """Return a text as JSON has it between its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ends_with(text: str, content: str, ending: re.Pattern[str]) -> bool:
    if text.rstrip().endswith(content):
        return True
    place = text.rfind(content)
    return place >= 0 and ending.fullmatch(text, place + len(content)) is not None


class GreetingPolicy:
    """Leaves out first turns of the assistant where the chat template does not write them."""

    def __init__(self, tokenizer: Any):
        self._template = ChatTemplate(tokenizer)
        self._is_written: dict[bool, bool] = {}  # by whether there is a system message

    def fit(self, row: Row) -> Row:
        """Return the row as the template takes it."""
        has_system = row.messages[0].role == "system"
        if has_system not in self._is_written:
            self._is_written[has_system] = self._writes_greeting(has_system)
        if self._is_written[has_system]:
            return row
        greeting = 1 if has_system else 0
        messages = (*row.messages[:greeting], *row.messages[greeting + 1 :])
        return replace(row, messages=messages)

    def _writes_greeting(self, has_system: bool) -> bool:
        system = (Message("system", "Be brief."),) if has_system else ()
        messages = template_messages((*system, *PROBED))
        try:
            prompt = self._template.render_prompt(messages[:-1])
            text = self._template.render_conversation(messages).text
        except RenderError:
            return False
        return GREETING in prompt and text.startswith(prompt)
