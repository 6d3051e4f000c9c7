"""The records of text files: JSONL, JSON and plain text. Loads no torch.

JSON is strict: unique keys, UTF-8; NaN is read like null. A text that is not UTF-8
is refused with its encoding and the command that converts it.
"""

import codecs
import json
import re
import shlex
from collections import Counter
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

from sft_play.data.rows import (
    FORMS,
    Json,
    NumberedRecord,
    NumberedRecords,
    UnreadableRecord,
    shorten,
)
from sft_play.errors import DataError

MAX_LINE_BYTES = 16 << 20  # about four million tokens; parsed, it may need 30 times as much
SAMPLED_BYTES = 64 << 10  # of a line
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
END_OF_DOCUMENT = b"<|endoftext|>"  # on its own line of a .txt file, as in TinyStories
TYPE_NAMES = {
    list: "a list",
    dict: "an object",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
# UTF-32's mark begins with that of UTF-16, so it comes first
WIDE_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Typical bytes above 127 of Windows and Latin-1 files in texts of western Europe
WESTERN = frozenset("äöüßÄÖÜéèêëàâáçñóòôõíìîïúùûåøæœÉÀÅØÆÇÑŒ‘’“”„–—…•€£°§«»·¿¡ºª\xa0")
WESTERN_SHARE = 0.95
SAMPLED_LINES = 1000  # lines that are not ASCII
CHANCE_SHARE = 0.05  # of lines in another encoding that may also be valid UTF-8
LEAST_BYTES = 8  # non-ASCII bytes that charset_normalizer needs to detect an encoding
SPLITS = {word: split for split, words in FORMS["splits"].items() for word in words.split()}
WORDS = re.compile(r"[a-z]+")
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}


class InvalidJsonError(ValueError):
    """Why a text is not JSON."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = Counter(key for key, _ in pairs)
        repeated = next(key for key in keys if keys[key] > 1)
        raise InvalidJsonError(f"the key {shorten(repeated)!r} appears twice in one object")
    return record


STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys)


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises InvalidJsonError."""
    try:
        return STRICT.decode(data.decode("utf-8") if isinstance(data, bytes) else data)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(explain_bad_json(error)) from None


def parse_json_line(line: bytes) -> Json | UnreadableRecord:
    """Return the object in a line of JSONL, or why there is none."""
    try:
        record = parse_json(line.rstrip(b"\r\n"))
        if isinstance(record, dict):
            return record
        reason = f"a row is a JSON object, not {TYPE_NAMES[type(record)]}"
    except InvalidJsonError as error:
        reason = str(error)
        if line.strip() in (b"{", b"["):
            reason = "the line ends after the first bracket; write each row on one line"
        elif not line.endswith(b"\n"):
            reason += "; the file ends with this line, perhaps cut off"
    return UnreadableRecord(reason, line.decode("utf-8", "backslashreplace").rstrip("\r\n"))


def split_of(name: str) -> str | None:
    """Return the split in a name, None if there is none.

    >>> split_of("train-00000-of-00001"), split_of("my_dev"), split_of("trainer"), split_of("a")
    ('train', 'validation', None, None)
    """
    words = WORDS.findall(name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def read_lines(path: Path, stream: IO[bytes]) -> NumberedRecords:
    """Yield the lines of a file, undecoded, without blank ones. Raises DataError."""
    is_first = True
    for number in count(1):
        line = stream.readline(MAX_LINE_BYTES)
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        elif not line:
            return
        if not line or line.isspace():
            continue
        if is_first and line.lstrip().startswith(b"["):
            raise DataError(
                f"{path}:{number}: the file begins with a JSON list; "
                "rows are one JSON object a line, and a list of them is a .json file"
            )
        if len(line) == MAX_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB; "
                f"rows are one JSON object a line; {without_long_lines(path)}"
            )
        is_first = False
        yield NumberedRecord(number, line, len(line))


def without_long_lines(path: Path) -> str:
    """Return how to split a file's long lines, or to drop them."""
    reader, source = READERS.get(path.suffix, "cat"), shlex.quote(str(path))
    command = f"{reader} {source} | LC_ALL=C awk 'length < {MAX_LINE_BYTES}' > shorter.jsonl"
    return f"split longer ones, or leave them out: {command}"


