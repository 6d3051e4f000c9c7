"""What a tokenizer's chat template writes for a conversation, and which tokens end an answer. Loads no torch; tokenises nothing."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sft_play.data.rows import Message
from sft_play.errors import DataError

# Tokens that end an answer where a tokenizer has them, besides its eos: of ChatML, Llama 3 and 4, Gemma 2 to 4, Phi, gpt-oss, Cohere and DeepSeek Coder.
TURN_ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|end_of_text|>",
    ),
    *("<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<|EOT|>"),
)

# For base models that bring no template: ChatML's shape, in plain words so that no token needs to be new. Base models that
# have a token for the beginning (Llama, Gemma) saw it before every text; others render it as nothing.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)

# Some templates write today's date. A run that starts before midnight, is resumed a day later and is used in a month must see one
# prompt, so their clock stands still, on the date that Llama 3.1's template itself writes where it finds no clock.
CLOCK = datetime(2024, 7, 26)

GENERATION = re.compile(
    r"\{%-?\s*generation\s*-?%\}"
)  # transformers' mark of what an assistant generates


class RenderError(DataError):
    """A row whose trained span cannot be proven."""


class ChatTemplate:
    """A tokenizer's chat template, unedited, with its clock stopped; DEFAULT_TEMPLATE where it has none."""

    def __init__(self, tokenizer: Any):
        own = None if tokenizer.chat_template else DEFAULT_TEMPLATE
        # some tokenizers have two, the other for conversations with tools
        self._source = {
            with_tools: tokenizer.get_chat_template(own, tools=[{}] if with_tools else None)
            for with_tools in (False, True)
        }
        self._is_marked = {
            with_tools: GENERATION.search(source) is not None
            for with_tools, source in self._source.items()
        }
        self._words = {**tokenizer.special_tokens_map, "strftime_now": CLOCK.strftime}

    def prompt(self, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text that asks the model for the next answer. Raises RenderError."""
        return self._render(turns, tools, add_generation_prompt=True)[0]

    def answered(
        self, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text of a conversation, and the spans of it that `{% generation %}` marks; None without such marks. Raises RenderError."""
        return self._render(turns, tools, add_generation_prompt=False)

    def _render(
        self,
        turns: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        try:
            return self._run(turns, tools, add_generation_prompt)
        except RenderError as error:
            if not (
                isinstance(error.__cause__, TypeError)
                and any("tool_calls" in turn for turn in turns)
            ):
                raise
        return self._run(
            [_with_json_arguments(turn) for turn in turns], tools, add_generation_prompt
        )  # DeepSeek's adds them to a text

    def _run(
        self,
        turns: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._source[bool(tools)]
        is_marked = self._is_marked[bool(tools)] and not add_generation_prompt
        try:
            (text,), marks = render_jinja_template(
                conversations=[turns],
                tools=list(tools) or None,
                chat_template=source,
                return_assistant_tokens_mask=is_marked,
                add_generation_prompt=add_generation_prompt,
                **self._words,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:  # a template is a program of others
            raise RenderError(f"the chat template refuses the conversation: {error}") from error
        return text, marks[0] if is_marked else None


def template_of(tokenizer: Any) -> str:
    """Return the chat template in force: the tokenizer's own, else the default one."""
    return tokenizer.chat_template or DEFAULT_TEMPLATE


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages under the names that transformers' templates read; what a message lacks has no key."""
    return [_turn(message) for message in messages]


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: eos, and the end-of-turn token of templates that have their own."""
    # not by get_vocab: it copies the whole vocabulary
    found = zip(TURN_ENDS, tokenizer.convert_tokens_to_ids(list(TURN_ENDS)), strict=True)
    known = {
        token: number
        for token, number in found
        if number is not None and tokenizer.convert_ids_to_tokens(number) == token
    }
    if "<|return|>" in known:
        known.pop("<|end|>", None)  # gpt-oss ends a part of an answer with it, not the answer
    return {tokenizer.eos_token_id, *known.values()}


def as_object(arguments: Any) -> Any:
    """Return JSON text as what it says: OpenAI's API writes arguments as text, transformers' templates expect an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # a template may still write it as it is


def strings_in(value: Any) -> Iterator[str]:
    """Yield the texts and keys within JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from strings_in(inner)


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = turn["thinking"] = message.reasoning  # Qwen, GLM; gpt-oss
    if message.tool_calls:
        turn["tool_calls"] = [_with_arguments(call, as_object) for call in message.tool_calls]
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _with_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _with_json_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return turn
    return {**turn, "tool_calls": [_with_arguments(call, _as_text) for call in turn["tool_calls"]]}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
