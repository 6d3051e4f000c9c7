"""What a tokenizer's chat template writes, and which tokens end an answer.

Loads no torch; tokenizes nothing.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from sft_play.data.rows import Json, Message
from sft_play.data.template_limits import limited
from sft_play.errors import DataError

# Tokens that end an answer besides the tokenizer's eos: of ChatML, Llama 3 and 4, Gemma 2 to 4,
# Phi, gpt-oss, Cohere, DeepSeek Coder, and Idefics and SmolVLM
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>"),
    *("<|end|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|EOT|>"),
    "<end_of_utterance>",
)

# For base models without a template: as ChatML, but in plain words, so that no token has to be
# added. Base models that have a beginning-of-text token (Llama, Gemma) saw it before every text;
# for others it is empty.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)

# Some templates write today's date. A run that starts before midnight, is resumed a day later and
# is used in a month must see the same prompt. So their clock is fixed at the date that Llama 3.1's
# template uses where it has no clock.
CLOCK = datetime(2024, 7, 26)

# transformers' mark of what an assistant generates
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderError(DataError):
    """A row whose trained tokens cannot be determined with certainty."""


class CharacterSpan(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


class TemplateText(NamedTuple):
    """What a template writes for a conversation.

    `generated` is what `{% generation %}` marks, None if the template has no such marks.
    """

    text: str
    generated: list[CharacterSpan] | None


class _Source(NamedTuple):
    """The Jinja text of a template, and whether it has generation marks."""

    jinja: str
    has_marks: bool

    @classmethod
    def of(cls, jinja: str) -> "_Source":
        return cls(jinja, GENERATION.search(jinja) is not None)


class ChatTemplate:
    """A tokenizer's own chat template, or DEFAULT_TEMPLATE, with a fixed clock."""

    def __init__(self, tokenizer: Any):
        default = None if tokenizer.chat_template else DEFAULT_TEMPLATE
        self._plain = _Source.of(tokenizer.get_chat_template(default, tools=None))
        # some tokenizers have a second template, for conversations with tools
        self._with_tools = _Source.of(tokenizer.get_chat_template(default, tools=[{}]))
        self._variables = {**tokenizer.special_tokens_map, "strftime_now": CLOCK.strftime}

    @property
    def jinja(self) -> str:
        """The text of the template for conversations without tools."""
        return self._plain.jinja

    def with_variable(self, name: str, value: Any) -> Self:
        """Return the template with another value of one of its variables."""
        changed = copy.copy(self)
        changed._variables = {**self._variables, name: value}
        return changed

    def render_prompt(self, messages: list[Json], tools: Sequence[Json] = ()) -> str:
        """Return the text that asks the model for the next answer. Raises RenderError."""
        return self._render(messages, tools, add_generation_prompt=True).text

    def render_conversation(self, messages: list[Json], tools: Sequence[Json] = ()) -> TemplateText:
        """Return the text of a conversation with its generation marks. Raises RenderError."""
        return self._render(messages, tools, add_generation_prompt=False)

    def _render(
        self,
        messages: list[Json],
        tools: Sequence[Json],
        add_generation_prompt: bool,
    ) -> TemplateText:
        try:
            with limited():
                return self._run(messages, tools, add_generation_prompt)
        except RenderError as error:
            has_calls = any("tool_calls" in message for message in messages)
            if not (has_calls and isinstance(error.__cause__, TypeError)):
                raise
        # DeepSeek's template concatenates the arguments of calls with text
        messages = [_with_json_arguments(message) for message in messages]
        with limited():
            return self._run(messages, tools, add_generation_prompt)

    def _run(
        self,
        messages: list[Json],
        tools: Sequence[Json],
        add_generation_prompt: bool,
    ) -> TemplateText:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._with_tools if tools else self._plain
        has_marks = source.has_marks and not add_generation_prompt
        try:
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=list(tools) or None,
                chat_template=source.jinja,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        # a template may fail in any of these ways
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RenderError(f"the chat template refuses the conversation: {error}") from error
        if not has_marks:
            return TemplateText(texts[0], None)
        return TemplateText(texts[0], [CharacterSpan(*span) for span in marks[0]])


def template_of(tokenizer: Any) -> str:
    """Return the chat template in force, several by name as JSON: the tokenizer's own or ours."""
    own = tokenizer.chat_template or DEFAULT_TEMPLATE
    return own if isinstance(own, str) else json.dumps(own, sort_keys=True)


def template_messages(messages: Sequence[Message]) -> list[Json]:
    """Return messages as transformers' templates read them; absent fields have no key."""
    return [_template_message(message) for message in messages]


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: eos, and the end-of-turn tokens that the tokenizer has."""
    known: dict[str, int] = {}
    # not by get_vocab, which copies the whole vocabulary
    ids = tokenizer.convert_tokens_to_ids(list(TURN_ENDS))
    for token, token_id in zip(TURN_ENDS, ids, strict=True):
        if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == token:
            known[token] = token_id
    if "<|return|>" in known:
        known.pop("<|end|>", None)  # gpt-oss ends parts of an answer with it
    return {tokenizer.eos_token_id, *known.values()}


def decode_arguments(arguments: Any) -> Any:
    """Return the value of arguments that may be JSON text.

    OpenAI's API writes arguments as text; transformers' templates expect an object.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # not JSON: the template may write it unchanged


def iterate_strings(value: Any) -> Iterator[str]:
    """Yield all texts and keys in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from iterate_strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from iterate_strings(inner)


def _template_message(message: Message) -> Json:
    fields: Json = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning  # Qwen, GLM
        fields["thinking"] = message.reasoning  # gpt-oss
    if message.tool_calls:
        fields["tool_calls"] = [
            _map_arguments(call, decode_arguments) for call in message.tool_calls
        ]
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _with_json_arguments(message: Json) -> Json:
    if "tool_calls" not in message:
        return message
    calls = [_map_arguments(call, _encode_arguments) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _encode_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _map_arguments(call: Json, change: Callable[[Any], Any]) -> Json:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}
