"""Images of rows: what a row says of one, its mark in a text, and the file that is opened once.

`name_image` and `pair_images` are pure; `ImageReader` and `decode` read files. An ImageFile without
a width is what the row says: a path or URL, or bytes. Loads no torch.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from sft_play import reading
from sft_play.config.layers import nearest_path
from sft_play.config.schema import Config
from sft_play.data.row_formats import IMAGE_COLUMNS, MEDIA_COLUMNS, RowFormat, parse_nested
from sft_play.data.rows import (
    IMAGE_MARK,
    ImageFile,
    InvalidRowError,
    Json,
    Message,
    is_given,
    shorten,
)
from sft_play.data.tables import OF_A_WRONG_VALUE
from sft_play.errors import DataError, first_line
from sft_play.runs.files import write_bytes
from sft_play.runs.folder import cache_folder

if TYPE_CHECKING:
    from PIL import Image

TEXT_MARK = "<image>"  # of LLaMA-Factory, ms-swift and LLaVA
MARKS = re.compile(f"{IMAGE_MARK}|{TEXT_MARK}")
NEXT_IMAGE = ImageFile("", b"", 0, 0)  # of a mark or a part alone: the next of the row's images
MEDIA = (  # of one that is no video, and of one
    "sound; texts and images alone are read: write what is said as a text",
    "a video; texts and images alone are read: write its frames as images",
)
NO_ANSWER = "no model here writes images; put it into a question"
IMAGE_TYPES = ("image", "image_url", "input_image")  # of parts
BARE_KEYS = ("image", "inlineData", "inline_data")  # of parts without a type
MEDIA_TYPES = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
# Of a part, or of an object in it: the bytes come before the path that they once had
ENCODED_KEYS = ("bytes", "base64", "data")
IMAGE_KEYS = (
    *ENCODED_KEYS,
    *("image", "image_url", "source", "inlineData", "inline_data", "url", "path"),
)
# How base64 of JPEG, PNG, GIF, WebP, BMP and TIFF begins; a path has a dot besides
BASE64_IMAGE = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk|SUkq|TU0AK)[\w+/\s]{60,}=*\s*", re.A)
# Not those whose reading starts another program (EPS), or that hold no picture of their own
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
AS_FORMATS = "save it as JPEG, PNG or WebP"
WITH_PREVIEW = "MPO"  # a JPEG with smaller ones behind it, as phones write
MAX_ENCODED_BYTES = 64 << 20
DRAFT = 8  # a JPEG is decoded at an eighth of its size, which reads all of it
ORIENTATION = 0x0112  # the EXIF tag
FIRST_TURNED = 5  # from it on, width and height change places
DEEP_MODES = ("I", "F")
MAX_CHANNEL = 255
FETCH_SECONDS = 60
BEGINNING_BYTES = 256
# Pillow checks little: what a damaged file has is an error of Python's own, of any kind
DAMAGED = (OSError, SyntaxError, EOFError, zlib.error, struct.error, *OF_A_WRONG_VALUE)
BEGINNINGS = {
    b"version https://git-lfs": "a pointer of git-lfs, not the image; git lfs pull fetches it",
    b"<svg": "an SVG drawing; save it as PNG",
    b"<!doctype html": "a web page, not an image; fetch the image itself",
    b"<html": "a web page, not an image; fetch the image itself",
}


def name_image(value: Any, name: str) -> ImageFile:
    """Return the image that a part or a column's value names, NEXT_IMAGE if a part names none.

    Raises InvalidRowError, which calls it `name`.
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


