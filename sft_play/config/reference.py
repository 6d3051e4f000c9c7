"""Writes the tables of docs/configuration.md from the schema: `python -m sft_play.config.reference`. Loads no torch."""

from dataclasses import fields
from itertools import groupby

from sft_play.config.invocation import Invocation
from sft_play.config.layers import defaults
from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.messages import wanted, word
from sft_play.config.schema import env_name, settings

PAGE = PROJECT_ROOT / "docs" / "configuration.md"
MARK = "<!-- From here on written by `python -m sft_play.config.reference`; edit the schema instead. -->\n"


def markdown() -> str:
    """Return a table for every section: setting, variable, default, what to write, meaning; then the other variables."""
    built_in = defaults()
    parts = []
    for section, paths in groupby(settings(), key=lambda path: path.rpartition(".")[0]):
        rows = [
            (
                f"`{path}`",
                f"`{env_name(path)}`",
                f"`{word(built_in[path].value)}`",
                wanted(path),
                settings()[path].description,
            )
            for path in paths
        ]
        parts.append(
            f"## {section}\n\n{_table(('Setting', 'Variable', 'Default', 'Write', 'Meaning'), rows)}"
        )
    rows = [
        (f"`{field.name.upper()}`", _shown_default(field.default), field.metadata["meaning"])
        for field in fields(Invocation)
    ]
    parts.append(
        f"## Variables that are no settings\n\n{_table(('Variable', 'Default', 'Meaning'), rows)}"
    )
    return "\n".join(parts)


def page(text: str) -> str:
    """Return the page with its tables replaced; `text` is the old page, whose head above the mark is written by hand."""
    head, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE} has lost its mark line"
    return f"{head}{mark}\n{markdown()}"


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def _shown_default(value: object) -> str:
    return "unset" if value is None else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
