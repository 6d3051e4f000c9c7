"""Files of a benchmark: tables of what is measured, results, and the pages made of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import Field, TypeAdapter

from benchmarks.machine import Machine
from sft_play.runs.files import write_json

T = TypeVar("T")


def read_table(name: str, kind: type[T]) -> dict[str, T]:
    """Return the entries of a YAML table of this folder; each has its key as its name."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    entries = {key: {"name": key, **entry} for key, entry in yaml.safe_load(text).items()}
    return TypeAdapter(dict[str, kind]).validate_python(entries)


def read_as(kind: type[T], path: Path) -> T:
    """Return what `write_as` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def write_as(path: Path, value: Any) -> None:
    """Write a dataclass as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, TypeAdapter(type(value)).dump_python(value, mode="json"))


@dataclass(kw_only=True)
class Results:
    """Results of a machine, written after each: an interrupted benchmark loses nothing."""

    machine: Machine
    path: Annotated[Path, Field(exclude=True)] = Path()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the results of a file."""
        results = read_as(cls, path)
        results.path = path
        return results

    @classmethod
    def on_this_machine(cls, path: Path | None, on_cpu: bool, kind: str) -> Self:
        """Return results to add to: those of the file, by default the card's own, if it exists."""
        machine = Machine.here(on_cpu)
        path = path or machine.results_path(kind)
        results = cls.read(path) if path.exists() else cls(machine=machine)
        results.machine, results.path = machine, path
        return results

    def write(self) -> None:
        """Write the file."""
        write_as(self.path, self)

    def write_page(
        self, text: str, folder: Path | None, draw: Callable[[Any, Path], None] | None = None
    ) -> None:
        """Print the tables; write them, and a plot, to `folder`, by default that of the results."""
        path = (folder or self.path.parent) / self.path.stem
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text)
        if draw is not None and find_spec("matplotlib") is not None:
            draw(self, path.with_suffix(".svg"))
        elif draw is not None:
            print("no plot: matplotlib is not installed (requirements-bench.txt)", file=sys.stderr)


def grid(head: list[str], rows: list[list[str]], text_columns: tuple[str, ...] = ()) -> str:
    """Return a table whose columns are numbers, but for `text_columns`."""
    rule = ["---" if title in text_columns else "--:" for title in head]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def number(value: float | None, form: str = ",.0f") -> str:
    """Return a number, or a share with a form such as +.1%, as a cell."""
    return "-" if value is None else format(value, form)
