"""Reasoning before an answer: its place in a row, and how a chat template handles it.

A row has it as a field of the message, or within the content, after marks like <think>. A
template reads it as a field, as a part of the content (Mistral), only between marks that it writes
itself, or not at all. In the last case it is written into the content, as in most data sets.

Some templates end the prompt inside a think block (DeepSeek R1's distills, Nemotron 3, Qwen 3.5):
the model has to write its reasoning, close the block and answer. Others end it after an empty block
(Gemma 4, DeepSeek V3.2 without thinking). Not all of them can write such an answer in a
conversation. In this case the text is composed here: the prompt, the reasoning, the end of the
block, and the answer as the template writes it.
"""

import contextlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from sft_play.data.rows import FORMS, Json, Message, Notes, Row
from sft_play.data.templates import REASONING_FIELDS, ChatTemplate, RenderError

Reasoning = Literal["keep", "drop", "empty"]  # data.reasoning
THOUGHT_END = "</think>"
# The end of reasoning that started in its author's prompt, as in DeepSeek R1's
ENDED_THOUGHT = re.compile(r"</think>[ \t]*\n[ \t]*\n+")
CODE_FENCE = "```"
PROBE = "Reasoning1Of1"  # words that no template contains
PROBE_ANSWER = "Answer1Of1"
QUESTION = {"role": "user", "content": "Question1Of1"}
AS_CONTENT = (
    "reasoning is written into the answer, as <think>, as the chat template writes no field of it; "
    "DATA_REASONING=drop leaves it out"
)
AS_MARKS = (
    "reasoning is written between the marks {marks}, though the chat template leaves it out; "
    "DATA_REASONING=drop leaves it out, too"
)
AS_IT_STANDS = (
    "reasoning within answers is trained as it stands there; the chat template writes a field "
    "reasoning_content with other line breaks"
)


class Thought(NamedTuple):
    """An answer's reasoning, and the answer without it."""

    reasoning: str
    answer: str


class ThinkBlock(NamedTuple):
    """The marks of a think block, and its usual start and end."""

    opened: str
    closed: str
    usual_end: str
    usual_start: str = ""

    def write(self, reasoning: str) -> str:
        """Return reasoning between the marks."""
        return f"{self.opened}{self.usual_start}{reasoning}{self.usual_end}"


BLOCKS = tuple(ThinkBlock(**facts) for facts in FORMS["blocks"])
THINK = BLOCKS[0]
OPENED = tuple(block.opened for block in BLOCKS)
CLOSED = tuple(block.closed for block in BLOCKS)
_any_closed = re.compile("|".join(map(re.escape, CLOSED)))
# Variables that turn thinking off or on, with their values
SWITCHES = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning_effort": ("no_think", "high"),  # of Hy3
}


def find_thought(content: str) -> Thought | None:
    """Return the reasoning at the start of a content and its answer; None if it has none.

    An answer that quotes the marks, in words or in code, has no reasoning.
    """
    begun = content.lstrip()
    for block in BLOCKS:
        if begun.startswith(block.opened):
            reasoning, closed, answer = begun.removeprefix(block.opened).partition(block.closed)
            return Thought(reasoning.strip(), answer.lstrip("\n")) if closed else None
    before, *after = ENDED_THOUGHT.split(content)
    is_quoted = before.count(CODE_FENCE) % 2 or "<think>" in content
    if is_quoted or len(after) != 1 or not before.strip():
        return None
    return Thought(before.strip(), after[0])


def split_reasoning(message: Message) -> Thought:
    """Return an answer's reasoning, also from its content, and the answer without it."""
    given = Thought((message.reasoning or "").strip(), message.content)
    thought = find_thought(message.content) if _any_closed.search(message.content) else None
    if thought and message.reasoning is not None and thought.reasoning != given.reasoning:
        return given
    return thought or given


