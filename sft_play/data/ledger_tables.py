"""The ledger as tables, for `make data-check` and `make preview`. Only formats; counts nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from sft_play.data.ledger import Ledger, SourceLedger, SplitLedger

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

Cell = float | None


@dataclass(frozen=True)
class Table:
    """Cells under headings; the first cell of a line names it."""

    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def ledger_lines(ledger: Ledger) -> list[str]:
    """Return a ledger as lines: splits, then sources, then padding, then what is not used.

    The lines of tables have at most MAX_COLUMNS.
    """
    blocks = [table_lines(split_table(ledger))]
    blocks += [table_lines(table) for table in source_tables(ledger)]
    blocks.append(padding_lines(ledger))
    blocks.append(ledger.notes)
    return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()


def split_table(ledger: Ledger) -> Table:
    """Return the rows and tokens of every split: rows in = used + the lines with a plus."""
    line = _LineBuilder(ledger.splits)
    lines = [
        line("rows in", lambda split: split.rows_in),
        line("= used", lambda split: split.rows_used),
        *line.for_reasons(lambda split: split.shortened, "  of them", SHORTENED),
        *line.for_reasons(lambda split: split.dropped, "+", DROPPED),
        line("samples that they give", lambda split: split.samples),
        line("tokens", lambda split: split.tokens),
        line("trained tokens", lambda split: split.trained_tokens),
        line("share of tokens that is trained", _trained_share),
        *line.for_reasons(lambda split: split.untrained, "answers without loss,", UNTRAINED),
        line("trained tokens lost to data.too_long", lambda split: float(split.lost_fraction)),
        line("tokens of a sample, p50", lambda split: split.lengths.p50),
        line("tokens of a sample, p90", lambda split: split.lengths.p90),
        line("tokens of a sample, p99", lambda split: split.lengths.p99),
        line(
            f"longest, of model.max_seq_len={ledger.max_seq_len}",
            lambda split: split.lengths.max,
        ),
        line(f"repeated rows, {EXACT}", lambda split: split.duplicates.exact),
        line(f"repeated rows, {NORMALIZED}", lambda split: split.duplicates.normalized),
        *line.for_overlap(),
    ]
    return Table(("", *ledger.splits), tuple(lines))


class _LineBuilder:
    """Builds lines with a cell for each split."""

    def __init__(self, splits: Mapping[str, SplitLedger]):
        self._splits = splits

    def __call__(self, label: str, value: Callable[[SplitLedger], Cell]) -> tuple[str, ...]:
        return label, *(_format(value(split)) for split in self._splits.values())

    def for_reasons(
        self,
        counts_of: Callable[[SplitLedger], Mapping[str, int]],
        mark: str,
        meaning: Mapping[str, str],
    ) -> list[tuple[str, ...]]:
        """Return a line for each reason that has a count in some split."""
        reasons: list[str] = []
        for split in self._splits.values():
            for reason, count in counts_of(split).items():
                if count and reason not in reasons:
                    reasons.append(reason)
        lines = []
        for reason in reasons:
            label = f"{mark} {reason}"
            if reason in meaning:
                label += f": {meaning[reason]}"
            cells = [_format(counts_of(split).get(reason, 0)) for split in self._splits.values()]
            lines.append((label, *cells))
        return lines

    def for_overlap(self) -> list[tuple[str, ...]]:
        """Return two lines for each split whose rows are looked for in another."""
        overlaps = [split.overlap or {} for split in self._splits.values()]
        lines = []
        for other in dict.fromkeys(chain.from_iterable(overlaps)):
            found = [overlap.get(other) for overlap in overlaps]
            exact = [_format(equal and equal.exact) for equal in found]
            normalized = [_format(equal and equal.normalized) for equal in found]
            lines.append((f"also {other} rows, {EXACT}", *exact))
            lines.append((f"also {other} rows, {NORMALIZED}", *normalized))
        return lines


def _trained_share(split: SplitLedger) -> float:
    return split.trained_tokens / max(1, split.tokens)


def source_tables(ledger: Ledger) -> list[Table]:
    """Return a table for each split of several sources, with their shares of a training epoch."""
    tables = []
    for name, split in ledger.splits.items():
        if len(split.sources) < 2:
            continue
        headings = (
            f"sources of {name}",
            "weight",
            "rows in",
            "= used",
            "+ dropped",
            "tokens",
            "lost",
        )
        lines = [_source_cells(source) for source in split.sources]
        if split.epoch:
            headings = (*headings, "an epoch", "share")
            for number, share in enumerate(split.epoch):
                lines[number] += (_format(share.samples), _format(float(share.share)))
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
    return [_align(row, name_width, cell_widths) for row in rows]


def _align(row: Sequence[str], name_width: int, cell_widths: Sequence[int]) -> str:
    name, *cells = row
    if len(name) > name_width:
        name = f"…{name[1 - name_width :]}"
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, cell_widths, strict=True)]
    return "  ".join([f"{name:<{name_width}}", *padded]).rstrip()


def _source_cells(source: SourceLedger) -> tuple[str, ...]:
    tally = source.tally
    return (
        source.name,
        "-" if source.weight is None else f"{source.weight:g}",
        _format(tally.rows_in),
        _format(tally.rows_used),
        _format(tally.dropped.total()),
        _format(tally.tokens),
        _format(tally.lost_fraction),
    )


def _format(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if isinstance(value, float) else f"{value:,}"
