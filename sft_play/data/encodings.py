"""Text files that are not UTF-8: which encoding they have, and the command that converts them."""

import codecs
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from sft_play.errors import DataError

# UTF-32's mark begins with that of UTF-16, so it comes first
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# What the bytes above 127 of Windows and Latin-1 files mostly are in texts of western Europe
WESTERN = frozenset("äöüßÄÖÜéèêëàâáçñóòôõíìîïúùûåøæœÉÀÅØÆÇÑŒ‘’“”„–—…•€£°§«»·¿¡ºª\xa0")
WESTERN_SHARE = 0.95
SAMPLED_LINES = 1000  # that are not ASCII
CHANCE_SHARE = 0.05  # of lines of another encoding that may be UTF-8 as well
LEAST_BYTES = 8  # beyond ASCII, of which charset_normalizer can tell an encoding
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}


def refuse_wide_encoding(path: Path, first_bytes: bytes) -> None:
    """Raise DataError for a text in UTF-16 or UTF-32, which its byte order mark tells."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if first_bytes.startswith(mark):
            raise DataError(f"{path}: the text is {encoding}; {_convert(path, encoding)}")


def conversion_hint(path: Path, stream: IO[bytes]) -> str:
    """Return which encoding a text has that is not UTF-8, and how to convert it; "" if unknown."""
    lines = list(islice(_lines_beyond_ascii(stream), SAMPLED_LINES))
    in_utf8 = sum(map(_is_utf8, lines))
    if in_utf8 > CHANCE_SHARE * len(lines):
        return (
            f"{in_utf8} of {len(lines)} lines with letters beyond ASCII are UTF-8, so texts of two "
            "encodings were joined: convert the part that is not before it is joined"
        )
    encoding = _guess(b"".join(lines))
    if encoding is None:
        return ""
    return f"it looks like {encoding}: {_convert(path, encoding)}; see that its letters are right"


def _convert(path: Path, encoding: str) -> str:
    suffixes = "".join(path.suffixes[-2:]) if path.suffix in READERS else path.suffix
    converted = path.name.removesuffix(suffixes) + ".utf8" + suffixes.removesuffix(".gz")
    target = shlex.quote(str(path.with_name(converted.removesuffix(".zst"))))
    source = shlex.quote(str(path))
    if path.suffix in READERS:
        return f"{READERS[path.suffix]} {source} | iconv -f {encoding} -t UTF-8 > {target}"
    return f"iconv -f {encoding} -t UTF-8 {source} > {target}"


def _lines_beyond_ascii(stream: IO[bytes]) -> Iterator[bytes]:
    return (line for line in stream if not line.isascii())


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _guess(sample: bytes) -> str | None:
    try:
        western = sample.decode("cp1252")
    except UnicodeDecodeError:
        western = ""
    beyond_ascii = [character for character in western if not character.isascii()]
    known = sum(character in WESTERN for character in beyond_ascii)
    if beyond_ascii and known >= WESTERN_SHARE * len(beyond_ascii):
        return "cp1252"
    if sum(byte > 127 for byte in sample) < LEAST_BYTES:
        return None
    from charset_normalizer import from_bytes  # takes a tenth of a second to load

    found = from_bytes(sample).best()
    return found.encoding if found else None