@dataclass(frozen=True)
class AskedAnswer:
    """An answer: its row, its prompt, and the text of the conversation including the answer."""

    row: Row
    messages: list[Json]  # of the row, as templates read them
    index: int  # of the answer
    prompt: str
    text: str

    @property
    def reasoning(self) -> str:
        return (self.row.messages[self.index].reasoning or "").strip()

    def render(self, template: ChatTemplate, **changes: str) -> tuple[str, str]:
        """Return prompt and text under a template, with changed fields of the answer."""
        answer = {**self.messages[self.index], **changes}
        return template.render_both([*self.messages[: self.index], answer], self.row.tools)


def _find_block(prompt: str) -> ThinkBlock | None:
    """Return the think block at the end of a prompt, open or closed."""
    ends = prompt.rstrip().endswith
    return next((block for block in BLOCKS if ends((block.opened, block.closed))), None)


def _strip_block(asked: AskedAnswer) -> str | None:
    """Return an answer without the think block at the end of its prompt; None if not found."""
    before, block = asked.prompt, _find_block(asked.prompt)
    if block is not None:
        before = before.rstrip().removesuffix(block.closed).rstrip()
        before = before.removesuffix(block.opened).rstrip()
    if not asked.text.startswith(before):
        return None
    answer = asked.text[len(before) :]
    if block is None:
        return answer
    if block.closed in answer:
        return answer.partition(block.closed)[2].lstrip()
    return answer.lstrip().removeprefix(block.opened).lstrip()


class _Form(NamedTuple):
    """How a template handles reasoning."""

    kind: Literal["field", "content", "marks"]
    block: ThinkBlock = THINK
    takes_content: bool = False  # it writes reasoning within a content unchanged


