"""Tables for a terminal. Pure."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines: the columns of `left` begin, and the others end, at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = [
            cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in cells
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
