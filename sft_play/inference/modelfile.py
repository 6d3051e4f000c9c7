"""Ollama's Modelfile of a gguf file: its template in Go's language, its stops, its context. Pure.

A Jinja template cannot be translated in general. The texts around the contents of each role are
extracted from the template's output, and the result is compared with it, prompt by prompt.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from sft_play.data.render import RenderError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]  # converts messages to the text of a prompt
THREE_QUOTES = '"""'
ENDS_OF_MARKS = ">]|｜"
SYSTEM, QUESTION, ANSWER, NEXT = "⟦system⟧", "⟦question⟧", "⟦answer⟧", "⟦next⟧"
ASSISTANT = {"role": "assistant", "content": ANSWER}


@dataclass(frozen=True)
class TurnTexts:
    """The texts that a chat template writes around the contents of messages."""

    start: str  # if the first message is not a system message
    before_system: str | None  # None: the template does not support system messages
    after_system: str
    before_user: str
    before_assistant: str
    after_assistant: str
    end: str  # after the last question, before the answer

    def render(self, messages: Messages) -> str:
        """Return the prompt in the Go template's format."""
        text = "" if messages[0]["role"] == "system" else self.start
        for message in messages:
            content = message["content"]
            if message["role"] == "system":
                text += f"{self.before_system}{content}{self.after_system}"
            elif message["role"] == "user":
                text += f"{self.before_user}{content}"
            else:
                text += f"{self.before_assistant}{content}{self.after_assistant}"
        return text + self.end

    def with_system(self, system: str) -> "TurnTexts":
        """Return the texts that add a system message if a conversation has none."""
        return replace(self, start=f"{self.before_system or ''}{system}{self.after_system}")

    def as_go(self) -> str:
        """Return the template in Go's language; every text is a literal, so no space is lost."""
        system = ""
        if self.before_system is not None:
            system = _case("system", self.before_system, self.after_system)
        start = ""
        if self.start:
            no_system = '{{ if ne (index .Messages 0).Role "system" }}'
            start = f"{no_system}{_literal(self.start)}{{{{ end }}}}"
        user = _case("user", self.before_user, "")
        assistant = _case("assistant", self.before_assistant, self.after_assistant)
        turns = f"{{{{ range .Messages }}}}{system}{user}{assistant}{{{{ end }}}}"
        return f"{start}{turns}{_literal(self.end)}"


def read_turn_texts(render: Render) -> TurnTexts | None:
    """Return the texts of a template, None if it writes anything else around contents."""
    try:
        one = render([_user(QUESTION)])
        two = render([_user(QUESTION), ASSISTANT, _user(NEXT)])
        first, end = one.split(QUESTION)
        rest, last_end = two.split(NEXT)
        before, between = rest.split(QUESTION)
        before_assistant, before_next = between.split(ANSWER)
    except (RenderError, ValueError):
        return None
    if (before, last_end) != (first, end):
        return None
    systems = _around_system(render)
    before_user = _common_end(first, before_next)
    if systems is not None:
        before_user = _common_end(before_user, systems[1])
    texts = TurnTexts(
        start=first.removesuffix(before_user),
        before_system=systems[0] if systems else None,
        after_system=systems[1].removesuffix(before_user) if systems else "",
        before_user=before_user,
        before_assistant=before_assistant,
        after_assistant=before_next.removesuffix(before_user),
        end=end,
    )
    if systems is None:
        return texts
    # a system message must also be first in a longer conversation
    system = {"role": "system", "content": SYSTEM}
    messages = [system, _user(QUESTION), ASSISTANT, _user(NEXT)]
    return texts if render(messages) == texts.render(messages) else None


def modelfile_text(
    file: str,
    texts: TurnTexts,
    stops: Sequence[str],
    parameters: Mapping[str, float],
    system: str | None,
) -> str | None:
    """Return the text of a Modelfile for a gguf file next to it; `parameters` are Ollama's.

    A system prompt that SYSTEM cannot contain becomes a part of the template. None if a stop
    token cannot be written.
    """
    system_word = quoted(system) if system else None
    if system and system_word is None:
        texts = texts.with_system(system)
    stop_words = [quoted(stop) for stop in stops]
    if None in stop_words:
        return None
    lines = [f"FROM ./{file}", f'TEMPLATE """{texts.as_go()}"""']
    if system_word is not None:
        lines.append(f"SYSTEM {system_word}")
    lines += [f"PARAMETER stop {word}" for word in stop_words]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str | None:
    """Return a text as a value of a Modelfile, None if Ollama would read a different text.

    There is no escape: a value ends at the first line end where it also ends with its opening
    quotes. Of non-printable characters only these are kept: space, tab and line ends
    (its parser/parser.go).
    """
    if not all(character.isprintable() or character in "\t\r\n" for character in text):
        return None
    quotes = THREE_QUOTES if '"' in text or "\n" in text or "\r" in text else '"'
    begun = quotes
    for character in text:
        value = begun.strip()
        is_closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
        if character in "\r\n" and is_closed:
            return None
        begun += character
    return begun + quotes


def _around_system(render: Render) -> tuple[str, str] | None:
    """Return the texts before a system message and between it and a question."""
    try:
        text = render([{"role": "system", "content": SYSTEM}, _user(QUESTION)])
        before, rest = text.split(SYSTEM)
        between, _ = rest.split(QUESTION)
    except (RenderError, ValueError):
        return None
    return before, between


def _common_end(first: str, second: str) -> str:
    """Return the longest common suffix of both, without the end of a mark that is cut in two."""
    common = commonprefix([first[::-1], second[::-1]])  # noqa: RUF071 (characters are meant)
    return common[::-1].lstrip(ENDS_OF_MARKS)


def _case(role: str, before: str, after: str) -> str:
    inner = f"{_literal(before)}{{{{ .Content }}}}{_literal(after)}"
    return f'{{{{ if eq .Role "{role}" }}}}{inner}{{{{ end }}}}'


def _literal(text: str) -> str:
    """Return an action that writes a text; JSON strings are also Go strings."""
    if not text:
        return ""
    written = json.dumps(text, ensure_ascii=False)
    # escaped if Ollama would omit a character of a Modelfile
    in_go = (each if each.isprintable() else f"\\U{ord(each):08x}" for each in written)
    return f"{{{{ {''.join(in_go)} }}}}"


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