class ThoughtPolicy:
    """Applies `data.reasoning` to rows, and finds answers after think blocks of the prompt."""

    def __init__(self, template: ChatTemplate, reasoning: Reasoning):
        self._template = template
        self._reasoning = reasoning

    def apply(self, row: Row) -> tuple[Row, Notes]:
        """Return a row with its reasoning if the template supports it, and notes.

        Under `drop` the reasoning is removed.
        """
        messages = list(row.messages)
        notes: dict[str, None] = {}
        for index, message in enumerate(row.messages):
            if message.role != "assistant":
                continue
            if message.reasoning is None and not _any_closed.search(message.content):
                continue
            thought = split_reasoning(message)
            if self._reasoning == "drop":
                # a field keeps templates from looking for reasoning in an answer that quotes marks
                field = "" if THOUGHT_END in thought.answer else None
                messages[index] = replace(message, reasoning=field, content=thought.answer)
                continue
            messages[index] = moved = self._move(message, thought)
            if thought.reasoning and moved.reasoning is None:
                if self._form.takes_content:
                    notes[AS_IT_STANDS] = None
                elif message.reasoning:
                    notes[AS_CONTENT] = None
        if messages != [*row.messages]:
            row = replace(row, messages=tuple(messages))
        return row, tuple(notes)

    def _move(self, message: Message, thought: Thought) -> Message:
        """Return an answer with its reasoning in the place that the template reads."""
        is_inside = thought.answer != message.content
        if message.reasoning is None and not is_inside:  # it quotes the marks of reasoning
            return replace(message, reasoning="")
        is_content = self._form.kind == "content"
        begins = is_inside and message.content.lstrip().startswith(THINK.opened)
        if begins and (is_content or self._form.takes_content):
            return replace(message, reasoning=None)
        if is_content and thought.reasoning:
            content = THINK.write(thought.reasoning) + thought.answer
            return replace(message, reasoning=None, content=content)
        if is_content or not is_inside:
            return message
        return replace(message, reasoning=thought.reasoning, content=thought.answer)

    @cached_property
    def _form(self) -> _Form:
        """How the template handles reasoning, determined with test words."""
        fields = dict.fromkeys(REASONING_FIELDS, PROBE)
        inside = THINK.write(PROBE) + PROBE_ANSWER
        contents: list[Json] = [{"content": PROBE_ANSWER}, {"content": inside}]
        answers = [*contents, {**contents[0], **fields}]
        try:
            prompt = self._template.render_prompt([QUESTION])
            plain, within, text = (
                self._template.render_conversation([QUESTION, {"role": "assistant", **answer}])
                for answer in answers
            )
        except RenderError:
            return _Form("field")
        is_verbatim = within.startswith(prompt + inside)
        if prompt.rstrip().endswith((*OPENED, *CLOSED)):
            return _Form("field")
        if PROBE in text:
            return _Form(
                "field", takes_content=is_verbatim and THINK.opened in text and within != text
            )
        answer_text = plain.removeprefix(prompt)
        for block in BLOCKS:
            if answer_text.startswith(block.opened + block.closed):  # empty, without line breaks
                return _Form("marks", ThinkBlock(block.opened, block.closed, block.closed))
            if block is not THINK and block.opened in self._template.jinja:
                return _Form("marks", block)
        return _Form("content" if inside in within else "field")

    def write_text(self, asked: AskedAnswer) -> tuple[str, Notes] | None:
        """Return the text of an answer, put together, and what to say of it.

        That is the prompt of use, then what the model is to write after it: in the think block that
        the prompt opens or has closed, else between the marks of the template. If the text does not
        begin with the prompt, because the template changes or omits what is before the answer, it
        has the answer as the template writes it after a question. None if no text has the answer
        after a prompt, or the template has no marks for its reasoning.

        Raises: RenderError for an answer without reasoning if none is to be put in its place, and
        for one with reasoning after a closed block.
        """
        block = _find_block(asked.prompt)
        is_open = block is not None and asked.prompt.rstrip().endswith(block.opened)
        if block is not None:
            self._refuse_other_reasoning(is_open, asked)
        source = asked
        answer = _strip_block(asked)
        alone = asked if block and answer else self._answer_alone(asked)
        if answer is None:
            answer, source = _strip_block(alone), alone
        if answer is None:
            return None
        if is_open:
            answer = asked.reasoning + self._find_block_end(block, source) + answer
        if block is not None or not asked.reasoning or asked.reasoning in answer:
            return asked.prompt + answer, ()
        # DeepSeek opens a think block after a question, and none after a result
        block = self._form.block if self._form.kind == "marks" else _find_block(alone.prompt)
        if block is None:
            return None
        rest = answer.lstrip().removeprefix(block.opened).lstrip()
        if rest.startswith(block.closed):  # an empty block
            answer = rest.removeprefix(block.closed)
        note = AS_MARKS.format(marks=f"{block.opened} and {block.closed}")
        return asked.prompt + block.write(asked.reasoning) + answer, (note,)

    def _answer_alone(self, asked: AskedAnswer) -> AskedAnswer:
        """Return an answer after a single question; `asked` if the template refuses that."""
        messages = [QUESTION, asked.messages[asked.index]]
        with contextlib.suppress(RenderError):
            prompt, text = self._template.render_both(messages, asked.row.tools)
            return replace(asked, messages=messages, index=1, prompt=prompt, text=text)
        return asked

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
        """Return the setting that turns thinking on or off, None if there is none."""
        for name, values in SWITCHES.items():
            if name not in self._template.variables_read - self._template.row_names:
                continue
            template = self._template.with_variables({name: values[on]})
            prompt, text = asked.render(template)
            end = prompt.rstrip()
            thinks = end.endswith(OPENED)
            if on and not end.endswith(CLOSED):
                has_marks = ThoughtPolicy(template, "keep")._form.kind == "marks"
                thinks = thinks or has_marks or asked.reasoning in text
            if on == thinks:
                return f"MODEL_TEMPLATE_KWARGS='{{{name}: {str(values[on]).lower()}}}'"
        return None

    def _find_block_end(self, block: ThinkBlock, asked: AskedAnswer) -> str:
        """Return how the template ends a think block, determined with test words."""
        words = f"Answer{PROBE}"
        prompt, text = asked.render(self._template, content=words, reasoning_content=PROBE)
        after = text[len(prompt) :].partition(PROBE)[2]
        between, found, _ = after.partition(words)
        end = between[: between.find(block.closed) + len(block.closed)]
        rest = between[len(end) :]
        space = rest[: len(rest) - len(rest.lstrip())]
        if found and block.closed in end and text.startswith(prompt):
            return end + space
        is_empty = text.startswith(prompt + block.closed)  # as DeepSeek V3.1 writes it
        return block.closed if is_empty else block.usual_end
