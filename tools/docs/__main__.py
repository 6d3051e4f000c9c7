"""Writes the parts of docs/ that the code knows: `python -m tools.docs`. No torch.

A page has a mark: what stands above it is written by hand, what stands below it is written here.
`make docs` runs this, and a test compares the pages with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sft_play.config.loader import PROJECT_ROOT
from tools.docs import commands, errors, migration, promises, support, timelines

DOCS = PROJECT_ROOT / "docs"
PICTURE = DOCS / "timelines.svg"
MARK = "<!-- From here on written by `python -m tools.docs`; edit the code instead. -->\n"
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.markdown,
    "coming-from.md": migration.markdown,
    "promises.md": promises.markdown,
    "support.md": support.markdown,
    "troubleshooting.md": errors.markdown,
}


def page(path: Path) -> str:
    """Return a page with its lower part written anew."""
    head, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{path} has lost its mark line"
    return f"{head}{MARK}\n{PAGES[path.name]().strip()}\n"


def main() -> None:
    """Write the pages, and the picture that is drawn."""
    PICTURE.write_text(timelines.svg(), encoding="utf-8")
    for name in PAGES:
        path = DOCS / name
        path.write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main()
