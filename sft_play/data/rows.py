"""Messages, rows, records that cannot be used, and how values are shown. Pure."""

import json
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.runs.files import Json

# The row formats, and the names of the parts of a row in other programs
FORMS = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
Columns = Mapping[str, str]  # field: the file's column, or a path into one: answers.text.0
Notes = tuple[str, ...]  # changes to a row
Records = Sequence[Json]
Objects = tuple[Json, ...]

MAX_LISTED_ROWS = 5  # bad rows that an error lists
MAX_HELD_OUT_ROWS = 500  # more rows do not make a loss more precise, and slow every evaluation
MAX_VALUE_CHARACTERS = 60  # of a value that an error repeats
MAX_COLUMNS_CHARACTERS = 200  # of the columns that an error lists
MAX_ENCODED_BYTES = 64 << 20  # of an image inside a row
IMAGE_MARK = "\ufffc"  # represents each image in a message's content
SHOWN_IMAGE = "⟨image⟩"  # in a prompt that people read


class InvalidRowError(ValueError):
    """Why a record is not a row."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An encoded image that was opened once: a file or bytes, and its displayed size."""

    path: str  # "" if the row contains its bytes
    data: bytes = field(repr=False)  # b"" if it is a file
    width: int  # pixels
    height: int
    token: str = ""  # written by the chat template, set after the processor was asked
    text: str = ""  # that the model reads instead

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height in pixels."""
        return self.width, self.height

    @property
    def name(self) -> str:
        """Its path, or its number of bytes."""
        return self.path or show_value(self.data)


Images = tuple[ImageFile, ...]


class PromptIds(list[int]):
    """The ids of a prompt, with the images that some of them represent."""

    def __init__(self, ids: Iterable[int], images: Images = ()):
        super().__init__(ids)
        self.images = images


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, with the role system, user, assistant or tool."""

    role: str
    content: str  # with IMAGE_MARK for each image
    reasoning: str | None = None  # an assistant's reasoning before its answer
    tool_calls: Objects = ()  # of an assistant, as `messages` parses them
    name: str | None = None  # of the speaker; of the tool whose answer a tool message contains
    tool_call_id: str | None = None
    is_trained: bool = True  # of an assistant: the answer carries loss
    weight: float = 1.0  # of its tokens in the loss
    images: Images = ()
    is_refusal: bool = False  # of an assistant: the content is what a log has as `refusal`

    @property
    def texts(self) -> list[str]:
        """The content, split at its images."""
        return self.content.split(IMAGE_MARK) if self.images else [self.content]

    @property
    def parts(self) -> list[Json]:
        """The content in the format of templates if it has images."""
        first, *texts = self.texts
        parts: list[Json] = [{"type": "text", "text": first}] if first else []
        for image, text in zip(self.images, texts, strict=True):
            parts.append({"type": "image", "image": image})
            if text:
                parts.append({"type": "text", "text": text})
        return parts


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a text, whether it is trained, and the weight of its tokens in the loss."""

    text: str
    is_trained: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation, plain text or segments; `origin` is `file:line` or `file[index]`."""

    messages: Messages
    origin: str
    text: str | None = None  # plain text: then there are no messages, and every token is trained
    weight: float = 1.0  # of a plain text
    tools: Objects = ()  # functions that the assistant may call: JSON schemas
    segments: tuple[Segment, ...] = ()  # a text in pieces: then there are no messages
    variables: Json | None = None  # of the chat template, only for this row
    group: str = ""  # its value in the column data.split_by

    @property
    def plain_text(self) -> str:
        """The text of a row that is not a conversation."""
        return self.text or "".join(segment.text for segment in self.segments)

    @property
    def begins_with_answer(self) -> bool:
        """Whether the assistant speaks before the first question, e.g. a greeting."""
        speakers = [message.role for message in self.messages[:2] if message.role != "system"]
        return speakers[:1] == ["assistant"]


class BadRow(NamedTuple):
    """A record that is not a row: where it is, why, and its text, with broken UTF-8 escaped."""

    origin: str
    reason: str
    raw: str


class UnreadableRecord(NamedTuple):
    """A record of a file that is not an object with keys: why, and its text."""

    reason: str
    raw: str


class NumberedRecord(NamedTuple):
    """One record of a text file, with its line or index and its size."""

    number: int
    record: Any
    characters: int


NumberedRecords = Iterator[NumberedRecord]


def shorten(value: Any, max_characters: int = MAX_VALUE_CHARACTERS) -> str:
    """Return a value as JSON, or a text unchanged, shortened for an error."""
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return make_visible(text if len(text) <= max_characters else f"{text[:max_characters]}...")


def show_value(value: Any) -> str:
    """Return the text for a value that JSON does not support."""
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else str(value)


def is_blank(value: Any) -> bool:
    """Return whether a value is null, NaN or a text without a visible character."""
    return value is None or (not value.strip() if isinstance(value, str) else value != value)


def is_given(value: Any) -> bool:
    """Return whether a value is given, i.e. not empty."""
    return value not in (None, "", [], {}) and value == value


def check_encodable(text: str, name: str) -> None:
    """Raise InvalidRowError for a text that no tokenizer accepts."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRowError(
                f"{name} contains half of a surrogate pair, which is not a character"
            ) from None
    if "\0" in text:
        raise InvalidRowError(f"{name} contains a NUL character; remove it")


def parse_text(value: Any, name: str) -> str:
    """Return a text that is not blank. Raises InvalidRowError, which calls it `name`."""
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        hint = f'; write it as a text, "{value}"' if is_number else ""
        raise InvalidRowError(f"{name} is {shorten(value)}, not a text{hint}")
    if not value or value.isspace():
        raise InvalidRowError(f"{name} is empty")
    if not value.isascii() or "\0" in value:
        check_encodable(value, name)
    return value


def parse_optional_text(value: Any, name: str) -> str | None:
    """Return a text, or None if it is null or blank. Raises InvalidRowError."""
    return None if is_blank(value) else parse_text(value, name)


def list_columns(names: Iterable[str]) -> str:
    """Return the names of columns for an error."""
    return shorten(", ".join(map(str, names)), MAX_COLUMNS_CHARACTERS) or "none"


# Whitespace, and what joins Persian and Indic letters, emoji, and the letters of flags
SHOWN_CHARACTERS = {*" \n\t\u3000", "\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}
HIDDEN_CATEGORIES = "Cc Cf Co Cs Zl Zp Zs".split()


def make_visible(text: str) -> str:
    """Return a text with invisible and control characters written as `⟨U+202E⟩`."""
    visible = ""
    for character in text:
        is_hidden = unicodedata.category(character) in HIDDEN_CATEGORIES
        if is_hidden and character not in SHOWN_CHARACTERS:
            character = f"⟨U+{ord(character):04X}⟩"
        visible += character
    return visible
