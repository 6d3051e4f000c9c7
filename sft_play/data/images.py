"""Images of rows: each is opened once before training, and decoded for training.

Loads no torch.
"""

import base64
import contextlib
import hashlib
import io
import os
import struct
import warnings
import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from sft_play import reading
from sft_play.config.layers import nearest_path
from sft_play.config.schema import Config
from sft_play.data.rows import MAX_ENCODED_BYTES, ImageFile, InvalidRowError, Messages, shorten
from sft_play.data.tables import OF_A_WRONG_VALUE
from sft_play.errors import DataError, first_line
from sft_play.plan.base_model import POINTER
from sft_play.runs.files import write_bytes
from sft_play.runs.folder import cache_folder

if TYPE_CHECKING:
    from PIL import Image

# Excludes formats whose reading starts another program (EPS), or that contain no picture
IMAGE_FORMATS = "JPEG PNG WEBP GIF BMP TIFF PPM JPEG2000 AVIF".split()
AS_FORMATS = "save it as JPEG, PNG or WebP"
WITH_PREVIEW = "MPO"  # a JPEG followed by smaller ones, as phones write it
DRAFT = 8  # a JPEG is decoded at an eighth of its size, which still reads all of it
ORIENTATION = 0x0112  # the EXIF tag
TURNED = range(5, 9)  # its values for which width and height are swapped
LATE_CHUNKS = {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}  # chunks after a PNG's pixels that may rotate it
DEEP_MODES = ("I", "F")
MAX_CHANNEL = 255
FETCH_SECONDS = 60
REMEMBERED = 1 << 16  # files
BEGINNING_BYTES = 256
# Pillow checks little: a damaged file may raise any of Python's errors
# Of a file: bytes, and times in ns of which no program can set the second; None: unknown
State = tuple[int, int, int] | None
DAMAGED = (OSError, SyntaxError, EOFError, zlib.error, struct.error, *OF_A_WRONG_VALUE)
BEGINNINGS = {
    POINTER: "a pointer of git-lfs, not the image; git lfs pull fetches it",
    b"<svg": "an SVG drawing; save it as PNG",
    b"<!doctype html": "a web page, not an image; fetch the image itself",
    b"<html": "a web page, not an image; fetch the image itself",
}


@dataclass(frozen=True)
class ImageReader:
    """Opens the images of rows, each once, before training."""

    folder: Path | None = None  # base of relative paths; None: the folder of the data file
    fetched: Path | None = None  # the folder of downloaded images; None: no downloads
    decodes: bool = True  # False: only their headers are read
    states: dict[str, State] = field(default_factory=dict)  # of the files that were checked

    @classmethod
    def from_config(cls, config: Config, decodes: bool = True) -> Self:
        """Return the reader of data.image_folder and data.image_urls."""
        data = config.data
        folder = None if data.image_folder is None else Path(data.image_folder)
        fetches = data.image_urls == "fetch"
        return cls(folder, cache_folder(config) / "images" if fetches else None, decodes)

    def open_images(self, messages: Messages, data_file: Path) -> Messages:
        """Return messages with every image opened. Raises InvalidRowError, which names the image.

        Relative paths start at the folder of the data file if data.image_folder is null.
        """
        if not [message for message in messages if message.images]:
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
            return self._check(image, name)
        text = image.path
        if text.lower().startswith(("http://", "https://")):
            return self._check(replace(image, path=str(self._fetch(text, name))), name)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        path = os.path.abspath((self.folder or data_file.parent) / text)
        return self._check(replace(image, path=path), name)

    def _check(self, image: ImageFile, name: str) -> ImageFile:
        """Return an image with its displayed size. Raises InvalidRowError."""
        try:
            if image.data:
                width, height = _measure(image, self.decodes)
            else:
                state = self.states[image.path] = file_state(image.path)
                width, height = _measure_file(image, state, self.decodes)
        except InvalidRowError as error:
            raise InvalidRowError(f"{name} {error}") from None
        return replace(image, width=width, height=height)

    def _fetch(self, url: str, name: str) -> Path:
        """Return the file of a URL, which is downloaded once. Raises InvalidRowError."""
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
            self._check(ImageFile("", data, 0, 0), name)  # what is none is asked for again
            write_bytes(path, data)
        return path


BESIDE_FILES = ImageReader()


def image_limits(config: Config) -> dict[str, int]:
    """Return the limits of pixels that are set, by their names in processors."""
    data = config.data
    limits = {"min_pixels": data.image_min_pixels, "max_pixels": data.image_max_pixels}
    return {name: pixels for name, pixels in limits.items() if pixels is not None}


def decode(image: ImageFile) -> "Image.Image":
    """Return an image as transformers' load_image does: in RGB, rotated according to its EXIF data.

    Raises DataError for a file that has changed since it was checked.
    """
    from PIL import Image, ImageOps

    name = image.path or "an image in a row"
    try:
        with Image.open(_source(image), formats=IMAGE_FORMATS) as opened:
            shown = ImageOps.exif_transpose(opened).convert("RGB")
    except DAMAGED as error:
        reason = first_line(error)
        raise DataError(
            f"{name}: it was readable when the rows were tokenized and cannot be opened now "
            f"({reason}); put it back, and start again"
        ) from None
    if shown.size != (image.width, image.height):
        was = f"{image.width} x {image.height}"
        raise DataError(
            f"{name}: {shown.width} x {shown.height} pixels, and {was} when the rows were read; "
            "start again, which reads the rows again"
        )
    return shown


