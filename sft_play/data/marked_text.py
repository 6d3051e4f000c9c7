"""Conversations that are one text, with marks before their turns: as chat templates wrote them,
or people. Pure.

A text is such a conversation if marks of one style begin it, a question comes before an answer, and
an answer ends it. Marks of bos and of ends of turns are no part of a message.
"""

import re
from typing import NamedTuple

from sft_play.data.rows import FORMS, InvalidRowError, Json, shorten

MARKS = FORMS["marks"]
ROLES = MARKS["roles"]
SYSTEM_MARKS = re.compile(r"<<SYS>>(.*?)<</SYS>>", re.DOTALL)
BEGINNINGS = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<BOS_TOKEN>|\[gMASK\]<sop>)*\s*"
)
# Of a text that is read from its end: a search for it would begin anew at each mark
REVERSED_ENDS = "|".join(re.escape(mark[::-1]) for mark in MARKS["ends"])
ENDS = re.compile(rf"(?:\s|{REVERSED_ENDS})*+")
ALPACA_HINT = "### Response:"
MAX_PREAMBLE_CHARACTERS = 1000  # of Vicuna and Alpaca, before the first mark


class Style(NamedTuple):
    """Marks before turns."""

    name: str
    mark: str  # a regular expression, whose group is the speaker
    hint: str = ""  # words without which a text has no such mark, if these are not its name
    has_preamble: bool = False  # words before the first mark


STYLES = [Style(**facts) for facts in MARKS["styles"]]


class MarkedText(NamedTuple):
    """A conversation in a text: its style, and its parts: speaker and words in turn."""

    style: Style
    before: str
    parts: list[str]


def find_marks(text: str) -> MarkedText | None:
    """Return the marks of a text that is a conversation, None if it is none."""
    for style in STYLES:
        if (style.hint or style.name) not in text:
            continue
        begun = text[BEGINNINGS.match(text).end() :]  # type: ignore[union-attr]
        before, *parts = re.split(style.mark, begun)
        roles = [ROLES.get(speaker.lower()) for speaker in parts[::2]]
        may_begin = not before.strip()
        if style.has_preamble and len(before) <= MAX_PREAMBLE_CHARACTERS:
            may_begin = before.lstrip()[:1] not in ("[", "{")  # JSON that quotes marks
        is_answered = "user" in roles and "assistant" in roles[roles.index("user") :]
        if is_answered and None not in roles and may_begin:
            return MarkedText(style, before.strip(), parts)
    return None


def find_style(text: str) -> str | None:
    """Return the name of the marks of a conversation that ends with an answer, None for others."""
    found = find_marks(text)
    if found is None or ROLES[found.parts[-2].lower()] != "assistant":
        return None
    return found.style.name if _without_ends(found.parts[-1]) else None


def _without_ends(words: str) -> str:
    return words[: len(words) - ENDS.match(words[::-1]).end()].lstrip()


def split_marked_text(text: str, name: str) -> list[Json] | None:
    """Return the turns of a conversation in one text, None if it is none.

    Raises InvalidRowError for a text that ends before an answer.
    """
    found = find_marks(text)
    if found is None:
        return None
    turns: list[Json] = []
    thought: Json = {}
    is_alpaca = found.style.hint == ALPACA_HINT
    if found.before and not is_alpaca:
        turns.append({"role": "system", "content": found.before})
    for speaker, words in zip(found.parts[::2], found.parts[1::2], strict=True):
        role, content = ROLES[speaker.lower()], _without_ends(words)
        system = SYSTEM_MARKS.match(content) if speaker == "[INST]" else None
        if system:
            turns.append({"role": "system", "content": system[1].strip()})
            content = content[system.end() :].strip()
        if speaker == "Input":  # Alpaca's, after its instruction
            turns[-1]["content"] += f"\n\n{content}"
            continue
        if role == "thought":
            thought = {"reasoning_content": content}
            continue
        turns.append({"role": role, "content": content, **thought})
        thought = {}
    if found.before and is_alpaca:
        turns[0]["content"] = f"{found.before}\n\n{turns[0]['content']}"
    if not turns[-1]["content"]:
        raise InvalidRowError(f"{name} ends with a mark before no words: {shorten(text[-40:])}")
    return turns
