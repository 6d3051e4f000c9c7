"""Checks that a chat template writes every message of a conversation, unchanged. Tokenizes nothing.

Conversations may begin with an answer, which carries no loss. Some templates refuse it or leave it
out (Mistral, Gemma, Llama 2): under these it is left out of the row. The ledger counts both.

Some templates end the prompt inside a think block (DeepSeek R1's distills, Nemotron 3, Qwen 3.5):
the model is to write its reasoning, close the block and answer. Others end it after an empty block
(Gemma 4, DeepSeek V3.2 without thinking). Not all of them write such an answer in a conversation;
then its text is put together here: the prompt, the reasoning, the end of the block, and the answer
as the template writes it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sft_play.data.rows import Json, Message, Row
from sft_play.data.templates import (
    ChatTemplate,
    RenderError,
    iterate_strings,
    template_messages,
)

MAX_QUOTED_CHARACTERS = 24
THOUGHT_END = "</think>"
GREETING = "The first turn."  # words that no template writes by itself
PROBED = (
    Message("assistant", GREETING),
    Message("user", "A question."),
    Message("assistant", "An answer."),
)


class Thought(NamedTuple):
    """A content that has both reasoning and answer."""

    reasoning: str
    answer: str


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
    elif THOUGHT_END in content:
        thought = split_thought(content)
        if thought.reasoning in text and _ends_with(text, thought.answer, ending):
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
        return [content, split_thought(content).answer]
    if message.role == "tool":  # Llama 3 and gpt-oss write it as JSON
        return [content, _json_characters(content)]
    return [content]


def _check_calls(text: str, message: Message, where: str) -> None:
    """Raise RenderError unless a text has the names of the calls and all of their arguments."""
    for call in message.tool_calls:
        function = call["function"]
        for word in (function["name"], *iterate_strings(function["arguments"])):
            forms = (word, _json_characters(word), json.dumps(word)[1:-1])  # the last in ASCII
            if not any(form in text for form in forms):
                raise RenderError(
                    f"the chat template leaves out or changes a tool call of {where}: "
                    f"{quote(word)}; MODEL_CHAT_TEMPLATE=<file> takes a Jinja file that writes it"
                )


def _json_characters(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ends_with(text: str, content: str, ending: re.Pattern[str]) -> bool:
    if text.rstrip().endswith(content):
        return True
    place = text.rfind(content)
    return place >= 0 and ending.fullmatch(text, place + len(content)) is not None


def split_thought(content: str) -> Thought:
    """Split a content into reasoning and answer; templates may change the whitespace between."""
    before, _, answer = content.rpartition(THOUGHT_END)
    return Thought(before.strip().removeprefix("<think>").strip(), answer.strip())


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


class Block(NamedTuple):
    """The marks of a think block, and how one usually ends if the template does not say."""

    opened: str
    closed: str
    usual_end: str


BLOCKS = (
    Block("<think>", THOUGHT_END, "\n</think>\n\n"),  # DeepSeek R1, Qwen, GLM, MiniMax
    Block("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),  # Command A
    Block("<|channel>thought", "<channel|>", "<channel|>"),  # Gemma 4
    Block("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    Block("<think:opensource>", "</think:opensource>", "</think:opensource>"),  # Hunyuan 3
    Block("<seed:think>", "</seed:think>", "</seed:think>"),  # Seed-OSS
    Block("[THINK]", "[/THINK]", "[/THINK]"),  # Magistral, Ministral
)
PROBE = "Reasoning1Of1"  # words that no template writes by itself
# Variables of templates that let the model think, or not; none is a field such as message.thinking
SWITCHES = (
    ("enable_thinking", re.compile(r"\benable_thinking\b")),
    ("thinking", re.compile(r"""(?<![\w.'"])thinking(?![\w'"])""")),
)


@dataclass(frozen=True)
class AskedAnswer:
    """An answer: its row, its prompt, and the text of the conversation up to and including it."""

    row: Row
    messages: list[Json]  # of the row, as templates read them
    index: int  # of the answer
    prompt: str
    text: str

    @property
    def reasoning(self) -> str:
        return split_reasoning(self.row.messages[self.index])[0]

    def render(self, template: ChatTemplate, **changes: str) -> tuple[str, str]:
        """Return prompt and text under a template, with other fields of the answer."""
        asked, tools = self.messages[: self.index], self.row.tools
        answer = {**self.messages[self.index], **changes}
        text = template.render_conversation([*asked, answer], tools).text
        return template.render_prompt(asked, tools), text


