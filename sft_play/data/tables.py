"""The records of CSV, TSV and Excel files. The first row names the columns."""

import contextlib
import csv
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sft_play import reading
from sft_play.data.rows import Json, NumberedRecord, NumberedRecords, UnreadableRecord, shorten
from sft_play.data.text_files import MAX_LINE_BYTES
from sft_play.errors import DataError, first_line

DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = (";", "\t", "|")  # in .csv files
EXCEL_HINTS = ("sep=,", "sep=;", "sep=|", "sep=")  # a line for Excel, before the first row
PANDAS_INDEX = "Unnamed: 0"
# Characters per row. A quote that is never closed includes everything after it. The csv module's
# limit is 128 KiB, shorter than some documents.
MAX_FIELD_CHARACTERS = MAX_LINE_BYTES
MAX_SHEET_ROWS = 1 << 20  # Excel's
PLAIN_FORMATS = ("General", "0", "@")  # of a number: only its digits
AS_CSV = "save the sheet as CSV UTF-8"
OF_A_WRONG_VALUE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_table(path: Path, text: IO[str], delimiter: str) -> NumberedRecords:
    """Yield the records of a table, each with the line on which it starts.

    If commas are expected, the delimiter is the one of OTHER_DELIMITERS of which the first line
    has more than commas. Raises DataError.
    """
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    first_line = text.readline(MAX_FIELD_CHARACTERS)
    lines_before = 0
    if first_line.strip().lower() in EXCEL_HINTS:
        first_line = text.readline(MAX_FIELD_CHARACTERS)
        lines_before = 1
    if delimiter == ",":
        delimiter = _find_delimiter(first_line)
    lines = _Lines(first_line, text)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1 + lines_before
        lines.row_characters = 0
        try:
            fields = next(reader, None)
        except csv.Error as error:  # the start of the next row is unknown
            reason = f"not valid CSV: {error}"
            is_long = "larger" in str(error)
            if is_long or "unexpected end" in str(error):
                reason = "a quote is opened in this row and never closed"
            if is_long:
                reason += f", or it has more than {MAX_FIELD_CHARACTERS >> 20} MiB: split it"
            raise DataError(f"{path}:{line}: {reason}; quotes inside a field are doubled") from None
        if fields is None:
            return
        if not fields or (len(fields) == 1 and not fields[0].strip()):
            continue
        if not header:
            where = f"{path}:{line}: the first line names the columns"
            _check_delimiter(where, fields, delimiter)
            header = name_columns(where, fields)
            continue
        row_text = delimiter.join(fields)
        yield NumberedRecord(line, _parse_row(header, fields, row_text), len(row_text))


class _Lines(Iterator[str]):
    """The lines of a table. Raises csv.Error for a row that is too long."""

    def __init__(self, first: str, text: IO[str]):
        self._lines = chain([first], iter(partial(text.readline, MAX_FIELD_CHARACTERS), ""))
        self.row_characters = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self.row_characters += len(line)
        if self.row_characters >= MAX_FIELD_CHARACTERS:
            raise csv.Error("row larger than the limit")
        return line


def _find_delimiter(first_line: str) -> str:
    """Return the delimiter by which the first line has the most fields; a comma is preferred."""

    fields = {
        delimiter: next(csv.reader([first_line], delimiter=delimiter), [])
        for delimiter in (",", *OTHER_DELIMITERS)
    }
    return max(fields, key=lambda delimiter: len(fields[delimiter]))


def name_columns(where: str, names: list[str]) -> list[str]:
    """Return the names of columns without blanks around them; `where` begins errors.

    Columns at the end that have no name are left out.
    A first column without a name, as pandas writes its index, gets the name that pandas uses.
    """
    names = list(map(str.strip, names))
    while names and not names[-1]:
        names.pop()
    if names and not names[0]:
        names[0] = PANDAS_INDEX
    for number, name in enumerate(names, 1):
        if not name:
            raise DataError(f"{where}, and number {number} of {len(names)} has no name")
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{where}, and {shorten(name)!r} appears twice")
    return names


