"""The images in a row, and their positions in its texts. Pure: opens none of them.

An ImageFile without a width is what the row contains: a path or URL, or bytes.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft_play.data.row_formats import IMAGE_COLUMNS, MEDIA_COLUMNS, RowFormat, parse_nested
from sft_play.data.rows import (
    IMAGE_MARK,
    ImageFile,
    InvalidRowError,
    Json,
    Message,
    Messages,
    is_given,
    shorten,
)

TEXT_MARK = "<image>"  # of LLaMA-Factory, ms-swift and LLaVA
MARKS = re.compile(f"{IMAGE_MARK}|{TEXT_MARK}")
NEXT_IMAGE = ImageFile("", b"", 0, 0)  # of a mark without a file: the next of the row's images
MEDIA = (  # of a part that is not a video, and of one
    "sound; only texts and images are read: write the spoken words as text",
    "a video; only texts and images are read: write its frames as images",
)
NO_ANSWER = "no model here writes images; put it into a question"
IMAGE_TYPES = ("image", "image_url", "input_image")  # of parts
BARE_KEYS = ("image", "inlineData", "inline_data")  # of parts without a type
MEDIA_TYPES = "video video_url input_video audio audio_url input_audio".split()
# Keys of a part, or of an object in it: bytes take precedence over their original path
ENCODED_KEYS = ["bytes", "base64", "data"]
IMAGE_KEYS = ENCODED_KEYS + "image image_url source inlineData inline_data url path".split()
# The start of base64 of JPEG, PNG, GIF, WebP, BMP and TIFF; a path also has a dot
BASE64_IMAGE = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk|SUkq|TU0AK)[\w+/\s]{60,}=*\s*", re.A)


def name_image(value: Any, name: str) -> ImageFile:
    """Return the image of a part or of a column's value, NEXT_IMAGE if a part names none.

    Raises InvalidRowError, with `name` as its name.
    """
    given, is_encoded = value, False
    while isinstance(given, dict):
        key = next((key for key in IMAGE_KEYS if is_given(given.get(key))), None)
        if key is None:
            if given is value and str(given.get("type")).endswith("image"):
                return NEXT_IMAGE
            break
        given, is_encoded = given[key], key in ENCODED_KEYS
    if isinstance(given, str) and given.strip():
        head, comma, text = given.partition(",")
        is_uri = head.startswith("data:") and bool(comma)
        if not (is_uri or is_encoded or BASE64_IMAGE.fullmatch(given)):
            return ImageFile(given, b"", 0, 0)
        if is_uri and not head.endswith(";base64"):
            raise InvalidRowError(f"{name} begins with {shorten(head)}, not data:image/...;base64,")
        try:
            given = base64.b64decode("".join((text if is_uri else given).split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRowError(f"{name} is no base64 text, or a damaged one ({error})") from None
    if isinstance(given, bytes) and given:
        return ImageFile("", given, 0, 0)
    raise InvalidRowError(
        f"{name} is {shorten(given)}; an image is a path, a URL, base64 text or bytes"
    )


def name_images(value: Any, name: str) -> list[ImageFile]:
    """Return the images that a list names, or one value. Raises InvalidRowError."""
    values = parse_nested(value)
    if not isinstance(values, list):
        values = [values] if is_given(values) else []
    return [name_image(each, f"{name}[{number}]") for number, each in enumerate(values)]


def is_image(part: Any) -> bool:
    """Return whether a part of a content is an image."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind in IMAGE_TYPES if kind else any(is_given(part.get(key)) for key in BARE_KEYS)


def refuse_media(part: Any, name: str) -> None:
    """Raise InvalidRowError for a part that is a video or sound."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_TYPES:
        raise InvalidRowError(f"{name} is {MEDIA['video' in kind]}")


def attach_images(messages: Messages, record: Json, row_format: RowFormat) -> Messages:
    """Return the messages of a record with the images of its columns, in order, at their marks.

    Without marks, all images come before the first question. Raises InvalidRowError.
    """
    column = row_format.columns["images"]
    has_column = column in record or row_format.media or not MEDIA_COLUMNS.isdisjoint(record)
    has_images = bool([message for message in messages if message.images])
    if not has_column and not has_images:
        return messages
    for other in MEDIA_COLUMNS - IMAGE_COLUMNS:
        mark = f"<{other.removesuffix('s')}>"
        is_marked = other in row_format.media and any(mark in each.content for each in messages)
        if is_marked or is_given(record.get(other)):
            raise InvalidRowError(f"the column {other} is of {MEDIA['video' in other]}")
    own = {each for each in (column, *IMAGE_COLUMNS) if is_given(record.get(each))}
    if len(own) > 1:
        raise InvalidRowError(f"images in the columns {' and '.join(sorted(own))}; keep one")
    column = min(own, default=column)
    images = name_images(record.get(column), column)
    marks = sum(
        message.content.count(TEXT_MARK) + message.images.count(NEXT_IMAGE) for message in messages
    )
    if not marks and not has_images:
        marks = len(images)
        first = [message.role for message in messages].index("user")
        asked = messages[first]
        asked = replace(asked, content=TEXT_MARK * marks + asked.content)
        messages = (*messages[:first], asked, *messages[first + 1 :])
    if marks != len(images):
        raise InvalidRowError(
            f"marks for images ({TEXT_MARK}, or a part that names none): {marks}; "
            f"images in the column {column}: {len(images)}; write as many"
        )
    return _pair(messages, images)


def _pair(messages: Sequence[Message], images: Sequence[ImageFile]) -> Messages:
    """Return messages with a column's images in place of the same number of marks.

    Raises InvalidRowError.
    """
    if not images and not any(message.images for message in messages):
        return tuple(messages)
    given = iter(images)
    paired = []
    for message in messages:
        own = iter(message.images)
        said = f"{message.reasoning}{message.tool_calls}"
        if message.content.count(IMAGE_MARK) != len(message.images) or IMAGE_MARK in said:
            raise InvalidRowError(
                "a text of a row with images has U+FFFC, which marks an image here; remove it"
            )
        found = []
        for mark in MARKS.findall(message.content):
            image = next(own) if mark == IMAGE_MARK else NEXT_IMAGE
            found.append(next(given) if image == NEXT_IMAGE else image)
        if found and message.role == "assistant":
            raise InvalidRowError(f"an answer contains an image, and {NO_ANSWER}")
        content = message.content.replace(TEXT_MARK, IMAGE_MARK)
        paired.append(replace(message, content=content, images=tuple(found)))
    return tuple(paired)
