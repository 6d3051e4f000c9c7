"""The records of text files: JSONL, JSON and plain text. Loads no torch.

JSON is strict: unique keys, UTF-8; NaN is read, and is a value like null. A text that is not UTF-8
is refused with the encoding that it has and the command that converts it.
"""

import codecs
import io
import json
import re
import shlex
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

from sft_play.data.rows import Json, NumberedRecord, UnreadableRecord
from sft_play.errors import DataError

MAX_LINE_BYTES = 256 << 20  # a file without line breaks is not read into memory whole
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
END_OF_DOCUMENT = b"<|endoftext|>"  # alone on a line of a .txt file, as in TinyStories
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
# What the bytes above 127 of Windows and Latin-1 files mostly are in texts of western Europe
WESTERN = frozenset("äöüßÄÖÜéèêëàâáçñóòôõíìîïúùûåøæœÉÀÅØÆÇÑŒ‘’“”„–—…•€£°§«»·¿¡ºª\xa0")
WESTERN_SHARE = 0.95
SAMPLED_LINES = 1000  # that are not ASCII
CHANCE_SHARE = 0.05  # of lines of another encoding that may be UTF-8 as well
LEAST_BYTES = 8  # beyond ASCII, of which charset_normalizer can tell an encoding
SPLITS = {  # a word in the name of a file, a folder or a list: the split that it is of
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
WORDS = re.compile(r"[a-z]+")
READERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}


