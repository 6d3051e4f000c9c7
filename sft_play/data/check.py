"""`make data-check`: the ledger of a config's data, without training."""

from typing import Any

from sft_play.config.schema import Config
from sft_play.data.prepare import Ledger, prepare


def check_rows(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return the ledger of the training rows, and those of the other splits under `splits`. Raises DataError."""
    prepared = prepare(config, tokenizer)
    return {**_facts(prepared.ledger["train"]), "splits": {name: _facts(ledger) for name, ledger in prepared.ledger.items()}}


def check_lines(ledger: dict[str, Any]) -> list[str]:
    """Return the ledger as text, a line a split."""
    width = max(map(len, ledger["splits"]))
    return [
        f"{name:<{width}}  rows_in={facts['rows_in']} rows_used={facts['rows_used']} "
        + " ".join(f"dropped.{reason}={count}" for reason, count in facts["dropped"].items())
        + f" tokens={facts['tokens']} trained_tokens={facts['trained_tokens']} lost={facts['lost_fraction']:.2%}"
        for name, facts in ledger["splits"].items()
    ]


def _facts(ledger: Ledger) -> dict[str, Any]:
    return {**ledger.as_json(), "lost_fraction": round(ledger.lost_fraction, 6)}