def _check_delimiter(where: str, names: list[str], delimiter: str) -> None:
    if len(names) > 1:
        return
    for other in ";\t|,":
        if other != delimiter and other in names[0]:
            expected = "tabs" if delimiter == "\t" else "commas"
            raise DataError(
                f"{where}, and this has one, {names[0]!r}; "
                f"separate fields by {expected}, not by {other!r}"
            )


def _parse_row(header: list[str], fields: list[str], row_text: str) -> Json | UnreadableRecord:
    try:
        row_text.encode("utf-8")
    except UnicodeEncodeError:
        raw = row_text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return UnreadableRecord("not UTF-8; save the file as UTF-8", raw)
    while len(fields) > len(header) and not fields[-1].strip():
        fields.pop()  # empty columns after the last named one
    if len(fields) != len(header):
        reason = (
            f"{len(fields)} fields, and the first line names {len(header)} columns; "
            "put a field that contains the separator in quotes"
        )
        return UnreadableRecord(reason, row_text)
    return dict(zip(header, fields, strict=True))


def read_sheet(path: Path) -> NumberedRecords:
    """Yield the rows of a workbook's only sheet. Integers become texts as they are displayed.

    Raises: DataError for a damaged file or several sheets.
    """
    file_bytes = path.stat().st_size
    header: list[str] = []
    characters = 0
    for number, cells in enumerate(_read_cells(path, file_bytes), 1):
        if number > MAX_SHEET_ROWS:
            raise DataError(f"{path}:{number}: no sheet has so many rows; save it again")
        if all(cell is None for cell in cells):
            continue
        if not header:
            names = ["" if cell is None else str(cell) for cell in cells]
            header = name_columns(f"{path}:{number}: the first line names the columns", names)
            continue
        cells += (None,) * (len(header) - len(cells))
        record: Json | UnreadableRecord = dict(zip(header, cells, strict=False))
        if any(cell is not None for cell in cells[len(header) :]):
            record = UnreadableRecord(
                f"a cell after the {len(header)} columns that the first line names", repr(cells)
            )
        size = sum(len(str(cell)) for cell in cells)
        characters += size
        reading.refuse_bomb(file_bytes, characters, AS_CSV)
        yield NumberedRecord(number, record, size)


def _read_cells(path: Path, file_bytes: int) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of each row. Raises: as `read_sheet`."""
    from openpyxl import load_workbook  # it takes a while to load

    try:
        with zipfile.ZipFile(path) as parts:
            unpacked = sum(part.file_size for part in parts.infolist())
        reading.refuse_bomb(file_bytes, unpacked, AS_CSV)
        with contextlib.closing(load_workbook(path, read_only=True, data_only=True)) as book:
            names = book.sheetnames
            if len(names) == 1:
                sheet = book.worksheets[0]
                sheet.reset_dimensions()  # which may name more cells than there are
                for row in sheet.iter_rows():
                    yield tuple(_as_shown(cell) for cell in row)
    # openpyxl checks little: a damaged file may raise any of Python's errors
    except (zipfile.BadZipFile, zlib.error, SyntaxError, *OF_A_WRONG_VALUE) as error:
        reason = first_line(error)
        raise DataError(f"{path}: no .xlsx file, or a damaged one ({reason}); {AS_CSV}") from None
    if len(names) > 1:
        raise DataError(
            f"{path}: the sheets are {', '.join(names)}; "
            "keep one, or save the one with the rows as CSV UTF-8"
        )


def _as_shown(cell: Any) -> Any:
    """Return a cell's value; an integer as text if the sheet shows its plain digits.

    With another number format (0007, 12 EUR, 100 %) it stays a number, which no text accepts.
    """
    is_plain = type(cell.value) is int and cell.number_format in PLAIN_FORMATS
    return str(cell.value) if is_plain else cell.value
