"""`make data-check`: the ledger of a config's data, without training."""

from typing import Any

from sft_play.data.prepare import PreparedData


def ledger_json(data: PreparedData) -> dict[str, Any]:
    """Return the ledger of the training rows, and those of all splits under `splits`."""
    return {**data.ledger["train"], "splits": data.ledger}


def check_lines(ledger: dict[str, Any]) -> list[str]:
    """Return the ledger as text, a line a split."""
    width = max(map(len, ledger["splits"]))
    return [
        f"{name:<{width}}  rows_in={facts['rows_in']} rows_used={facts['rows_used']} "
        + " ".join(f"dropped.{reason}={count}" for reason, count in facts["dropped"].items())
        + f" tokens={facts['tokens']} trained_tokens={facts['trained_tokens']} lost={facts['lost_fraction']:.2%}"
        for name, facts in ledger["splits"].items()
    ]