def encode_small(shown: "Image.Image", pixels: int) -> str:
    """Return an image in RGB, which it shrinks, as a data: URI of a JPEG of `pixels` a side."""
    shown.thumbnail((pixels, pixels))
    file = io.BytesIO()
    shown.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _source(image: ImageFile) -> Any:
    return io.BytesIO(image.data) if image.data else image.path


def file_state(path: str) -> State:
    """Return the properties of a file that a write changes."""
    with contextlib.suppress(OSError, ValueError):
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return None


def _measure(image: ImageFile, decodes: bool) -> tuple[int, int]:
    """Return width and height as shown. Raises InvalidRowError, whose reason continues the name."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if not image.data:
                reading.refuse_special(Path(image.path))
            with Image.open(_source(image), formats=IMAGE_FORMATS) as opened:
                width, height = opened.size
                _check_header(opened)
                if not decodes:
                    is_turned = _orientation(opened) in TURNED
                else:
                    is_turned = not _is_sound(opened) and _decode_small(opened)
                if is_turned:
                    width, height = height, width
    except InvalidRowError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        most = f"{Image.MAX_IMAGE_PIXELS:,}"
        raise InvalidRowError(f"has more than {most} pixels; save it smaller") from None
    except DAMAGED as error:
        raise InvalidRowError(_explain(image, error)) from None
    return width, height


# Several rows may contain one file: it is measured again if its state differs
_measure_file = lru_cache(REMEMBERED)(lambda image, state, decodes: _measure(image, decodes))


def _check_header(opened: "Image.Image") -> None:
    """Raise InvalidRowError for an image that is empty, or contains several images."""
    width, height = opened.size
    if not width * height:
        raise InvalidRowError(f"has {width} x {height} pixels")
    if getattr(opened, "is_animated", False) and opened.format != WITH_PREVIEW:
        raise InvalidRowError(
            f"has {opened.n_frames} frames or pages; save the one that is meant as an image"
        )


def _is_sound(opened: Any) -> bool:
    """Return whether an image is complete by its checksums or length, and not rotated.

    Decoding a PNG would take 30 times as long. Raises: DAMAGED.
    """
    if opened.format == "PNG":
        opened.fp.seek(opened.tile[0][2] - 8)
        if not LATE_CHUNKS.isdisjoint(opened.png.verify()):
            return False
    elif opened.format != "WEBP":  # Pillow does not open a truncated one
        return False
    return _orientation(opened) == 1 and not opened.mode.startswith(DEEP_MODES)


def _orientation(opened: Any) -> int:
    """Return the EXIF orientation tag of an image, without decoding it."""
    from PIL import Image

    return Image.Image.getexif(opened).get(ORIENTATION, 1)  # PNG's decodes


def _decode_small(opened: "Image.Image") -> bool:
    """Decode an image, a JPEG at an eighth of its size; return whether EXIF swaps its sides.

    Raises: InvalidRowError, DAMAGED.
    """
    from PIL import ImageOps

    is_turned = opened.getexif().get(ORIENTATION) in TURNED
    opened.draft(None, tuple(-(-pixels // DRAFT) for pixels in opened.size))
    ImageOps.exif_transpose(opened, in_place=True)
    is_deep = opened.mode.startswith("I") and opened.getextrema()[1] > MAX_CHANNEL
    if is_deep or opened.mode == "F":
        raise InvalidRowError(
            "has more than 8 bits a channel, which RGB would cut off; save it with 8"
        )
    opened.crop((0, 0, 1, 1)).convert("RGB")
    return is_turned


def _explain(image: ImageFile, error: Exception) -> str:
    """Return why an image could not be read, and what to do."""
    from PIL import UnidentifiedImageError

    path = Path(image.path)
    if isinstance(error, FileNotFoundError):
        hint = _suggest_file(path)
        return f"is missing: no file '{path}'{hint} Paths begin in DATA_IMAGE_FOLDER=<folder>"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    if not isinstance(error, UnidentifiedImageError):
        return f"is damaged, or breaks off ({first_line(error)}); download or write it again"
    begins = image.data[:BEGINNING_BYTES]
    if not begins:
        with path.open("rb") as file:
            begins = file.read(BEGINNING_BYTES)
    if not begins:
        return "is empty; download or write it again"
    text = begins.lstrip().lower()
    for beginning, meaning in BEGINNINGS.items():
        if beginning in text:
            return f"is {meaning}"
    return (
        f"is not a supported image: it starts with {shorten(repr(begins[:16])[1:])}; {AS_FORMATS}"
    )


def _suggest_file(missing: Path) -> str:
    """Return a hint with a file or folder similar to a missing one, "." if there is none."""
    near = ""
    with contextlib.suppress(OSError):  # of a folder that cannot be listed
        if os.path.isdir(missing.parent):
            near = _names_by_stem(missing.parent).get(missing.stem.lower(), "")
        else:
            near = _near_folder(missing.parent)
    return f"; did you mean '{near}'?" if near else "."


# Many files of one folder may be missing: the folder is listed once
_near_folder = lru_cache(maxsize=64)(nearest_path)


@lru_cache(maxsize=4)
def _names_by_stem(folder: Path) -> dict[str, str]:
    return {Path(name).stem.lower(): name for name in os.listdir(folder)}
