"""The table of docs/evidence/architectures.md: what was tried of each model type.

The tests marked `architectures` record a row each; the process that started them writes the page
when all rows are there.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "architectures.md"
NEWEST_PAGE = PAGE.with_name("architectures-newest.md")
PROPERTY = "architecture"  # of a test's report
MODES = ("lora", "qlora", "full")
YES = "yes"
REFUSED = "refused: "
FAILS = "fails: "

HEAD = """# Model types that were tried

Written by `{command}`, which trains a tiny model with random weights of every model
type below on a CPU; do not edit. Versions: {versions}.

- **lora, qlora, full**: twelve steps through the loader, the adapters and the trainer of a run. Every
  trained weight moved and the loss fell.
- **packed**: three documents in one row, through the run's collator and loss, against plain
  transformers and PEFT on each document by itself. Exact means that loss, logits and all gradients
  differ by the rounding of float32 sums alone.
- **reloads**: the saved adapter, loaded by PEFT on transformers in a process without this project,
  has the logits that the run had.
- **fused**: the parts that fused kernels compute, with the number of modules; then the parts that
  the model's own code computes, and why. On a GPU the norms are fused too.

A type that is not here is treated the same way: each part is recognized by what its modules are and
proves itself before the first step, and a packed run checks that its documents stay apart.

Types of newer versions than `make install` brings are in
[architectures-newest.md](architectures-newest.md). The types here are configs of text alone; [composite.md](composite.md) has checkpoints with encoders for
images or sound, as they are published.
"""
COLUMNS = ("model type", *MODES, "packed", "reloads", "fused", "not fused, and why")


@dataclass
class Row:
    """What was found of one model type; texts begin with YES, REFUSED or FAILS."""

    model_type: str
    trains: dict[str, str] = field(default_factory=dict)  # by mode
    packed: str = ""
    reloads: dict[str, str] = field(default_factory=dict)  # by mode
    on: dict[str, int] = field(default_factory=dict)  # fused parts and their modules
    off: dict[str, str] = field(default_factory=dict)  # other parts and why

    def failures(self) -> list[str]:
        """Return what neither works nor is refused in words."""
        named = {**{f"train {mode}": text for mode, text in self.trains.items()}}
        named.update({f"reload {mode}": text for mode, text in self.reloads.items()})
        named["packed"] = self.packed
        return [f"{name} {text}" for name, text in named.items() if text.startswith(FAILS)]

    def cells(self) -> list[str]:
        """Return the texts of the row's columns."""
        on = ", ".join(f"{part} ×{count}" for part, count in self.on.items())
        off = "; ".join(f"{part}: {reason}" for part, reason in self.off.items())
        trains = [self.trains.get(mode, "") for mode in MODES]
        return [f"`{self.model_type}`", *trains, self.packed, self._reloads(), on, off]

    def _reloads(self) -> str:
        """Return one word where all modes agree, and otherwise each."""
        texts = set(self.reloads.values())
        if len(texts) == 1:
            return texts.pop()
        return "; ".join(f"{mode} {text}" for mode, text in self.reloads.items())


def page(
    groups: dict[str, list[Row]], versions: str, command: str = "make test-architectures"
) -> str:
    """Return the page with a table of each group of model types."""
    parts = [HEAD.format(versions=versions, command=command)]
    for title, rows in groups.items():
        parts.append(f"## {title}\n\n{_table(rows)}\n")
    return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [row.cells() for row in rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


class TableWriter:
    """A pytest plugin that collects the rows of all test processes and writes the page."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the row of a test that has ended, passed or not."""
        recorded = dict(report.user_properties)
        if report.when == "call" and PROPERTY in recorded:
            row = Row(**json.loads(recorded[PROPERTY]))
            self.rows[row.model_type] = row

    def pytest_sessionfinish(self, session: Any) -> None:
        """Write the page if every model type was tried, in the process that started the others."""
        if not self.rows or hasattr(session.config, "workerinput"):
            return
        from tiny_models import DENSE, EXPERTS, HYBRID, MODEL_TYPES, NEWER, OTHERS

        if self.rows and self.rows.keys() == set(NEWER):
            rows = [self.rows[name] for name in NEWER]
            text = page({"Newer types": rows}, versions(), "make test-newest")
            NEWEST_PAGE.write_text(text, encoding="utf-8")
        if self.rows.keys() != set(MODEL_TYPES):
            return
        titles = {
            "Dense": DENSE,
            "Mixture of experts": EXPERTS,
            "Hybrid: recurrent or convolution mixers next to attention": HYBRID,
            "Types that nothing was written for": OTHERS,
        }
        groups = {title: [self.rows[name] for name in names] for title, names in titles.items()}
        PAGE.write_text(page(groups, versions()), encoding="utf-8")


def versions() -> str:
    """Return the versions of the libraries whose models were tried."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))


def recorded(row: Row) -> tuple[str, str]:
    """Return a row as the property of a test's report."""
    return (PROPERTY, json.dumps(asdict(row)))