def attach_images(
    messages: tuple[Message, ...], record: Json, row_format: RowFormat
) -> tuple[Message, ...]:
    """Return the messages of a record with the images of its columns, in order, at their marks.

    Without marks, all come before the first question. Raises InvalidRowError.
    """
    for column in row_format.file_columns & MEDIA_COLUMNS - IMAGE_COLUMNS:
        mark = f"<{column.removesuffix('s')}>"
        is_marked = column in row_format.media and any(mark in each.content for each in messages)
        if is_marked or is_given(record.get(column)):
            raise InvalidRowError(f"the column {column} is of {MEDIA['video' in column]}")
    column = row_format.columns["images"]
    own = {each for each in (column, *IMAGE_COLUMNS) if is_given(record.get(each))}
    if len(own) > 1:
        raise InvalidRowError(f"images in the columns {' and '.join(sorted(own))}; keep one")
    column = min(own, default=column)
    value = parse_nested(record.get(column))
    values = value if isinstance(value, list) else [value] if own else []
    images = [name_image(each, f"{column}[{n}]") for n, each in enumerate(values)]
    has_column = column in record or row_format.media & IMAGE_COLUMNS
    if not has_column and not any(message.images for message in messages):
        return messages
    marks = sum(
        message.content.count(TEXT_MARK) + message.images.count(NEXT_IMAGE) for message in messages
    )
    if not marks and not any(message.images for message in messages):
        marks = len(images)
        first = [message.role for message in messages].index("user")
        asked = messages[first]
        asked = replace(asked, content=TEXT_MARK * marks + asked.content)
        messages = (*messages[:first], asked, *messages[first + 1 :])
    if marks != len(images):
        raise InvalidRowError(
            f"{marks} marks of images ({TEXT_MARK}, or a part that names none), and "
            f"{len(images)} images in the column {column}; write as many"
        )
    return _pair(messages, images)


def _pair(messages: Sequence[Message], images: Sequence[ImageFile]) -> tuple[Message, ...]:
    """Return messages with the images of a column in place of as many marks.

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
                "a text beside images holds U+FFFC, which stands for an image here; leave it out"
            )
        found = []
        for mark in MARKS.findall(message.content):
            image = next(own) if mark == IMAGE_MARK else NEXT_IMAGE
            found.append(next(given) if image == NEXT_IMAGE else image)
        if found and message.role == "assistant":
            raise InvalidRowError(f"an answer holds an image, and {NO_ANSWER}")
        content = message.content.replace(TEXT_MARK, IMAGE_MARK)
        paired.append(replace(message, content=content, images=tuple(found)))
    return tuple(paired)


@dataclass(frozen=True)
class ImageReader:
    """Opens the images of rows, each once, before anything is trained on them."""

    folder: Path | None = None  # where paths begin; None: the folder of the data file
    fetched: Path | None = None  # the folder of those that are fetched; None: none is

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the reader of data.image_folder and data.image_urls."""
        data = config.data
        folder = None if data.image_folder is None else Path(data.image_folder)
        fetches = data.image_urls == "fetch"
        return cls(folder, cache_folder(config) / "images" if fetches else None)

    def open_images(self, messages: tuple[Message, ...], data_file: Path) -> tuple[Message, ...]:
        """Return messages with every image opened. Raises InvalidRowError, which names the image.

        Paths begin in the folder of the data file if data.image_folder is null.
        """
        if not any(message.images for message in messages):
            return messages
        number = 0
        opened = []
        for message in messages:
            images = []
            for image in message.images:
                number += 1
                name = f"image {number}"
                if image.path:
                    name += f" '{shorten(image.path)}'"
                images.append(self._open(image, data_file, name))
            opened.append(replace(message, images=tuple(images)))
        return tuple(opened)

    def _open(self, image: ImageFile, data_file: Path, name: str) -> ImageFile:
        if image.data:
            if len(image.data) > MAX_ENCODED_BYTES:
                most = f"{MAX_ENCODED_BYTES >> 20} MiB"
                raise InvalidRowError(f"{name} has more than {most}; write it as a file")
            return _check(image, name)
        text = image.path
        if text.lower().startswith(("http://", "https://")):
            return _check(replace(image, path=str(self._fetch(text, name))), name)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        path = os.path.abspath((self.folder or data_file.parent) / text)
        return _check(replace(image, path=path), name)

    def _fetch(self, url: str, name: str) -> Path:
        """Return the file of a URL, which is fetched once. Raises InvalidRowError."""
        from sft_play.http_client import NoAnswer, download  # takes 0.2 s

        if self.fetched is None:
            raise InvalidRowError(
                f"{name} is a URL, which is not fetched; to fetch each once: DATA_IMAGE_URLS=fetch"
            )
        path = self.fetched / hashlib.sha256(url.encode()).hexdigest()
        if not path.is_file():
            try:
                data = download(url, FETCH_SECONDS, MAX_ENCODED_BYTES)
            except NoAnswer as error:
                raise InvalidRowError(f"{name} cannot be fetched: {error}") from None
            _check(ImageFile("", data, 0, 0), name)  # what is none is asked for again
            write_bytes(path, data)
        return path


