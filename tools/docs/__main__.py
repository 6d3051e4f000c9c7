"""Writes the parts of docs/ that the code knows: `python -m tools.docs`. No torch.

A page has a mark: the part above it is written by hand, the part below it is written here.
`make docs` runs this, and a test compares the pages with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sft_play.config.loader import PROJECT_ROOT
from tools.docs import commands, errors, migration, promises, support

DOCS = PROJECT_ROOT / "docs"
MARK = "<!-- From here on written by `python -m tools.docs`; edit the code instead. -->\n"
PAGES: Mapping[str, Callable[[], str]] = {
    "evidence/commands.md": commands.markdown,
    "evidence/coming-from.md": migration.markdown,
    "evidence/errors.md": errors.markdown,
    "evidence/promises.md": promises.markdown,
    "evidence/promises-gpu.md": promises.gpu_markdown,
    "models.md": support.markdown,
}


def page(name: str) -> str:
    """Return a page with its lower part written again."""
    head, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    assert mark, f"docs/{name} has lost its mark line"
    return f"{head}{MARK}\n{PAGES[name]().strip()}\n"


def main() -> None:
    """Write the pages."""
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
