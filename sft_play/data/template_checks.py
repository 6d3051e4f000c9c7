"""Check what a chat template omits from a conversation, or changes. Tokenizes nothing.

A row's messages are searched in its text. Its tools and calls are not, because a number, a null
or a city may be in a text by chance. Instead, the template writes a test conversation with a
unique word in each place, once for each kind of place in the rows.

Conversations may start with an answer, which carries no loss. Some templates refuse it or omit it
(Mistral, Gemma, Llama 2): with these it is removed from the row. The ledger counts both.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from sft_play.data.rows import FORMS, Message, Notes, Row
from sft_play.data.templates import ChatTemplate, RenderError, list_strings, template_messages
from sft_play.data.thoughts import OPENED, split_reasoning

MAX_QUOTED_CHARACTERS = 24
REMEDY = "MODEL_CHAT_TEMPLATE=default writes them in plain words, or name your Jinja file"
NO_TOOLS = f"the chat template leaves out the tools, so no token has them; {REMEDY}"
QUESTION = Message("user", "Zq1Question")
ANSWER = Message("assistant", "Zq1Answer")
SYSTEM = Message("system", "Zq1System")
GREETING = Message("assistant", "Zq1Greeting")
BESIDE = "Zq1Beside"  # words next to a call
THOUGHT = "Zq1Thought"
RESULTS = ("Zq1Result", "Zq2Result")
CALL_IDS = ("Zq1Call00", "Zq2Call00")  # of nine letters and digits, as Mistral requires
NAMES = ("zq1_function", "zq2_function")
MOST_CALLS = 2  # further calls are written like the second one, or not
MOST_KINDS = 1000  # of calls that are cached, over all templates
TOOL = json.loads(
    """{
    "type": "function",
    "function": {
        "name": "zq1_tool",
        "description": "Zq1Description",
        "parameters": {
            "type": "object",
            "properties": {
                "zq1_key": {
                    "type": "string", "description": "Zq1Description", "enum": ["Zq1Choice"]
                },
                "zq2_key": {"type": "string", "default": "Zq1Default"},
                "zq3_key": {"type": "object", "properties": {"zq4_key": {"type": "string"}}}
            },
            "required": ["zq1_key"]
        }
    }
}"""
)
TOOL_WORDS = FORMS["tool_words"]
# Type and truth of an argument: its value in call 1 or 2, and how it may be written
ARGUMENTS = {
    (facts["type"], facts["is_true"]): (facts["value"], facts["written"])
    for facts in FORMS["arguments"]
}


class CallKind(NamedTuple):
    """The features of a message's calls."""

    calls: int
    arguments: tuple[tuple[str, bool], ...]  # keys of ARGUMENTS, sorted
    has_content: bool
    has_reasoning: bool
    results: int = 0  # number of results that follow


TOOL_MESSAGES = tuple(
    Message("tool", word, name=name, tool_call_id=id_)
    for word, name, id_ in zip(RESULTS, NAMES, CALL_IDS, strict=True)
)


def check_prompt(messages: Sequence[Message], prompt: str) -> None:
    """Raise RenderError unless the prompt has every message's content.

    Whitespace around a content does not count. Of earlier answers only the part after the reasoning
    is required, since templates omit reasoning from the history. Earlier tool calls may have any
    format.
    """
    position = 0
    for index, message in enumerate(messages):
        if message.tool_calls:
            continue
        # Messages must be found in order, so that a repeated question is written twice. But
        # Mistral's template puts the system message into the last question.
        start = 0 if message.role == "system" else position
        for text in message.texts if message.images else (message.content,):
            form = text.strip()
            place = prompt.find(form, start)
            if place < 0:
                form = _other_form(message, text)
                place = prompt.find(form, start)
            if place < 0:
                raise RenderError(
                    f"the chat template leaves out or changes messages[{index}], "
                    f"of the role {message.role}: {quote(text.strip())}"
                )
            start = place + len(form)
        if message.role != "system":
            position = start


def _other_form(message: Message, text: str) -> str:
    """Return the other form that a message's text may have in a prompt."""
    if message.role == "assistant":
        return split_reasoning(message).answer.strip()
    # Llama 3 and gpt-oss write the answer of a tool as JSON
    return json_characters(text.strip()) if message.role == "tool" else text.strip()


