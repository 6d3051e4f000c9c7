"""Excel files, by the openpyxl package where it is installed. The first row names the columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.data.csv_files import name_columns
from sft_play.data.rows import Json, NumberedRecord, UnreadableRecord
from sft_play.errors import DataError, EnvironmentFault


def read_sheet(path: Path) -> Iterator[NumberedRecord]:
    """Yield the rows of a workbook's only sheet. Whole numbers become texts, as in a CSV file.

    Raises: DataError for a damaged file or several sheets, EnvironmentFault without openpyxl.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise EnvironmentFault(
            f"{path}: reading Excel files needs a package: pip install openpyxl; "
            "or save the sheet as CSV UTF-8"
        ) from None
    try:
        book = load_workbook(path, read_only=True, data_only=True)
    except (OSError, ValueError, KeyError) as error:  # no zip file, or one without a workbook
        raise DataError(f"{path}: no .xlsx file, or a damaged one ({error})") from None
    if len(book.sheetnames) > 1:
        raise DataError(
            f"{path}: the sheets are {', '.join(book.sheetnames)}; "
            "keep one, or save the one with the rows as CSV UTF-8"
        )
    header: list[str] = []
    for number, cells in enumerate(book.worksheets[0].iter_rows(values_only=True), 1):
        if all(cell is None for cell in cells):
            continue
        if not header:
            names = ["" if cell is None else str(cell) for cell in cells]
            header = name_columns(f"{path}:{number}: the first line names the columns", names)
            continue
        record: Json | UnreadableRecord = dict(zip(header, map(_as_text, cells), strict=False))
        if any(cell is not None for cell in cells[len(header) :]):
            record = UnreadableRecord(
                f"a cell behind the {len(header)} columns that the first line names", repr(cells)
            )
        yield NumberedRecord(number, record, sum(len(str(cell)) for cell in cells))
    book.close()


def _as_text(cell: Any) -> Any:
    return str(cell) if type(cell) is int else cell
