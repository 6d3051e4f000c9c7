"""Special tokens inside the text of messages: data, which never becomes a turn. Loads no torch.

A tokenizer finds its special tokens anywhere in a rendered text, even if a user wrote them. So
under `as_text` each such token in a message is replaced by a *placeholder* of the same length while
the template renders: private-use characters, so that other characters keep their positions. In a
second tokenizer the special tokens have the placeholders' names, and the same ids. In its input
text the two are swapped: it finds the template's tokens, and reads the user's as plain text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from sft_play.data.limits import TOKENIZER_REMEDY, panics_as_errors
from sft_play.data.rows import Row
from sft_play.data.templates import ChatTemplate, RenderError, list_strings
from sft_play.data.thoughts import CLOSED
from sft_play.errors import DataError, first_line

TokensInText = Literal["fail", "as_text", "allow"]  # data.special_tokens_in_text
SETTING = "DATA_SPECIAL_TOKENS_IN_TEXT"
UNREADABLE = (
    f"the tokenizer cannot read {{}} as plain text; {SETTING}=fail names the rows that contain a "
    "special token, allow reads it as the token"
)

FIRST_PLACEHOLDER = 0xF0000  # plane 15 of Unicode, of private use: 65,534 characters
# Data with reasoning inside the answer contains these, and templates search for them
THOUGHT_MARKS = frozenset(("<think>", "</think>"))
TEXTS = ("content", "reasoning", "name", "tool_call_id", "tool_calls")  # of a message
get_texts = attrgetter(*TEXTS)
NOTHING = r"(?!)"  # a pattern that never matches
PROBES = ("Question1Of2", "Answer1Of2", "Question2Of2")  # words that no template contains


class TextPart(NamedTuple):
    """A part of a text."""

    begin: int  # its first character in the text
    ids: list[int]


def join_ids(parts: Iterable[TextPart]) -> list[int]:
    """Return the ids of consecutive parts."""
    ids: list[int] = []
    for part in parts:
        ids += part.ids
    return ids


class SpecialText:
    """Finds special tokens and turn markers in messages, and reads them as plain text."""

    def __init__(self, tokenizer: Any, policy: TokensInText):
        self._policy = policy
        self._backend = tokenizer.backend_tokenizer
        added = [
            token
            for token in tokenizer.added_tokens_decoder.values()
            if token.content.strip() and token.content not in THOUGHT_MARKS
        ]
        between = between_turns(tokenizer)
        tokens = [token.content for token in added if token.special or token.content in between]
        self._token = match_any(tokens)
        self._placeholders = {
            token: chr(FIRST_PLACEHOLDER + number) * len(token)
            for number, token in enumerate(sorted(tokens, key=len, reverse=True))
        }
        names = {name: token for token, name in self._placeholders.items()}
        self._exchanged = {**self._placeholders, **names}  # each is replaced by the other
        self._either = match_any(self._exchanged)
        self._placeholder = match_any(names)
        self._part_begin = match_any(
            token.content
            for token in added
            if not (token.normalized or token.lstrip or token.single_word)
        )
        words = match_any((*(token.content for token in added), *THOUGHT_MARKS)).split(between)
        self._turn_words = _turn_words(words)
        # a text without these needs no escaping
        self.unusual = match_any((*tokens, *self._turn_words, *CLOSED))

    def escape(self, row: Row) -> tuple[Row, tuple[str, ...]]:
        """Return a conversation with placeholders for special tokens in its messages, and these.

        Return the row itself if it has none, and under `allow`. Raises RenderError for tokens that
        `fail` refuses, and for words that start a turn without a special token.
        """
        if self._policy == "allow":
            return row, ()
        everything = [*map(get_texts, row.messages), row.tools, row.variables]
        if not any(map(self.unusual.search, list_strings(everything))):
            return row, ()
        tokens: set[str] = set()
        for where, text in _list_texts(row):
            for words, pattern in self._turn_words.items():
                # the first is quick, and mostly enough
                if words in text and pattern.search(text):
                    raise RenderError(
                        f"{where} contains {words!r}, with which the chat template begins a "
                        f"turn, and no token tells the two apart; {SETTING}=allow reads it as the "
                        "template's"
                    )
            found = self._token.findall(text)
            if found and self._policy == "fail":
                raise RenderError(
                    f"{where} contains {found[0]}, a special token; {SETTING}=as_text reads it as "
                    "plain text, allow as the token"
                )
            tokens.update(found)
        return self._with_placeholders(row) if tokens else row, tuple(sorted(tokens))

    def plain(self, text: str) -> str:
        """Return a text with special tokens instead of placeholders."""
        return self._placeholder.sub(self._exchange, text)

    def _exchange(self, found: re.Match[str]) -> str:
        return self._exchanged[found[0]]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of rendered texts; placeholders are read as plain text."""
        return list(map(join_ids, self.encode_parts(texts)))

    def encode_parts(self, texts: Sequence[str]) -> list[list[TextPart]]:
        """Return the parts of rendered texts between their added tokens, from which each begins.

        Tokenizers split a text there first, so the ids of a part do not depend on other parts, and
        what texts share is read once.
        """
        split = list(map(self._split, texts))
        parts = list({part: begin for found in split for begin, part in found})
        ids = dict(zip(parts, encode(self._backend, parts), strict=True))
        for part in filter(self._placeholder.search, parts):
            (ids[part],) = encode(self._renamed, [self._either.sub(self._exchange, part)])
        return [[TextPart(begin, ids[part]) for begin, part in found] for found in split]

    def _split(self, text: str) -> list[tuple[int, str]]:
        begins = map(re.Match.start, self._part_begin.finditer(text))
        return [(begin, text[begin:end]) for begin, end in pairwise((0, *begins, len(text)))]

    @cached_property
    def _renamed(self) -> Any:
        """The tokenizer whose special tokens have the placeholders' names. Raises RenderError."""
        from tokenizers import Tokenizer

        names = self._placeholders

        def rename(piece: str) -> str:
            """Return the name of a special token, and other pieces as they are."""
            return names.get(piece, piece)

        facts = json.loads(self._backend.to_str())
        for token in facts["added_tokens"]:
            token["content"] = rename(token["content"])
        model = facts["model"]
        # by piece, or for a Unigram model a list with scores
        model["vocab"] = _map_strings(model["vocab"], rename)
        if model.get("unk_token"):
            model["unk_token"] = rename(model["unk_token"])
        try:
            with panics_as_errors():
                renamed = Tokenizer.from_str(json.dumps(facts))
        except RuntimeError as error:
            raise RenderError(UNREADABLE.format(f"its tokens ({first_line(error)})")) from error
        for token, name in names.items():
            if renamed.token_to_id(name) != self._backend.token_to_id(token):
                raise RenderError(UNREADABLE.format(token))
        return renamed

    def _with_placeholders(self, row: Row) -> Row:
        for where, text in _list_texts(row):
            found = self._placeholder.search(text)
            if found:
                raise RenderError(
                    f"{where} contains {found[0]!r}, a character of private "
                    f"use, in a row with special tokens in its text; {SETTING}=allow reads both"
                )

        change = partial(self._token.sub, self._exchange)

        def escaped(owner: Any, names: Iterable[str]) -> Any:
            texts = {name: _map_strings(getattr(owner, name), change) for name in names}
            return replace(owner, **texts)

        messages = tuple(escaped(message, TEXTS) for message in row.messages)
        return replace(escaped(row, ("tools", "variables")), messages=messages)