def check_answer(
    message: Message, where: str, text: str, after: str, ending: re.Pattern[str]
) -> None:
    """Raise RenderError unless an answer's text is its message, which errors call `where`.

    The text is what the template writes from the end of the prompt to the stop token, and `after`
    is what follows it. A template may write something before the content (an empty think block, the
    name of a channel), which the model learns to write. Between the content and the stop token
    only `ending` or tool calls are allowed.
    """
    reasoning = (message.reasoning or "").strip()
    if reasoning not in text:
        raise RenderError(
            f"the chat template leaves out or changes the reasoning of {where}: "
            f"{quote(reasoning)}; DATA_REASONING=drop trains the answers without it"
        )
    content = message.content.strip()
    if message.tool_calls:
        # reasoning within the content comes before the calls
        written = text.rpartition(content)[2] if content.startswith(OPENED) else text
        _check_words_of_calls(written, after, message, where)
        if content in text:
            return
    elif text.rstrip().endswith(content):
        return
    else:
        place = text.rfind(content)
        if place >= 0 and ending.fullmatch(text, place + len(content)):
            return
    if content in text:
        extra = text[text.rfind(content) + len(content) :].strip()
        raise RenderError(
            f"the chat template writes {quote(extra)} after {where}; "
            "if it ends answers, name it as eos_token in tokenizer_config.json"
        )
    if content in after:
        remedy = "; DATA_REASONING=drop trains the answers without it" if reasoning else ""
        behind = "after its reasoning, " if reasoning else ""
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


def _check_words_of_calls(text: str, after: str, message: Message, where: str) -> None:
    """Raise RenderError unless a text has the names of the calls and all of their arguments.

    `after` is what follows the text's stop token.
    """
    for call in message.tool_calls:
        function = call["function"]
        for word in (function["name"], *list_strings(function["arguments"])):
            in_ascii = json.dumps(word)[1:-1]
            if word not in text and json_characters(word) not in text and in_ascii not in text:
                fault = "writes a stop token before" if word in after else "leaves out or changes"
                raise RenderError(
                    f"the chat template {fault} a tool call of {where}: {quote(word)}; {REMEDY}"
                )


def json_characters(text: str) -> str:
    """Return a text escaped as in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def fit_greeting(template: ChatTemplate, row: Row) -> Row:
    """Return a row without its greeting, an answer before any question, if a template has none."""
    has_system = row.messages[0].role == "system"
    if _writes_greeting(template, has_system):
        return row
    return replace(row, messages=(*row.messages[:has_system], *row.messages[has_system + 1 :]))


@functools.lru_cache(MOST_KINDS)
def _writes_greeting(template: ChatTemplate, has_system: bool) -> bool:
    messages = [SYSTEM] * has_system + [GREETING, QUESTION, ANSWER]
    try:
        prompt, text = template.render_both(template_messages(messages))
    except RenderError:
        return False
    return GREETING.content in prompt and text.startswith(prompt)


def describe_losses(template: ChatTemplate, row: Row, trained: Sequence[int]) -> Notes:
    """Return what a template omits from a row, as sentences.

    `trained` are the answers that carry loss; they are refused if a part of them is lost.
    """
    notes: dict[str, None] = {}
    if row.tools:
        lost_keys = _lost_of_tools(template, row.messages[0].role == "system")
        if lost_keys is None:
            notes[NO_TOOLS] = None
        elif places := ", ".join(sorted(lost_keys & set(list_strings(row.tools)))):
            notes[f"the chat template leaves out of tools: {places}; {REMEDY}"] = None
    last = trained[-1] if trained else len(row.messages)
    for index, message in enumerate(row.messages[:last]):
        if message.tool_calls:
            lost = _lost_in_history(template, _kind_of_calls(row.messages[index:]))
            if index in trained:
                lost = tuple(place for place in lost if place != "reasoning")
            if lost:
                places = ", ".join(lost)
                notes[f"the chat template leaves out of earlier calls: {places}; {REMEDY}"] = None
    return tuple(notes)


def check_calls(template: ChatTemplate, message: Message, where: str) -> None:
    """Raise RenderError if a template omits a part of the calls of an answer."""
    lost = _lost_in_answer(template, _kind_of_calls([message]))
    if lost:
        raise RenderError(
            f"the chat template leaves out or changes a tool call of {where}: {lost}; {REMEDY}"
        )


@functools.lru_cache(MOST_KINDS)
def text_after_answer(template: ChatTemplate, has_calls: bool) -> str:
    """Return what a template writes after an answer once the conversation continues; "" if unknown.

    A result follows calls, a question any other answer.
    """
    call = _probe(CallKind(1, (("str", True),), False, False))
    answered = (call, TOOL_MESSAGES[0]) if has_calls else (ANSWER, QUESTION)
    messages = template_messages((QUESTION, *answered))
    render = template.render_conversation
    try:
        text, continued = render(messages[:2], [TOOL]), render(messages, [TOOL])
    except RenderError:
        return ""
    return continued[len(text) :] if continued.startswith(text) else ""


@functools.lru_cache(MOST_KINDS)
def _lost_of_tools(template: ChatTemplate, has_system: bool) -> frozenset[str] | None:
    """Return the parts of tools that are omitted, None if all tools are omitted."""
    try:
        asked = template_messages([SYSTEM] * has_system + [QUESTION])
        text = template.render_prompt(asked, [TOOL])
    except RenderError:
        return frozenset()
    if TOOL["function"]["name"] not in text:
        return None
    return frozenset(
        key for key, words in TOOL_WORDS.items() if any(word not in text for word in words)
    )


@functools.lru_cache(MOST_KINDS)
def _lost_in_answer(template: ChatTemplate, kind: CallKind) -> str | None:
    """Return the first omitted part of an answer's calls, None if nothing is omitted."""
    try:
        messages = template_messages([QUESTION, _probe(kind)])
        prompt, text = template.render_both(messages, [TOOL])
    except RenderError:  # only the row's words can be checked
        return None
    return next(_lost_calls(kind, text.removeprefix(prompt)), None)


