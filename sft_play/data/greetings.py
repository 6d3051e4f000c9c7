"""Conversations that the assistant begins: the first turn is context, without loss.

Some chat templates refuse such conversations or leave the turn out (Mistral, Gemma, Llama 2). Under
these the turn is left out of the row. The ledger counts both.
"""

from dataclasses import replace
from typing import Any

from sft_play.data.rows import Message, Row
from sft_play.data.templates import ChatTemplate, RenderError, template_messages

GREETING = "The first turn."  # words that no template writes by itself
PROBED = (
    Message("assistant", GREETING),
    Message("user", "A question."),
    Message("assistant", "An answer."),
)


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
