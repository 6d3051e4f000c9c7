"""What becomes of an answer's reasoning under a chat template. Tokenizes nothing.

Some templates end the prompt inside a think block (DeepSeek R1's distills, Nemotron 3, Qwen 3.5):
the model is to write its reasoning, close the block and answer. Not all of them write such an
answer in a conversation; then its text is put together here: the prompt, the reasoning, the end of
the block, and the answer as the template writes it.
"""

from dataclasses import replace
from os.path import commonprefix
from typing import Literal

from sft_play.data.rows import Json, Message, Row
from sft_play.data.template_checks import split_thought
from sft_play.data.templates import ChatTemplate, RenderError

OPENED, CLOSED = "<think>", "</think>"
USUAL_END = "\n</think>\n\n"  # of a block, as DeepSeek R1 and Qwen write it
PROBE = "Reasoning1Of1"  # words that no template writes by itself


class ThoughtPolicy:
    """Applies `data.reasoning` to rows, and finds answers behind an opened think block."""

    def __init__(self, template: ChatTemplate, reasoning: Literal["keep", "drop", "empty"]):
        self._template = template
        self._reasoning = reasoning

    def applied(self, row: Row) -> Row:
        """Return a row, under `drop` without any reasoning."""
        if self._reasoning != "drop":
            return row
        return replace(row, messages=tuple(map(without_reasoning, row.messages)))

    def opened(
        self, row: Row, messages: list[Json], index: int, prompt: str, text: str
    ) -> str | None:
        """Return the text of an answer whose prompt ends inside a think block, None where not.

        Raises: RenderError for an answer without reasoning where none is to be put in its place.
        """
        if not prompt.rstrip().endswith(OPENED):
            return _refuse_closed(row.messages[index], prompt, text)
        reasoning, _ = thought_of(row.messages[index])
        if not reasoning and self._reasoning == "keep":
            raise RenderError(
                "the chat template opens a think block before an answer, and messages"
                f"[{index}] has no reasoning; DATA_REASONING=empty trains an empty block, or "
                "MODEL_TEMPLATE_KWARGS='{enable_thinking: false}' where the template has that"
            )
        answer = text[len(commonprefix((prompt, text))) :]  # noqa: RUF071 - of texts, not of paths
        written = answer.partition(CLOSED)[2] if CLOSED in answer else answer
        return prompt + reasoning + self._block_end(row, messages, index) + written.lstrip()

    def _block_end(self, row: Row, messages: list[Json], index: int) -> str:
        """Return how the template ends a think block, asked with words of our own."""
        asked = {**messages[index], "content": f"Answer{PROBE}", "reasoning_content": PROBE}
        prompt = self._template.render_prompt(messages[:index], row.tools)
        text = self._template.render_conversation([*messages[:index], asked], row.tools).text
        after = text[len(prompt) :].partition(PROBE)[2]
        end, found, _ = after.partition(f"Answer{PROBE}")
        return end if found and CLOSED in end and text.startswith(prompt) else USUAL_END


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


def _refuse_closed(message: Message, prompt: str, text: str) -> None:
    """Raise RenderError for reasoning where the prompt has closed the think block already."""
    if thought_of(message)[0] and prompt.rstrip().endswith(CLOSED):
        raise RenderError(
            "the chat template closes the think block in the prompt, and the row has reasoning; "
            "MODEL_TEMPLATE_KWARGS='{enable_thinking: true}' trains it, DATA_REASONING=drop "
            "leaves it out"
        )
