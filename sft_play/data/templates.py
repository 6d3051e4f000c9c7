"""Render a tokenizer's chat template, and find the tokens that end an answer.

Templates are compiled here, without transformers, as transformers compiles them. Loads no torch;
tokenizes nothing.
"""

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, Self

from sft_play.data.calls import with_short_ids
from sft_play.data.limits import TEMPLATE_REMEDY
from sft_play.data.rows import ImageFile, Json, Message, Records
from sft_play.errors import DataError

MAX_REFUSED = 1000  # characters of a template's error message about a row
MAX_CHARACTERS = 1 << 16  # the longest template of a known model has 20,000
# Tokens that end an answer besides the tokenizer's eos: of ChatML, Llama 3 and 4, Gemma 2 to 4,
# Phi, gpt-oss, Cohere, DeepSeek Coder, and Idefics and SmolVLM
TURN_ENDS = tuple(
    """
    <|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <end_of_turn> <turn|> <|end|> <|end_of_text|>
    <|return|> <|call|> <|END_OF_TURN_TOKEN|> <|EOT|> <end_of_utterance>
    """.split()
)
# Some models end a part of an answer with one of these: gpt-oss, Muse Glimmer and Solar Open
PART_ENDS = {"<|end|>", "<|eom|>"}
# For base models without a template: as ChatML, but in plain words, so that no token has to be
# added. Base models with a beginning-of-text token (Llama, Gemma) saw it before every text;
# for others it is empty.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '### Tools:\n' + tools | tojson + '\n\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['tool_calls'] %}{% if message['content'] %}{{ '\n' }}{% endif %}"
    "{{ '### Calls:\n' }}{% for call in message['tool_calls'] %}"
    "{% if not loop.first %}{{ '\n' }}{% endif %}{{ call['function'] | tojson }}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
# Some templates write today's date. A run that starts before midnight, resumes a day later and
# is used in a month must see the same prompt. The clock is therefore fixed at the date that Llama
# 3.1's template uses if it has no clock.
CLOCK = datetime(2024, 7, 26)
# A template's error message that requires ids of calls
WANTS_IDS = re.compile(r"(?i)\bids?\b|tool_call_id")
BASE_STOPS = "base_stops"  # attribute of a tokenizer: tokens that end answers, by its base's files
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # Qwen and GLM, gpt-oss, Solar
# What transformers passes to every template, in addition to special tokens and Jinja's functions
ALWAYS_GIVEN = frozenset(("messages", "tools", "add_generation_prompt", "raise_exception"))
# Errors that the Python code in a template may raise
PYTHON_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
TOO_DEEP = (RecursionError, SyntaxError)  # Python cannot compile blocks that are nested so deeply
SPECIAL_TOKEN = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask)_token")


class RenderError(DataError):
    """A row whose trained tokens cannot be determined with certainty."""


@functools.cache
def _names_read(jinja: str) -> frozenset[str]:
    """Return the names that a template reads without setting them first."""
    from jinja2 import TemplateError, nodes

    environment = _environment()
    try:
        tree = environment.parse(jinja)
    except (TemplateError, RecursionError):  # rendering reports the error
        return frozenset()
    read: set[str] = set()
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    _collect_read(tree.body, macros | environment.globals.keys(), read)
    return frozenset(name for name in read if not SPECIAL_TOKEN.fullmatch(name))


def _collect_read(body: Sequence[Any], known: set[str], read: set[str]) -> None:
    """Add names that are read before they are set; `known` is extended by those set."""
    from jinja2 import nodes

    def add(*parts: Any) -> None:
        for part in parts:
            names = [part] if isinstance(part, nodes.Name) else part.find_all(nodes.Name)
            read.update(
                name.name for name in names if name.ctx == "load" and name.name not in known
            )

    for node in body:
        bound = {name.name for name in node.iter_child_nodes() if _is_stored(name)}
        if isinstance(node, nodes.If):
            branches = [node.body, *(branch.body for branch in node.elif_), node.else_]
            add(node.test, *(branch.test for branch in node.elif_))
            ends = []
            for branch in branches:
                ends.append(set(known))
                _collect_read(branch, ends[-1], read)
            known |= set.intersection(*ends)
        elif isinstance(node, nodes.For):
            add(node.iter)
            inner = known | {name.name for name in node.find_all(nodes.Name) if _is_stored(name)}
            _collect_read(node.body, inner | {"loop"}, read)
            _collect_read(node.else_, set(known), read)
        elif hasattr(node, "body"):  # a macro, a block that is set or filtered
            _collect_read(node.body, known | bound, read)
            known |= {node.name} if isinstance(node, nodes.Macro) else bound
        else:
            add(node)
            known |= bound