class ThoughtPolicy:
    """Applies `data.reasoning` to rows, and finds answers after think blocks of the prompt."""

    def __init__(self, template: ChatTemplate, reasoning: Literal["keep", "drop", "empty"]):
        self._template = template
        self._reasoning = reasoning

    def apply(self, row: Row) -> Row:
        """Return a row, under `drop` without any reasoning."""
        if self._reasoning != "drop":
            return row
        messages = []
        for message in row.messages:
            if message.role == "assistant":
                content = split_reasoning(message)[1]
                message = replace(message, reasoning=None, content=content)
            messages.append(message)
        return replace(row, messages=tuple(messages))

    def write_text(self, asked: AskedAnswer) -> str | None:
        """Return the text of an answer whose prompt ends in a think block, None if it does not.

        The text is put together if the conversation has another one: the prompt of use, then what
        the model is to write after it.

        Raises: RenderError for an answer without reasoning if none is to be put in its place, and
        for one with reasoning after a closed block.
        """
        prompt = asked.prompt.rstrip()
        for block in BLOCKS:
            is_open = prompt.endswith(block.opened)
            if not is_open and not prompt.endswith(block.closed):
                continue
            self._refuse_other_reasoning(is_open, asked)
            before = prompt.removesuffix(block.closed).rstrip()
            before = before.removesuffix(block.opened).rstrip()
            if not asked.text.startswith(before):
                return None
            answer = _without_block(block, asked.text[len(before) :])
            if is_open:
                answer = asked.reasoning + self._find_block_end(block, asked) + answer
            return asked.prompt + answer
        return None

    def _refuse_other_reasoning(self, is_open: bool, asked: AskedAnswer) -> None:
        """Raise RenderError for missing reasoning in an open block, and any after a closed one."""
        if is_open and not asked.reasoning and self._reasoning == "keep":
            switch = self._find_switch(False, asked)
            raise RenderError(
                "the chat template opens a think block before an answer, and messages"
                f"[{asked.index}] has no reasoning; DATA_REASONING=empty trains an empty block"
                + (f", {switch} none" if switch else "")
            )
        if not is_open and asked.reasoning:
            switch = self._find_switch(True, asked)
            raise RenderError(
                "the chat template closes the think block in the prompt, and the row has "
                f"reasoning; {f'{switch} trains it, ' if switch else ''}DATA_REASONING=drop "
                "leaves it out"
            )

    def _find_switch(self, on: bool, asked: AskedAnswer) -> str | None:
        """Return the setting by which the model thinks, or does not; None if none is found."""
        for name, pattern in SWITCHES:
            if not pattern.search(self._template.jinja):
                continue
            prompt, text = asked.render(self._template.with_variable(name, on))
            thinks = prompt.rstrip().endswith(tuple(block.opened for block in BLOCKS))
            if on == (thinks or (on and asked.reasoning in text)):
                return f"MODEL_TEMPLATE_KWARGS='{{{name}: {str(on).lower()}}}'"
        return None

    def _find_block_end(self, block: Block, asked: AskedAnswer) -> str:
        """Return how the template ends a think block, asked with words of our own."""
        words = f"Answer{PROBE}"
        prompt, text = asked.render(self._template, content=words, reasoning_content=PROBE)
        after = text[len(prompt) :].partition(PROBE)[2]
        between, found, _ = after.partition(words)
        end = between[: between.find(block.closed) + len(block.closed)]
        rest = between[len(end) :]
        space = rest[: len(rest) - len(rest.lstrip())]
        is_known = found and block.closed in end and text.startswith(prompt)
        return end + space if is_known else block.usual_end


def _without_block(block: Block, answer: str) -> str:
    """Return an answer without the think block, whole or only its end, that it begins with."""
    answer = answer.lstrip()
    if answer.startswith((block.opened, block.closed)) or block.closed in answer:
        answer = answer.partition(block.closed)[2]
    return answer.lstrip()


def split_reasoning(message: Message) -> Thought:
    """Return an answer's reasoning, also if its content has it, and the answer itself."""
    if message.reasoning is None and THOUGHT_END in message.content:
        return split_thought(message.content)
    return Thought((message.reasoning or "").strip(), message.content)
