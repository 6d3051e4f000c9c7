"""`make data-check`: the ledger of a config's data as JSON, and as tables that a person reads. Formats; counts nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.assemble import PreparedData

WIDTH = 100  # columns that the text keeps to

DROPPED = {
    "bad_row": "cannot be read as a row",
    "unproven": "its answer's tokens were not found",
    "too_long": "over model.max_seq_len",
    "nothing_to_train": "no token carries loss",
    "held_out": "kept to be evaluated on",
    "evaluated_on": "evaluated on, so not trained",
}
SHORTENED = {"truncated": "cut on the left", "split": "several samples each"}
OVERLAP = {"exact": "to the letter", "normalised": "in the same words"}

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells under headings; the first cell of a line names it."""

    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def ledger_json(data: PreparedData, max_seq_len: int) -> dict[str, Any]:
    """Return the ledger of the training rows, those of all splits under `splits`, and the limit in tokens."""
    return {**data.ledger["train"], "splits": data.ledger, "max_seq_len": max_seq_len}


def check_lines(ledger: Facts) -> list[str]:
    """Return a ledger as lines of at most WIDTH columns: a column of counts for each split, then its sources, then padding."""
    blocks = [
        as_lines(split_table(ledger)),
        *map(as_lines, source_tables(ledger)),
        padding_lines(ledger),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()


def split_table(ledger: Facts) -> Table:
    """Return what became of the rows and tokens of every split: rows in = used + what follows with a plus."""
    splits: Mapping[str, Facts] = ledger["splits"]

    def line(label: str, cell: Callable[[Facts], Any]) -> tuple[str, ...]:
        return label, *(_cell(cell(facts)) for facts in splits.values())

    def counts(name: str, mark: str, meaning: Mapping[str, str]) -> list[tuple[str, ...]]:
        reasons = dict.fromkeys(
            reason for facts in splits.values() for reason, count in facts[name].items() if count
        )
        labels = {
            reason: f"{mark} {reason}: {meaning[reason]}"
            if reason in meaning
            else f"{mark} {reason}"
            for reason in reasons
        }
        return [
            line(label, lambda facts, reason=reason: facts[name].get(reason, 0))
            for reason, label in labels.items()
        ]

    lines = [
        line("rows in", lambda facts: facts["rows_in"]),
        line("= used", lambda facts: facts["rows_used"]),
        *counts("shortened", "  of them", SHORTENED),
        *counts("dropped", "+", DROPPED),
        line("samples that they give", lambda facts: facts["samples"]),
        line("tokens", lambda facts: facts["tokens"]),
        line("trained tokens", lambda facts: facts["trained_tokens"]),
        line(
            "share of tokens that is trained",
            lambda facts: facts["trained_tokens"] / max(1, facts["tokens"]),
        ),
        line("trained tokens lost to data.too_long", lambda facts: float(facts["lost_fraction"])),
        *(
            line(f"tokens of a sample, {name}", lambda facts, name=name: facts["lengths"][name])
            for name in ("p50", "p90", "p99")
        ),
        line(
            f"longest, of model.max_seq_len={ledger['max_seq_len']}",
            lambda facts: facts["lengths"]["max"],
        ),
        *(
            line(f"repeated rows, {told}", lambda facts, name=name: facts["duplicates"][name])
            for name, told in OVERLAP.items()
        ),
        *_overlap(splits, line),
    ]
    return Table(("", *splits), tuple(lines))


def _overlap(
    splits: Mapping[str, Facts], line: Callable[[str, Callable[[Facts], Any]], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    others = dict.fromkeys(other for facts in splits.values() for other in facts.get("overlap", {}))
    pairs = [(other, name, told) for other in others for name, told in OVERLAP.items()]
    return [
        line(
            f"also {other} rows, {told}",
            lambda facts, other=other, name=name: facts.get("overlap", {}).get(other, {}).get(name),
        )
        for other, name, told in pairs
    ]


def source_tables(ledger: Facts) -> list[Table]:
    """Return a table for each split of several sources, with their shares of an epoch where it is trained on."""
    tables = []
    for split, facts in ledger["splits"].items():
        if len(facts["sources"]) < 2:
            continue
        epoch = facts.get("epoch", [])
        headings = (
            f"sources of {split}",
            "weight",
            "rows in",
            "= used",
            "+ dropped",
            "tokens",
            "lost",
            *(("an epoch", "share") if epoch else ()),
        )
        shares = [(_cell(part["samples"]), _cell(float(part["share"]))) for part in epoch] or [
            ()
        ] * len(facts["sources"])
        tables.append(
            Table(
                headings,
                tuple(
                    (*_source(source), *share)
                    for source, share in zip(facts["sources"], shares, strict=True)
                ),
            )
        )
    return tables


def _source(facts: Facts) -> tuple[str, ...]:
    there = facts["trained_tokens"] + facts["lost_trained_tokens"]
    weight = "-" if facts["weight"] is None else f"{facts['weight']:g}"
    counts = (
        facts["rows_in"],
        facts["rows_used"],
        sum(facts["dropped"].values()),
        facts["tokens"],
        facts["lost_trained_tokens"] / max(1, there),
    )
    return facts["name"], weight, *map(_cell, counts)


def padding_lines(ledger: Facts) -> list[str]:
    """Return how much of what an epoch computes is padding, packed and not, where the ledger knows."""
    padding = ledger.get("padding")
    if not padding:
        return []
    unpacked, packed = (1 - padding["real"] / padding[name] for name in ("unpacked", "packed"))
    fewer = padding["unpacked"] / padding["packed"]
    return [
        f"padding: {unpacked:.1%} of an epoch's tokens unpacked, {packed:.1%} packed, which computes {fewer:.2f} times fewer"
    ]


def as_lines(table: Table) -> list[str]:
    """Return a table as aligned text; names that leave no room for the cells lose their beginning."""
    widths = [max(map(len, column)) for column in zip(table.headings, *table.lines, strict=True)]
    widths[0] = min(
        widths[0], max(len(table.headings[0]), WIDTH - sum(width + 2 for width in widths[1:]))
    )
    return [_aligned(cells, widths) for cells in (table.headings, *table.lines)]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    name = cells[0] if len(cells[0]) <= widths[0] else f"…{cells[0][1 - widths[0] :]}"
    return "  ".join(
        [
            f"{name:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)),
        ]
    ).rstrip()


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if isinstance(value, float) else f"{value:,}"