class InvalidJsonError(ValueError):
    """Why a text is not JSON."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise InvalidJsonError(f"the key {repeated!r} stands twice in one object")
    return record


_strict_decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
_lenient_decoder = json.JSONDecoder(parse_int=str)
_whitespace = re.compile(r"[ \t\n\r]*")


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises InvalidJsonError."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return _strict_decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(_explain(error)) from None


def parse_json_line(line: bytes) -> Json | UnreadableRecord:
    """Return the object that a line of JSONL has, or why it has none."""
    raw = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
    try:
        return _require_object(parse_json(line.rstrip(b"\r\n")), raw)
    except InvalidJsonError as error:
        reason = str(error)
        if line.strip() in (b"{", b"["):
            reason = "the line ends behind the first bracket; a row stands on one line, whole"
        elif not line.endswith(b"\n"):
            reason += "; the file ends with this line, perhaps cut off"
        return UnreadableRecord(reason, raw)


def split_of(name: str) -> str | None:
    """Return the split that a name says, None if it says none.

    >>> split_of("train-00000-of-00001"), split_of("my_dev"), split_of("trainer"), split_of("a")
    ('train', 'validation', None, None)
    """
    words = WORDS.findall(name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def read_lines(path: Path, stream: IO[bytes]) -> Iterator[NumberedRecord]:
    """Yield the lines of a JSONL file, undecoded. Raises DataError."""
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
                "rows are one JSON object a line"
            )
        is_first = False
        yield NumberedRecord(number, line, len(line))


def read_documents(stream: IO[bytes]) -> Iterator[NumberedRecord]:
    """Yield the text of a file, or its parts between lines of END_OF_DOCUMENT alone."""
    lines: list[bytes] = []
    first_line = 1
    for number, line in enumerate(chain(stream, [END_OF_DOCUMENT]), 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip() != END_OF_DOCUMENT:
            lines.append(line)
            continue
        data = b"".join(lines)
        if data.strip():
            yield NumberedRecord(first_line, _read_document(data, first_line), len(data))
        lines = []
        first_line = number + 1


def _read_document(data: bytes, first_line: int) -> Json | UnreadableRecord:
    try:
        return {"text": data.decode("utf-8")}
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raw = data.decode("utf-8", "backslashreplace")
        return UnreadableRecord(f"not UTF-8 in line {line}; save the file as UTF-8", raw)


def read_json(path: Path, data: bytes) -> Iterator[NumberedRecord]:
    """Yield the elements of the list that a .json file has. Raises DataError."""
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        hint = conversion_hint(path, io.BytesIO(data))
        raise DataError(
            f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8; {hint}"
        ) from None
    if text.lstrip().startswith("["):
        yield from _read_list(path, text)
    elif text.strip():
        yield from _read_object(path, text)


def _read_list(path: Path, text: str) -> Iterator[NumberedRecord]:
    """Yield the elements of a JSON list one by one, each parsed when it is asked for."""
    index = 0
    position = _skip_whitespace(text, _skip_whitespace(text, 0) + 1)
    while not text.startswith("]", position):
        start = position
        try:
            record, end = _strict_decoder.raw_decode(text, start)
            record = _require_object(record, text[start:end])
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}[{index}]: {_explain(error)}") from None
        except ValueError as error:  # Python's own decoder accepts the text and tells where it ends
            _, end = _lenient_decoder.raw_decode(text, start)
            record = UnreadableRecord(_explain(error), text[start:end])
        yield NumberedRecord(index, record, end - start)
        index += 1
        position = _skip_whitespace(text, end)
        following = _skip_whitespace(text, position + 1)
        if text.startswith(",", position) and not text.startswith("]", following):
            position = following
        elif position == len(text):
            raise DataError(
                f"{path}[{index}]: not valid JSON: the list has no end; the file is perhaps cut off"
            )
        elif not text.startswith("]", position):
            where = _line_and_column(text, position)
            raise DataError(f"{path}[{index}]: not valid JSON: no comma before this row, {where}")
    if _skip_whitespace(text, position + 1) != len(text):
        raise DataError(
            f"{path}[{index}]: more text behind the end of the list, "
            f"{_line_and_column(text, position + 1)}; a .json file holds one list of rows"
        )


def _read_object(path: Path, text: str) -> Iterator[NumberedRecord]:
    """Yield the rows of one object, or of an object a line.

    One object is `{"data": [...]}`, or has the columns, as pandas and datasets write a table.
    """
    first, _, rest = text.strip().partition("\n")
    if first.startswith("{") and first.rstrip().endswith("}") and rest.lstrip().startswith("{"):
        lines = io.BytesIO(text.encode())  # which break at \n alone, unlike str.splitlines
        for index, line in enumerate(filter(bytes.strip, lines)):
            yield NumberedRecord(index, parse_json_line(line), len(line))
        return
    try:
        value = parse_json(text)
    except InvalidJsonError as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: a .json data file holds a list of rows, not {TYPE_NAMES[type(value)]}"
        )
    is_line = not rest and text.endswith("\n")  # as Spark writes one row
    for index, record in enumerate(_find_rows(path, value, is_line)):
        yield NumberedRecord(index, _require_object(record, json.dumps(record)), characters=0)


def _find_rows(path: Path, value: Json, is_line: bool) -> list[Any]:
    """Return the rows that one object has. Raises DataError."""
    lists = [key for key, held in value.items() if isinstance(held, list)]
    if lists == ["data"]:
        return value["data"]
    if lists == ["columns", "index", "data"]:  # pandas, orient="split"
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    splits = [key for key in lists if split_of(key)]
    if splits:
        commands = (
            shlex.join(["jq", "-c", f".{split}[]", str(path)]) + f" > {split}.jsonl"
            for split in splits
        )
        raise DataError(
            f"{path}: one object with the splits {', '.join(splits)}; "
            f"write each as a file of its own: {'; '.join(commands)}"
        )
    held = list(value.values())
    if held and all(isinstance(column, dict) and column for column in held):
        if all(key.isdecimal() for key in value):  # pandas, orient="index"
            return held
        if all(column.keys() == held[0].keys() for column in held):  # pandas, orient="columns"
            value = {key: list(column.values()) for key, column in value.items()}
            lists = list(value)
    rows = split_columns(value)
    if rows is not value:
        return rows
    if is_line:
        return [value]
    found = f"the keys {', '.join(value) or 'none'}"
    if lists:
        found = f"the lists {', '.join(lists)}"
    raise DataError(
        f'{path}: a .json data file holds a list of rows, or {{"data": [...]}} '
        f"and no other list; this is one object with {found}"
    )


def split_columns(value: Json) -> Any:
    """Return an object for each place of the lists of an object; other values as they are."""
    columns = list(value.values())
    if len(columns) < 2 or not all(isinstance(column, list) for column in columns):
        return value
    if len(set(map(len, columns))) > 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def _require_object(record: Any, raw: str) -> Json | UnreadableRecord:
    if isinstance(record, dict):
        return record
    return UnreadableRecord(f"a row is a JSON object, not {TYPE_NAMES[type(record)]}", raw)


def _skip_whitespace(text: str, position: int) -> int:
    return _whitespace.match(text, position).end()


def _line_and_column(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"at line {line} column {column}"


def _explain(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"not UTF-8 at byte {error.start}; save the file as UTF-8"
        case json.JSONDecodeError() if error.doc.startswith("\ufeff"):
            return "begins with a byte order mark, as where files were joined; delete the mark"
        case json.JSONDecodeError() if "\0" in error.doc:
            return "not valid JSON: it holds NUL bytes; if the file is UTF-16, save it as UTF-8"
        case json.JSONDecodeError():
            place = f"column {error.colno}"
            if error.lineno != 1:
                place = f"line {error.lineno} {place}"
            return f"not valid JSON: {error.msg.removesuffix(' at')} at {place}"
        case RecursionError():
            return "not valid JSON: nested too deeply"
        case InvalidJsonError():  # read by Python's own decoder, but no JSON by its standard
            return f"not valid JSON: {error}"
        case _:  # int() of thousands of digits
            return "not valid JSON: a number has too many digits"


def refuse_wide_encoding(path: Path, first_bytes: bytes) -> None:
    """Raise DataError for a text in UTF-16 or UTF-32, which its byte order mark tells."""
    for mark, encoding in WIDE_ENCODINGS.items():
        if first_bytes.startswith(mark):
            raise DataError(
                f"{path}: the text is {encoding}; {_conversion_command(path, encoding)}"
            )


def conversion_hint(path: Path, stream: IO[bytes]) -> str:
    """Return which encoding a text has that is not UTF-8, and how to convert it; "" if unknown."""
    lines = list(islice((line for line in stream if not line.isascii()), SAMPLED_LINES))
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