def _is_stored(node: Any) -> bool:
    return getattr(node, "ctx", None) in ("store", "param") and hasattr(node, "name")


class ChatTemplate:
    """A tokenizer's chat template, or DEFAULT_TEMPLATE, with a fixed clock."""

    def __init__(self, tokenizer: Any):
        default = None if tokenizer.chat_template else DEFAULT_TEMPLATE
        self.jinja: str = tokenizer.get_chat_template(default, tools=None)
        # some tokenizers have a second template for conversations with tools
        self._with_tools = tokenizer.get_chat_template(default, tools=[{}])
        self._variables = dict(tokenizer.special_tokens_map)
        self.row_names: frozenset[str] = frozenset()  # of variables in a row

    def with_variables(self, values: Mapping[str, Any]) -> Self:
        """Return the template with other values of some of its variables."""
        changed = copy.copy(self)
        changed._variables = {**self._variables, **values}
        return changed

    def for_row(self, variables: Json | None) -> Self:
        """Return the template with those of a row's variables that it reads."""
        names = self.variables_read.intersection(variables) if variables else None
        if not names:
            return self
        template = self.with_variables({name: variables[name] for name in names})
        template.row_names = names
        return template

    @property
    def variables_read(self) -> frozenset[str]:
        """The names of the variables that the template reads, except those of every template."""
        return (_names_read(self.jinja) | _names_read(self._with_tools)) - ALWAYS_GIVEN

    def render_prompt(self, messages: list[Json], tools: Records = ()) -> str:
        """Return the prompt text for the model's next answer. Raises RenderError."""
        return self.render_conversation(messages, tools, is_prompt=True)

    def render_conversation(
        self, messages: list[Json], tools: Records = (), is_prompt: bool = False
    ) -> str:
        """Return the text of a conversation, or of the prompt after it. Raises RenderError."""
        jinja = self._with_tools if tools else self.jinja
        try:
            text = render_template(jinja, messages, self._variables, tools, is_prompt)
        except RenderError as error:
            if not any("tool_calls" in message for message in messages):
                raise
            if isinstance(error.__cause__, TypeError):  # DeepSeek's adds text to arguments
                messages = [_with_json_arguments(message) for message in messages]
            elif WANTS_IDS.search(str(error)):  # as Mistral's does
                messages = with_short_ids(messages)
            else:
                raise
            text = render_template(jinja, messages, self._variables, tools, is_prompt)
        has_images = list in map(type, map(itemgetter("content"), messages))
        return write_images(text, messages) if has_images else text

    def render_both(self, messages: list[Json], tools: Records = ()) -> tuple[str, str]:
        """Return the prompt that the last message answers, and the text including the answer."""
        prompt = self.render_conversation(messages[:-1], tools, is_prompt=True)
        return prompt, self.render_conversation(messages, tools)


def write_images(written: str, messages: Records) -> str:
    """Return a template's output with the text of each image in place of its token.

    Raises: RenderError if the template omits images.
    """
    images: list[ImageFile] = []
    for message in messages:
        if isinstance(message["content"], list):
            images += (part["image"] for part in message["content"] if part["type"] == "image")
    if not images or not images[0].token:  # the second: an estimate without the model's processor
        return written
    text, *pieces = written.split(images[0].token)
    if len(pieces) != len(images):
        raise RenderError(
            f"the chat template writes {images[0].token} {len(pieces)} times for {len(images)} "
            "images; set MODEL_CHAT_TEMPLATE to the one of the model's processor"
        )
    for image, piece in zip(images, pieces, strict=True):
        text += image.text + piece
    return text


