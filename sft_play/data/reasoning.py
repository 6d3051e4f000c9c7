"""What becomes of an answer's reasoning under a chat template. Tokenizes nothing.

Some templates end the prompt inside a think block (DeepSeek R1's distills, Nemotron 3, Qwen 3.5):
the model is to write its reasoning, close the block and answer. Others end it behind an empty block
(Gemma 4, DeepSeek V3.2 without thinking). Not all of them write such an answer in a conversation;
then its text is put together here: the prompt, the reasoning, the end of the block, and the answer
as the template writes it.
"""

import re
from dataclasses import replace
from typing import Literal, NamedTuple

from sft_play.data.rows import Json, Message, Row
from sft_play.data.template_checks import split_thought
from sft_play.data.templates import ChatTemplate, RenderError


class Block(NamedTuple):
    """The marks of a think block, and how one usually ends where the template does not say."""

    opened: str
    closed: str
    usual_end: str


CLOSED = "</think>"
BLOCKS = (
    Block("<think>", CLOSED, "\n</think>\n\n"),  # DeepSeek R1, Qwen, GLM, MiniMax
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


class ThoughtPolicy:
    """Applies `data.reasoning` to rows, and finds answers behind think blocks of the prompt."""

    def __init__(self, template: ChatTemplate, reasoning: Literal["keep", "drop", "empty"]):
        self._template = template
        self._reasoning = reasoning

    def applied(self, row: Row) -> Row:
        """Return a row, under `drop` without any reasoning."""
        if self._reasoning != "drop":
            return row
        return replace(row, messages=tuple(map(without_reasoning, row.messages)))

    def behind_block(
        self, row: Row, messages: list[Json], index: int, prompt: str, text: str
    ) -> str | None:
        """Return the text of an answer whose prompt ends in a think block, None where it does not.

        The text is put together where the conversation has another one: the prompt of use, then
        what the model is to write behind it.

        Raises: RenderError for an answer without reasoning where none is to be put in its place,
        and for one with reasoning behind a closed block.
        """
        for block in BLOCKS:
            if prompt.rstrip().endswith(block.opened):
                return self._behind_opened(block, row, messages, index, prompt, text)
            if prompt.rstrip().endswith(block.closed):
                return self._behind_closed(block, row, messages, index, prompt, text)
        return None

    def _behind_opened(
        self, block: Block, row: Row, messages: list[Json], index: int, prompt: str, text: str
    ) -> str | None:
        """Return the prompt, the reasoning, the end of the block and the answer."""
        reasoning, _ = thought_of(row.messages[index])
        if not reasoning and self._reasoning == "keep":
            switch = self._switch(False, row, messages, index)
            raise RenderError(
                "the chat template opens a think block before an answer, and messages"
                f"[{index}] has no reasoning; DATA_REASONING=empty trains an empty block"
                + (f", {switch} none" if switch else "")
            )
        before = prompt.rstrip().removesuffix(block.opened).rstrip()
        if not text.startswith(before):
            return None
        answer = _without_block(block, text[len(before) :])
        return prompt + reasoning + self._block_end(block, row, messages, index) + answer

    def _behind_closed(
        self, block: Block, row: Row, messages: list[Json], index: int, prompt: str, text: str
    ) -> str | None:
        """Return the prompt with its empty block, and the answer, which has none."""
        if thought_of(row.messages[index])[0]:
            switch = self._switch(True, row, messages, index)
            raise RenderError(
                "the chat template closes the think block in the prompt, and the row has "
                f"reasoning; {f'{switch} trains it, ' if switch else ''}DATA_REASONING=drop "
                "leaves it out"
            )
        before = prompt.rstrip().removesuffix(block.closed).rstrip()
        before = before.removesuffix(block.opened).rstrip()
        if not text.startswith(before):
            return None
        return prompt + _without_block(block, text[len(before) :])

    def _switch(self, on: bool, row: Row, messages: list[Json], index: int) -> str | None:
        """Return the setting by which the model thinks, or does not; None where none is found."""
        for name, pattern in SWITCHES:
            if not pattern.search(self._template.jinja):
                continue
            template = self._template.with_variable(name, on)
            prompt = template.render_prompt(messages[:index], row.tools).rstrip()
            text = template.render_conversation(messages[: index + 1], row.tools).text
            thinks = prompt.endswith(tuple(block.opened for block in BLOCKS))
            reasoning, _ = thought_of(row.messages[index])
            if on == (thinks or (on and reasoning in text)):
                return f"MODEL_TEMPLATE_KWARGS='{{{name}: {str(on).lower()}}}'"
        return None

    def _block_end(self, block: Block, row: Row, messages: list[Json], index: int) -> str:
        """Return how the template ends a think block, asked with words of our own."""
        asked = {**messages[index], "content": f"Answer{PROBE}", "reasoning_content": PROBE}
        prompt = self._template.render_prompt(messages[:index], row.tools)
        text = self._template.render_conversation([*messages[:index], asked], row.tools).text
        after = text[len(prompt) :].partition(PROBE)[2]
        found = after.partition(f"Answer{PROBE}")
        end = found[0][: found[0].find(block.closed) + len(block.closed)]
        rest = found[0][len(end) :]
        space = rest[: len(rest) - len(rest.lstrip())]
        is_known = found[1] and block.closed in end and text.startswith(prompt)
        return end + space if is_known else block.usual_end


def _without_block(block: Block, answer: str) -> str:
    """Return an answer without the think block, whole or only its end, that it begins with."""
    answer = answer.lstrip()
    if answer.startswith((block.opened, block.closed)) or block.closed in answer:
        answer = answer.partition(block.closed)[2]
    return answer.lstrip()


def thought_of(message: Message) -> tuple[str, str]:
    """Return an answer's reasoning, also where its content holds it, and the answer itself."""
    if message.reasoning is None and CLOSED in message.content:
        return split_thought(message.content)
    return (message.reasoning or "").strip(), message.content


def without_reasoning(message: Message) -> Message:
    """Return a message without its reasoning."""
    if message.role != "assistant":
        return message
    _, answer = thought_of(message)
    return replace(message, reasoning=None, content=answer)
