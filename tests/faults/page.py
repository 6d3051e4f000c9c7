"""docs/evidence/reliability.md: the matrix and the counts, from what `make test-faults` noted.

It is kept in seen.json, by row, so that some rows can be run again.
"""

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from faults.bench import Fault
from faults.table import FAULTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "reliability.md"
MARK = "<!-- From here on written by `make test-faults` from what it saw. -->\n"
SEEN = Path(__file__).with_name("seen.json")
CELL = 90  # characters
VARIABLE = "SFT_PLAY_NOTE_FAULTS"  # set by `make test-faults`


def note(table: str, name: str, **facts: Any) -> None:
    """Note what was seen of a row, where `make test-faults` runs."""
    if VARIABLE not in os.environ:
        return
    seen = read()
    row = seen.setdefault(table, {}).setdefault(name, {})
    row.update({key: of_any_machine(value) for key, value in facts.items()})
    row["date"] = time.strftime("%Y-%m-%d")
    SEEN.write_text(json.dumps(seen, indent=2, sort_keys=True) + "\n")


def of_any_machine(value: Any) -> Any:
    """Return a note with the first line of each text, and without the folders of this machine."""
    if isinstance(value, list):
        return [of_any_machine(each) for each in value]
    if not isinstance(value, str):
        return value
    text = value.partition("\n")[0].replace(f"{ROOT}/", "")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*", "a temporary folder", text)


def read() -> dict[str, Any]:
    """Return what was noted."""
    return json.loads(SEEN.read_text()) if SEEN.exists() else {}


def write() -> None:
    """Write the lower part of the page again."""
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page with what was seen."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return f"{head.rstrip()}\n\n{MARK}\n{markdown(read())}"


def markdown(seen: dict[str, Any]) -> str:
    """Return both tables."""
    return f"{counts(seen.get('counts', {}))}\n{matrix(seen.get('rows', {}))}"


def counts(seen: dict[str, dict[str, Any]]) -> str:
    """Return the table of the counts."""
    lines = [
        "## Counts\n",
        "On two shared CPU cores, with the tiny model. `make test-faults ROWS=` with the name of a "
        "row prints it again; where fewer than the target were seen, fewer were run (`COUNT=`).\n",
        "| row | what is counted | target | seen | on |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in sorted(seen.items()):
        lines.append(
            f"| {name} | {row['counted']} | {row['target']} | {row['seen']} | {row['date']} |"
        )
    return "\n".join(lines) + "\n"


def matrix(seen: dict[str, dict[str, Any]]) -> str:
    """Return the table of the faults."""
    kept = sum(seen.get(row.name, {}).get("kept", False) for row in FAULTS)
    broken = sum(bool(seen.get(row.name, {}).get("without")) for row in FAULTS)
    lines = [
        "## The fault matrix\n",
        f"{len(FAULTS)} faults, each injected for real; {kept} kept their contract, and {broken} "
        "broke it once what guards them was taken away. The contract of each: the exit class, the "
        "words, the steps that are lost at most, no process left behind, and the time.\n",
        "| fault | what follows | seen | without its guard |",
        "| --- | --- | --- | --- |",
    ]
    lines += [line(row, seen.get(row.name, {})) for row in FAULTS]
    return "\n".join(lines) + "\n"


def shortened(words: str) -> str:
    """Return the words that fit into a cell."""
    if len(words) <= CELL:
        return words
    return f"{words[:CELL].rpartition(' ')[0]} ..."


def line(row: Fault, seen: dict[str, Any]) -> str:
    """Return the line of a fault."""
    follows = f"class {row.exit_class:d}" if row.exit_class else "it continues"
    words = "; ".join(f"“{part.strip(' ;')}”" for part in row.says)
    lost = "" if row.loses is None else f"; {row.loses} steps lost at most"
    found = "not run"
    if "kept" in seen:
        kept = "kept" if seen["kept"] else "BROKEN: " + "; ".join(seen["problems"])
        found = f"{kept}, {seen['seconds']:.1f} s, {seen['date']}"
    guard = row.guard.path.replace("sft_play.", "").replace(":", ".")
    without = shortened(", ".join(seen.get("without", ["not run"])).partition("\n")[0])
    cells = (f"{row.injected} (`{row.name}`)", f"{follows}: {words}{lost}" if words else follows)
    cells += (found, f"`{guard}`: {without}")
    return f"| {' | '.join(cell.replace('|', '&#124;').replace('<', '&lt;') for cell in cells)} |"
