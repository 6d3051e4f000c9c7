"""The ledger as tables, for `make data-check` and `make preview`. Only formats; counts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from sft_play.data.ledger import Ledger, SplitLedger

MAX_COLUMNS = 100  # of the text

DROPPED = {
    "bad_row": "cannot be read as a row",
    "unproven": "its answer's tokens were not found",
    "too_long": "over model.max_seq_len",
    "nothing_to_train": "no token carries loss",
    "all_excluded": "a flag excludes every answer",
    "held_out": "kept to be evaluated on",
    "evaluated_on": "evaluated on, so not trained",
}
SHORTENED = {"truncated": "cut on the left", "split": "several samples each"}
UNTRAINED = {
    "excluded": "by weight 0, train false or mask true",
    "greeting": "before the first question",
    "greeting_left_out": "as the chat template refuses it",
}
EXACT = "to the letter"
NORMALIZED = "in the same words"

Line = tuple[str, ...]  # its first cell names it


@dataclass(frozen=True)
class Table:
    """Cells under headings."""

    headings: Line
    lines: tuple[Line, ...]


def ledger_lines(ledger: Ledger) -> list[str]:
    """Return a ledger as lines: splits, then sources, then padding, then what is not used.

    The lines of tables have at most MAX_COLUMNS.
    """
    tables = [split_table(ledger), *source_tables(ledger)]
    blocks = [*map(table_lines, tables), padding_lines(ledger), ledger.notes]
    return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()


def split_table(ledger: Ledger) -> Table:
    """Return the rows and tokens of every split: rows in = used + the lines with a plus."""
    splits = list(ledger.splits.values())

    def line(label: str, path: str) -> Line:
        return label, *(_format(attrgetter(path)(split)) for split in splits)

    shares = (split.tally.trained_tokens / max(1, split.tally.tokens) for split in splits)
    lines = [
        line("rows in", "tally.rows_in"),
        line("= used", "tally.rows_used"),
        *_reason_lines(splits, "shortened", "  of them", SHORTENED),
        *_reason_lines(splits, "dropped", "+", DROPPED),
        line("samples that they give", "tally.samples"),
        line("tokens", "tally.tokens"),
        line("trained tokens", "tally.trained_tokens"),
        ("share of tokens that is trained", *map(_format, shares)),
        *_reason_lines(splits, "untrained", "answers without loss,", UNTRAINED),
        line("trained tokens lost to data.too_long", "lost_fraction"),
        line("tokens of a sample, p50", "lengths.p50"),
        line("tokens of a sample, p90", "lengths.p90"),
        line("tokens of a sample, p99", "lengths.p99"),
        line(f"longest, of model.max_seq_len={ledger.max_seq_len}", "lengths.max"),
        line(f"repeated rows, {EXACT}", "duplicates.exact"),
        line(f"repeated rows, {NORMALIZED}", "duplicates.normalised"),
        *_overlap_lines(splits),
    ]
    return Table(("", *ledger.splits), tuple(lines))


def _reason_lines(
    splits: Sequence[SplitLedger], counter: str, mark: str, meaning: Mapping[str, str]
) -> list[Line]:
    """Return a line for each reason that has a count in some split."""
    counts = [getattr(split.tally, counter) for split in splits]
    lines = []
    for reason in dict.fromkeys(chain.from_iterable(counts)):
        if any(count[reason] for count in counts):
            label = f"{mark} {reason}"
            if reason in meaning:
                label += f": {meaning[reason]}"
            lines.append((label, *(_format(count[reason]) for count in counts)))
    return lines


def _overlap_lines(splits: Sequence[SplitLedger]) -> list[Line]:
    """Return two lines for each split whose rows are looked for in another."""
    overlaps = [split.overlap or {} for split in splits]
    lines = []
    for other in dict.fromkeys(chain.from_iterable(overlaps)):
        found = [overlap.get(other) for overlap in overlaps]
        exact = [_format(equal and equal.exact) for equal in found]
        normalized = [_format(equal and equal.normalised) for equal in found]
        lines.append((f"also {other} rows, {EXACT}", *exact))
        lines.append((f"also {other} rows, {NORMALIZED}", *normalized))
    return lines


def source_tables(ledger: Ledger) -> list[Table]:
    """Return a table for each split of several sources, with their shares of a training epoch."""
    tables = []
    for name, split in ledger.splits.items():
        if len(split.sources) < 2:
            continue
        headings = (f"sources of {name}", "weight", "rows in", "= used", "+ dropped", "tokens")
        headings = (*headings, "lost", *(("an epoch", "share") if split.epoch else ()))
        lines: list[Line] = []
        for number, source in enumerate(split.sources):
            tally = source.tally
            numbers = [tally.rows_in, tally.rows_used, tally.dropped.total(), tally.tokens]
            numbers.append(tally.lost_fraction)
            if split.epoch:
                share = split.epoch[number]
                numbers += [share.samples, float(share.share)]
            weight = "-" if source.weight is None else f"{source.weight:g}"
            lines.append((source.name, weight, *map(_format, numbers)))
        tables.append(Table(headings, tuple(lines)))
    return tables


def padding_lines(ledger: Ledger) -> list[str]:
    """Return how much of an epoch is padding, with and without packing, if the ledger knows."""
    padding = ledger.padding
    if padding is None:
        return []
    unpacked = 1 - padding.real / padding.unpacked
    packed = 1 - padding.real / padding.packed
    return [
        f"padding: {unpacked:.1%} of an epoch's tokens unpacked, {packed:.1%} packed, "
        f"which computes {padding.unpacked / padding.packed:.2f} times fewer"
    ]


def table_lines(table: Table) -> list[str]:
    """Return a table as aligned text; names that are too long lose their beginning."""
    rows = [table.headings, *table.lines]
    name_width, *cell_widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = MAX_COLUMNS - sum(width + 2 for width in cell_widths)
    name_width = min(name_width, max(len(table.headings[0]), room))
    lines = []
    for name, *cells in rows:
        if len(name) > name_width:
            name = f"…{name[1 - name_width :]}"
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, cell_widths, strict=True)]
        lines.append("  ".join([f"{name:<{name_width}}", *padded]).rstrip())
    return lines


def _format(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if isinstance(value, float) else f"{value:,}"