def read_documents(path: Path, stream: IO[bytes], line_by_line: bool = False) -> NumberedRecords:
    """Yield the text of a file, or its parts between END_OF_DOCUMENT lines, or its lines.

    A part of more than MAX_LINE_BYTES is split. Raises DataError.
    """
    lines: list[bytes] = []
    first_line, size = 1, 0
    bounded = iter(partial(stream.readline, MAX_LINE_BYTES), b"")
    for number, line in enumerate(chain(bounded, [END_OF_DOCUMENT]), 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if len(line) == MAX_LINE_BYTES:
            source = shlex.quote(str(path))
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB; cut the file, "
                f"and name the folder: mkdir texts; {READERS.get(path.suffix, 'cat')} {source} | "
                "split -C 8m --additional-suffix=.txt - texts/"
            )
        if line.strip() != END_OF_DOCUMENT:
            lines.append(line.strip() if line_by_line else line)
            size += len(line)
            if size < MAX_LINE_BYTES and not line_by_line:  # a longer text is read in parts
                continue
        data = b"".join(lines)
        if data.strip():
            yield NumberedRecord(first_line, read_document(data, first_line), len(data))
        lines, size = [], 0
        first_line = number + 1


def read_document(data: bytes, first_line: int) -> Json | UnreadableRecord:
    """Return a record of a text, or why there is none."""
    try:
        return {"text": data.decode("utf-8")}
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raw = data.decode("utf-8", "backslashreplace")
        return UnreadableRecord(f"not UTF-8 in line {line}; save the file as UTF-8", raw)


def split_columns(value: Json) -> Any:
    """Return one object per index of the lists in an object; other values are unchanged."""
    columns = list(value.values())
    if len(columns) < 2 or not all(isinstance(column, list) for column in columns):
        return value
    if len(set(map(len, columns))) > 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def explain_bad_json(error: ValueError | RecursionError) -> str:
    """Return why a text is not JSON."""
    match error:
        case UnicodeDecodeError():
            return f"not UTF-8 at byte {error.start}; save the file as UTF-8"
        case json.JSONDecodeError() if error.doc.startswith("\ufeff"):
            return "begins with a byte order mark, as in joined files; delete the mark"
        case json.JSONDecodeError() if "\0" in error.doc:
            return "not valid JSON: it contains NUL bytes; if the file is UTF-16, save it as UTF-8"
        case json.JSONDecodeError():
            place = f"column {error.colno}"
            if error.lineno != 1:
                place = f"line {error.lineno} {place}"
            return f"not valid JSON: {error.msg.removesuffix(' at')} at {place}"
        case RecursionError():
            return "not valid JSON: nested too deeply"
        case InvalidJsonError():  # read by Python's decoder, but not JSON by its standard
            return f"not valid JSON: {error}"
        case _:  # int() of thousands of digits
            return "not valid JSON: a number has too many digits"


def refuse_wide_encoding(path: Path, first_bytes: bytes) -> None:
    """Raise DataError for a text in UTF-16 or UTF-32, by its byte order mark."""
    for mark, encoding in WIDE_ENCODINGS.items():
        if first_bytes.startswith(mark):
            raise DataError(
                f"{path}: the text is {encoding}; {_conversion_command(path, encoding)}"
            )


def conversion_hint(path: Path, stream: IO[bytes]) -> str:
    """Return the encoding of a text that is not UTF-8, and how to convert it; "" if unknown."""
    every = iter(partial(stream.readline, SAMPLED_BYTES), b"")
    lines = list(islice((line for line in every if not line.isascii()), SAMPLED_LINES))
    in_utf8 = sum(line.decode("utf-8", "ignore").encode() == line for line in lines)
    if in_utf8 > CHANCE_SHARE * len(lines):
        return (
            f"{in_utf8} of {len(lines)} lines with letters beyond ASCII are UTF-8, so texts of two "
            "encodings were joined: convert the part that is not before it is joined"
        )
    encoding = _guess_encoding(b"".join(lines))
    if encoding is None:
        return ""
    command = _conversion_command(path, encoding)
    return f"it looks like {encoding}: {command}; see that its letters are right"


def _conversion_command(path: Path, encoding: str) -> str:
    suffixes = "".join(path.suffixes[-2:]) if path.suffix in READERS else path.suffix
    converted = path.name.removesuffix(suffixes) + ".utf8" + suffixes.removesuffix(".gz")
    target = shlex.quote(str(path.with_name(converted.removesuffix(".zst"))))
    source = shlex.quote(str(path))
    if path.suffix in READERS:
        return f"{READERS[path.suffix]} {source} | iconv -f {encoding} -t UTF-8 > {target}"
    return f"iconv -f {encoding} -t UTF-8 {source} > {target}"


def _guess_encoding(sample: bytes) -> str | None:
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
