"""What becomes of an answer's reasoning under a chat template. Tokenizes nothing.

Some templates end the prompt inside a think block (DeepSeek R1's distills, Nemotron 3, Qwen 3.5):
the model is to write its reasoning, close the block and answer. Others end it after an empty block
(Gemma 4, DeepSeek V3.2 without thinking). Not all of them write such an answer in a conversation;
then its text is put together here: the prompt, the reasoning, the end of the block, and the answer
as the template writes it.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sft_play.data.rows import Json, Message, Row
from sft_play.data.template_checks import THOUGHT_END, Thought, split_thought
from sft_play.data.templates import ChatTemplate, RenderError


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
            if prompt.endswith(block.opened):
                return self._write_in_opened(block, asked)
            if prompt.endswith(block.closed):
                return self._write_after_closed(block, asked)
        return None

    def _write_in_opened(self, block: Block, asked: AskedAnswer) -> str | None:
        """Return the prompt, the reasoning, the end of the block and the answer."""
        if not asked.reasoning and self._reasoning == "keep":
            switch = self._find_switch(False, asked)
            raise RenderError(
                "the chat template opens a think block before an answer, and messages"
                f"[{asked.index}] has no reasoning; DATA_REASONING=empty trains an empty block"
                + (f", {switch} none" if switch else "")
            )
        before = asked.prompt.rstrip().removesuffix(block.opened).rstrip()
        if not asked.text.startswith(before):
            return None
        answer = _without_block(block, asked.text[len(before) :])
        return asked.prompt + asked.reasoning + self._find_block_end(block, asked) + answer

    def _write_after_closed(self, block: Block, asked: AskedAnswer) -> str | None:
        """Return the prompt with its empty block, and the answer, which has none."""
        if asked.reasoning:
            switch = self._find_switch(True, asked)
            raise RenderError(
                "the chat template closes the think block in the prompt, and the row has "
                f"reasoning; {f'{switch} trains it, ' if switch else ''}DATA_REASONING=drop "
                "leaves it out"
            )
        before = asked.prompt.rstrip().removesuffix(block.closed).rstrip()
        before = before.removesuffix(block.opened).rstrip()
        if not asked.text.startswith(before):
            return None
        return asked.prompt + _without_block(block, asked.text[len(before) :])

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