@functools.lru_cache(MOST_KINDS)
def _lost_in_history(template: ChatTemplate, kind: CallKind) -> Notes:
    """Return the parts of a call and its results that are missing in the next answer's prompt."""
    following = TOOL_MESSAGES[: kind.results] or (QUESTION,)
    try:
        messages = template_messages((QUESTION, _probe(kind), *following))
        text = template.render_prompt(messages, [TOOL])
    except RenderError:
        return ()
    lost = list(_lost_calls(kind, text))
    if kind.has_content and BESIDE not in text:
        lost.append("words in the same message")
    if kind.has_reasoning and THOUGHT not in text:
        lost.append("reasoning")
    if any(word not in text for word in RESULTS[: kind.results]):
        lost.append("results")
    return tuple(lost)


def _probe(kind: CallKind) -> Message:
    """Return an answer with calls of a kind, with test words."""
    calls = []
    for number in range(1, kind.calls + 1):
        arguments = {
            f"zq{number}_{place}_key": json.loads(ARGUMENTS[name][0].format(number))
            for place, name in enumerate(kind.arguments)
        }
        function = {"name": NAMES[number - 1], "arguments": arguments}
        calls.append({"id": CALL_IDS[number - 1], "type": "function", "function": function})
    content = BESIDE if kind.has_content else ""
    return Message("assistant", content, THOUGHT if kind.has_reasoning else None, tuple(calls))


def _lost_calls(kind: CallKind, text: str) -> Iterator[str]:
    """Yield the parts of a probe's calls that are missing in a text."""
    for number in range(1, kind.calls + 1):
        found = text.find(NAMES[number - 1])
        if found < 0:
            yield "all but the first of several calls" if number > 1 else "the calls themselves"
            return
        for place, name in enumerate(kind.arguments):
            key = f"zq{number}_{place}_key"
            value, form = (text.format(number) for text in ARGUMENTS[name])
            _, has_key, after = text.partition(key)
            written = re.split(r"zq\d_\d+_|zq\d_function", after)[0]
            if not has_key or not re.search(form, written):
                yield f"arguments such as {value}"


def _kind_of_calls(messages: Sequence[Message]) -> CallKind:
    """Return the features of the calls of the first message."""
    message, *others = messages
    kinds = {
        (type(value).__name__, bool(value))
        for call in message.tool_calls
        for value in call["function"]["arguments"].values()
    }
    results = list(takewhile(lambda other: other.role == "tool", others))
    calls = min(len(message.tool_calls), MOST_CALLS)
    return CallKind(
        calls,
        tuple(sorted(kinds & ARGUMENTS.keys())),
        bool(message.content.strip()),
        bool(message.reasoning),
        min(len(results), calls),
    )
