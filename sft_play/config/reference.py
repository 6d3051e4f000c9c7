"""Writes the tables of docs/configuration.md: `python -m sft_play.config.reference`. No torch."""

from dataclasses import fields
from itertools import groupby

from sft_play.config.invocation import Invocation
from sft_play.config.layers import defaults
from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.messages import wanted_value, word
from sft_play.config.schema import env_name, settings

PAGE = PROJECT_ROOT / "docs" / "configuration.md"
MARK = (
    "<!-- From here on written by `python -m sft_play.config.reference`; "
    "edit the schema instead. -->\n"
)
TITLES = "Setting Variable Default Write Meaning".split()


def markdown() -> str:
    """Return a table of every section, then one of the variables that are no settings."""
    built_in = defaults()
    parts = []
    for section, paths in groupby(settings(), key=lambda path: path.rpartition(".")[0]):
        rows = []
        for path in paths:
            default = word(built_in[path].value)
            meaning = settings()[path].description
            rows.append(
                (f"`{path}`", f"`{env_name(path)}`", f"`{default}`", wanted_value(path), meaning)
            )
        parts.append(f"## {section}\n\n{_table(TITLES, rows)}")
    variables = []
    for field in fields(Invocation):
        default = "unset" if field.default is None else f"`{field.default}`"
        variables.append((f"`{field.name.upper()}`", default, field.metadata["meaning"]))
    table = _table(("Variable", "Default", "Meaning"), variables)
    parts.append(f"## Variables that are no settings\n\n{table}")
    return "\n".join(parts)


def page(text: str) -> str:
    """Return the page `text` with new tables; what is above the mark is written by hand."""
    head, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE} has lost its mark line"
    return f"{head}{mark}\n{markdown()}"


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