@lru_cache(maxsize=4)
def _special_text(tokenizer: Any, vocabulary: int, template: str, policy: Any) -> SpecialText:
    return SpecialText(tokenizer, policy)


def special_text(tokenizer: Any, policy: TokensInText) -> SpecialText:
    """Return the special token reader of a tokenizer in its current state; created once."""
    return _special_text(tokenizer, len(tokenizer), ChatTemplate(tokenizer).jinja, policy)


def special_notes(as_text: Mapping[str, int], source: str) -> list[str]:
    """Return a sentence about a source's rows with special tokens in their text."""
    if not as_text:
        return []
    tokens = ", ".join(f"{token} ({rows:,} rows)" for token, rows in sorted(as_text.items()))
    return [
        f"{source}: special tokens within messages are read as plain text: {tokens}; "
        f"{SETTING}=fail refuses such rows, allow reads them as the tokens"
    ]


def encode(
    tokenizer: Any, texts: Sequence[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """Return the ids of texts by a tokenizer of the library `tokenizers`. Raises DataError."""
    tokenizer.no_truncation()  # earlier code or the file may have set these
    tokenizer.no_padding()
    try:
        with panics_as_errors():
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except RuntimeError as error:
        raise DataError(f"the tokenizer fails ({first_line(error)}); {TOKENIZER_REMEDY}") from error
    return [encoding.ids for encoding in found]


def match_any(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of the words, preferring the longest match."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or NOTHING)


def between_turns(tokenizer: Any) -> str:
    """Return the template's text between turns, "" if it accepts no conversation."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": word} for role, word in zip(roles, PROBES, strict=True)]
    try:
        text = ChatTemplate(tokenizer).render_conversation(messages)
    except RenderError:
        return ""
    parts = re.split("|".join(PROBES), text)
    return "\n".join(parts[1:3])


def _turn_words(pieces: Sequence[str]) -> dict[str, re.Pattern[str]]:
    """Return the words that start a turn, each with a pattern that finds them.

    A plain word, e.g. the name of a role, is ignored. A heading, or words that start with a letter
    like `USER:`, count at the start of a line.
    """
    found: dict[str, re.Pattern[str]] = {}
    for piece in pieces:
        words = piece.strip()
        if re.search(r"\w", words) and re.search(r"[^\w\s]", words):
            is_line = words[0].isalnum() or words[0] == "#"
            start = r"^[ \t]*" if is_line else ""
            found[words] = re.compile(start + re.escape(words), re.MULTILINE)
    return found


def _list_texts(row: Row) -> list[tuple[str, str]]:
    """Return every text of a conversation that a template writes, with its location."""
    parts = [(f"messages[{index}]", get_texts(each)) for index, each in enumerate(row.messages)]
    parts += [("tools", row.tools), ("the variables of the template", row.variables)]
    found: list[tuple[str, str]] = []
    for where, part in parts:
        found += [(where, text) for text in list_strings(part)]
    return found


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(inner, change) for inner in value)
    return value