BESIDE_FILES = ImageReader()


def decode(image: ImageFile) -> "Image.Image":
    """Return an image as transformers' load_image does: in RGB, turned as its EXIF data say.

    Raises DataError for a file that is no longer what was checked.
    """
    from PIL import Image, ImageOps

    name = image.path or "an image in a row"
    try:
        with Image.open(_source(image), formats=IMAGE_FORMATS) as opened:
            shown = ImageOps.exif_transpose(opened).convert("RGB")
    except DAMAGED as error:
        reason = first_line(error)
        raise DataError(
            f"{name}: could be read when the rows were, and now not: {reason}"
        ) from None
    if shown.size != (image.width, image.height):
        was = f"{image.width} x {image.height}"
        raise DataError(
            f"{name}: {shown.width} x {shown.height} pixels, and {was} when the rows were read; "
            "begin the run anew"
        )
    return shown


def _source(image: ImageFile) -> Any:
    return io.BytesIO(image.data) if image.data else image.path


def _check(image: ImageFile, name: str) -> ImageFile:
    """Return an image with its size as it is shown. Raises InvalidRowError."""
    from PIL import Image

    size = (0, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if not image.data:
                reading.refuse_special(Path(image.path))
            with Image.open(_source(image), formats=IMAGE_FORMATS) as opened:
                size = opened.size
                fault = _find_fault(opened)
                if opened.getexif().get(ORIENTATION, 1) >= FIRST_TURNED:
                    size = size[::-1]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        fault = f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels; save it smaller"
    except DAMAGED as error:
        fault = _explain(image, error)
    if fault:
        raise InvalidRowError(f"{name} {fault}")
    return replace(image, width=size[0], height=size[1])


def _find_fault(opened: "Image.Image") -> str:
    """Decode an image; return what is wrong with it, "" if nothing is. Raises: DAMAGED."""
    from PIL import ImageOps

    width, height = opened.size
    if not width * height:
        return f"has {width} x {height} pixels"
    if getattr(opened, "is_animated", False) and opened.format != WITH_PREVIEW:
        return f"has {opened.n_frames} frames or pages; save the one that is meant as an image"
    opened.draft(None, (-(-width // DRAFT), -(-height // DRAFT)))
    shown = ImageOps.exif_transpose(opened)
    if shown.mode.startswith(DEEP_MODES) and shown.getextrema()[1] > MAX_CHANNEL:
        return "has more than 8 bits a channel, which RGB would cut off; save it with 8"
    shown.convert("RGB")
    return ""


def _explain(image: ImageFile, error: Exception) -> str:
    """Return why an image could not be read, and what to do."""
    from PIL import UnidentifiedImageError

    path = Path(image.path)
    if isinstance(error, FileNotFoundError):
        hint = _suggest_file(path)
        return f"is missing: no file {path}{hint} Paths begin in DATA_IMAGE_FOLDER=<folder>"
    if not image.data and path.is_dir():
        return "is a folder, not an image"
    if not isinstance(error, UnidentifiedImageError):
        return f"is damaged, or breaks off ({first_line(error)}); fetch or write it anew"
    begins = image.data[:BEGINNING_BYTES]
    if not begins:
        with path.open("rb") as file:
            begins = file.read(BEGINNING_BYTES)
    if not begins:
        return "is empty; fetch or write it anew"
    text = begins.lstrip().lower()
    for beginning, meaning in BEGINNINGS.items():
        if beginning in text:
            return f"is {meaning}"
    return (
        f"is no image that is read: it begins with {shorten(repr(begins[:16])[1:])}; {AS_FORMATS}"
    )


def _suggest_file(missing: Path) -> str:
    """Return a hint that names a file or folder like a missing one, "." if there is none."""
    if not missing.parent.is_dir():
        near = _near_folder(missing.parent)
    else:
        near = _names_by_stem(missing.parent).get(missing.stem.lower(), "")
    return f"; did you mean {near}?" if near else "."


# A set may lack many files of one folder, which is listed once
_near_folder = lru_cache(maxsize=64)(nearest_path)


@lru_cache(maxsize=4)
def _names_by_stem(folder: Path) -> dict[str, str]:
    return {Path(name).stem.lower(): name for name in os.listdir(folder)}