def template_text(tokenizer: Any) -> str:
    """Return the active chat template, several by name as JSON: the tokenizer's or ours."""
    own = tokenizer.chat_template or DEFAULT_TEMPLATE
    return own if isinstance(own, str) else json.dumps(own, sort_keys=True)


def template_messages(messages: Sequence[Message]) -> list[Json]:
    """Return messages as transformers' templates read them; absent fields have no key."""
    read: list[Json] = []
    for message in messages:
        content = message.parts if message.images else message.content
        given: Json = {"role": message.role, "content": content}
        if message.reasoning is not None:
            for name in REASONING_FIELDS:
                given[name] = message.reasoning
        if message.tool_calls:
            given["tool_calls"] = list(message.tool_calls)
        if message.name is not None:
            given["name"] = message.name
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        read.append(given)
    return read


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer, in training, generation and all that is saved.

    They are eos, the end-of-turn tokens that the tokenizer has, and the base's stops, which
    `load_tokenizer` has set.
    """
    named = getattr(tokenizer, BASE_STOPS, ())
    names = [*TURN_ENDS, *named]
    # not by get_vocab, which copies the entire vocabulary
    ids = tokenizer.convert_tokens_to_ids(names)
    known = {
        token: token_id
        for token, token_id in zip(names, ids, strict=True)
        if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == token
    }
    if "<|return|>" in known or not {"<|eot|>", "<|flush|>"}.isdisjoint(named):
        for part_end in PART_ENDS.difference(named):
            known.pop(part_end, None)
    return {tokenizer.eos_token_id, *known.values()}


def list_strings(value: Any) -> list[str]:
    """Return all texts and keys in a JSON value, in their order."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            for key, inner in reversed(value.items()):
                waiting += (inner, key)
        elif isinstance(value, Sequence):
            waiting += reversed(value)
    return found


def _with_json_arguments(message: Json) -> Json:
    """Return a message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def render_template(
    source: str,
    messages: Records,
    variables: Mapping[str, Any],
    tools: Records = (),
    is_prompt: bool = False,
) -> str:
    """Return a template's output for messages; `variables` include the special tokens.

    Raises: RenderError if the template refuses them, DataError for a template that may never end.
    """
    from jinja2 import TemplateError

    try:
        return _compile(source).render(
            messages=messages,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=is_prompt,
            **variables,
        )
    except DataError:  # which is a ValueError
        raise
    except (TemplateError, *PYTHON_ERRORS) as error:
        refused = f"the chat template refuses the conversation: {error}"
        raise RenderError(refused[:MAX_REFUSED]) from error
    except TOO_DEEP as error:
        raise DataError(
            f"the chat template is nested too deeply, or calls itself ({error}); {TEMPLATE_REMEDY}"
        ) from None


@functools.cache
def _compile(source: str) -> Any:
    from jinja2 import nodes

    if len(source) > MAX_CHARACTERS:
        raise DataError(
            f"the chat template has {len(source)} characters, more than {MAX_CHARACTERS}; "
            f"{TEMPLATE_REMEDY}"
        )
    environment = _environment()
    tree = environment.parse(source)
    if next(tree.find_all(nodes.Pow), None) is not None:  # compiling computes constants
        raise DataError(f"the chat template has a power (**), which may not end; {TEMPLATE_REMEDY}")
    compiled = environment.from_string(tree)
    compiled.globals = dict(compiled.globals)  # Jinja's chain of dicts is slow to copy
    return compiled


@functools.cache
def _environment() -> Any:
    """Return a Jinja environment like that of transformers, with a fixed clock."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marks(Extension):
        """transformers' `{% generation %}`, which marks the assistant's text; it is ignored."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> Any:
            """Return the nodes between the marks, in a separate scope."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        """Refuse a conversation, as a template asks."""
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment
