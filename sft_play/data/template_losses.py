"""What a chat template leaves out of conversations with tools, asked with words of our own.

Words of a row prove little: a number, a null or a city may stand in a text by chance. So the
template writes a conversation whose every place has a word that no template writes by itself, once
for each kind of place that rows have. Tokenizes nothing.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sft_play.data.rows import Message, Row
from sft_play.data.templates import ChatTemplate, RenderError, iterate_strings, template_messages

REMEDY = "MODEL_CHAT_TEMPLATE=default writes them in plain words, or name a Jinja file of your own"
NO_TOOLS = f"the chat template leaves out the tools, so no token has them; {REMEDY}"
QUESTION = Message("user", "Zq1Question")
ANSWER = Message("assistant", "Zq1Answer")
SYSTEM = Message("system", "Zq1System")
BESIDE = "Zq1Beside"  # words beside a call
THOUGHT = "Zq1Thought"
RESULTS = ("Zq1Result", "Zq2Result")
CALL_IDS = ("Zq1Call00", "Zq2Call00")  # of nine letters and digits, as Mistral wants them
NAMES = ("zq1_function", "zq2_function")
MOST_CALLS = 2  # more are written as the second is, or not
TOOL = {
    "type": "function",
    "function": {
        "name": "zq1_tool",
        "description": "Zq1Description",
        "parameters": {
            "type": "object",
            "properties": {
                "zq1_key": {
                    "type": "string",
                    "description": "Zq1Description",
                    "enum": ["Zq1Choice"],
                },
                "zq2_key": {"type": "string", "default": "Zq1Default"},
                "zq3_key": {"type": "object", "properties": {"zq4_key": {"type": "string"}}},
            },
            "required": ["zq1_key"],
        },
    },
}
# Keys of tools: the words that stand there
TOOL_WORDS = {
    "description": ("Zq1Description",),
    "properties": ("zq1_key", "zq2_key", "zq3_key", "zq4_key"),
    "enum": ("Zq1Choice",),
    "default": ("Zq1Default",),
}
# Types of arguments, and whether they are true: a value of call 1 or 2, how it may be written
ARGUMENTS = {
    ("str", True): ('"Zq{0}Text"', "Zq{0}Text"),
    ("str", False): ('""', r"""["'`]{{2}}|></|<\|"\|><\|"\|>"""),
    ("int", True): ("7100{0}", "7100{0}"),
    ("int", False): ("0", r"(?<!\w)0"),
    ("float", True): ("7200{0}.5", r"7200{0}\.5"),
    ("bool", True): ("true", "(?i:true)"),
    ("bool", False): ("false", "(?i:false)"),
    ("NoneType", False): ("null", "null|None|none"),
    ("dict", True): ('{{"zq{0}_inner": "Zq{0}Inner"}}', r"zq{0}_inner[\s\S]*Zq{0}Inner"),
    ("list", True): ('["Zq{0}First", "Zq{0}Second"]', r"Zq{0}First[\s\S]*Zq{0}Second"),
}


class CallKind(NamedTuple):
    """What the calls of a message are like."""

    calls: int
    arguments: tuple[tuple[str, bool], ...]  # keys of ARGUMENTS, sorted
    has_content: bool
    has_reasoning: bool
    results: int = 0  # that follow


class TemplateLosses:
    """What one template leaves out; each kind of place is tried once."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._tools: dict[bool, frozenset[str] | None] = {}  # by whether there is a system message
        self._answers: dict[CallKind, str | None] = {}
        self._histories: dict[CallKind, tuple[str, ...]] = {}

    def describe(self, row: Row, trained: Sequence[int]) -> tuple[str, ...]:
        """Return what the template leaves out of a row, as sentences.

        `trained` are the answers that carry loss; those are refused where a part of them is lost.
        """
        notes: dict[str, None] = {}
        if row.tools:
            notes.update(dict.fromkeys(self._describe_tools(row)))
        last = trained[-1] if trained else len(row.messages)
        for index, message in enumerate(row.messages[:last]):
            if message.tool_calls:
                kind = _kind_of_calls(row.messages, index)
                lost = self._lost_in_history(kind)
                if index in trained:
                    lost = tuple(place for place in lost if place != "reasoning")
                if lost:
                    places = ", ".join(lost)
                    note = f"the chat template leaves out of earlier calls: {places}; {REMEDY}"
                    notes[note] = None
        return tuple(notes)

    def check_calls(self, message: Message, where: str) -> None:
        """Raise RenderError if the template leaves out a part of the calls of an answer."""
        if not message.tool_calls:
            return
        kind = _kind_of_calls((message,), 0)
        if kind not in self._answers:
            self._answers[kind] = self._lost_in_answer(kind)
        if self._answers[kind]:
            raise RenderError(
                f"the chat template leaves out or changes a tool call of {where}: "
                f"{self._answers[kind]}; {REMEDY}"
            )

    def _describe_tools(self, row: Row) -> Iterator[str]:
        has_system = row.messages[0].role == "system"
        if has_system not in self._tools:
            self._tools[has_system] = self._lost_of_tools(has_system)
        lost = self._tools[has_system]
        if lost is None:
            yield NO_TOOLS
        elif lost:
            places = ", ".join(sorted(lost & set(iterate_strings(row.tools))))
            if places:
                yield f"the chat template leaves out of tools: {places}; {REMEDY}"

    def _lost_of_tools(self, has_system: bool) -> frozenset[str] | None:
        """Return the places of tools that are left out, None if the tools are as a whole."""
        asked = (SYSTEM, QUESTION) if has_system else (QUESTION,)
        try:
            text = self._template.render_prompt(template_messages(asked), [TOOL])
        except RenderError:
            return frozenset()
        if TOOL["function"]["name"] not in text:
            return None
        return frozenset(
            key for key, words in TOOL_WORDS.items() if any(word not in text for word in words)
        )

    def _lost_in_answer(self, kind: CallKind) -> str | None:
        """Return the first part of an answer's calls that is left out, None if none is."""
        asked = template_messages([QUESTION])
        answer = template_messages([_probe(kind)])
        try:
            prompt = self._template.render_prompt(asked, [TOOL])
            text = self._template.render_conversation([*asked, *answer], [TOOL]).text
        except RenderError:  # the row's own words are all that can be checked
            return None
        written = text[len(prompt) :] if text.startswith(prompt) else text
        return next(_lost_calls(kind, written), None)

    def _lost_in_history(self, kind: CallKind) -> tuple[str, ...]:
        if kind not in self._histories:
            self._histories[kind] = tuple(self._find_lost_in_history(kind))
        return self._histories[kind]

    def _find_lost_in_history(self, kind: CallKind) -> Iterator[str]:
        """Yield the parts of a call and its results that the prompt of the next answer lacks."""
        results = [
            Message("tool", word, name=name, tool_call_id=id_)
            for word, name, id_ in zip(RESULTS, NAMES, CALL_IDS, strict=True)
        ]
        messages = [QUESTION, _probe(kind), *results[: kind.results]]
        if not kind.results:
            messages += [QUESTION]
        try:
            text = self._template.render_prompt(template_messages(messages), [TOOL])
        except RenderError:
            return
        yield from _lost_calls(kind, text)
        if kind.has_content and BESIDE not in text:
            yield "words beside them"
        if kind.has_reasoning and THOUGHT not in text:
            yield "reasoning"
        if any(word not in text for word in RESULTS[: kind.results]):
            yield "results"


def _probe(kind: CallKind) -> Message:
    """Return an answer with calls of a kind, of words of our own."""
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
    """Yield the parts of a probe's calls that a text lacks."""
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


def _kind_of_calls(messages: Sequence[Message], index: int) -> CallKind:
    message = messages[index]
    kinds = {
        (type(value).__name__, bool(value))
        for call in message.tool_calls
        for value in call["function"]["arguments"].values()
    }
    results = 0
    for following in messages[index + 1 :]:
        if following.role != "tool" or results == MOST_CALLS:
            break
        results += 1
    calls = min(len(message.tool_calls), MOST_CALLS)
    return CallKind(
        calls,
        tuple(sorted(kinds & ARGUMENTS.keys())),
        bool(message.content.strip()),
        bool(message.reasoning),
        min(results, calls),
    )
