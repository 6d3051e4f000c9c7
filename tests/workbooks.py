"""Excel files made by hand, from the XML of one sheet: also those that no program would write."""

import zipfile
from pathlib import Path

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"
PARTS = {
    "workbook.xml": "sheet.main",
    "sheet.xml": "worksheet",
    "sharedStrings.xml": "sharedStrings",
}


def text(words: str) -> str:
    """Return a cell with a text of its own."""
    return f'<c t="inlineStr"><is><t>{words}</t></is></c>'


def row(*cells: str, number: int | str = "") -> str:
    """Return a row of cells."""
    place = f' r="{number}"' if number else ""
    return f"<row{place}>{''.join(cells)}</row>"


HEAD = row(text("question"), text("answer"), number=1)
PAIR = row(text("q"), text("a"))
SHARED = row('<c t="s"><v>0</v></c>' * 2)  # both cells have the first of the shared texts


def write_workbook(path: Path, rows: str, before: str = "", shared: str = "x") -> Path:
    """Write a workbook whose sheet has rows after its head; `before` comes before them."""

    def related(*targets: str) -> str:
        kinds = {"xl/workbook.xml": "officeDocument", "sheet.xml": "worksheet"}
        entries = (
            f'<Relationship Id="rId{number}" Target="{target}" '
            f'Type="{OFFICE}/{kinds.get(target, "sharedStrings")}"/>'
            for number, target in enumerate(targets, 1)
        )
        return f'<Relationships xmlns="{PACKAGE}/relationships">{"".join(entries)}</Relationships>'

    types = "".join(
        f'<Override PartName="/xl/{part}" ContentType="{TYPE}.{kind}+xml"/>'
        for part, kind in PARTS.items()
    )
    files = {
        "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">{types}</Types>',
        "_rels/.rels": related("xl/workbook.xml"),
        "xl/_rels/workbook.xml.rels": related("sheet.xml", "sharedStrings.xml"),
        "xl/workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}"><sheets>'
        '<sheet name="a" sheetId="1" r:id="rId1"/></sheets></workbook>',
        "xl/sharedStrings.xml": f'<sst xmlns="{MAIN}"><si><t>{shared}</t></si></sst>',
        "xl/sheet.xml": f'<worksheet xmlns="{MAIN}">{before}'
        f"<sheetData>{HEAD}{rows}</sheetData></worksheet>",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path
