"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells, in which a bar is not the end of one."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
