"""`make data-check`: the ledger of a run's rows; after an error, how far the reading came."""

from sft_play.commands.call import as_text
from sft_play.errors import DataError
from sft_play.plan.run_plan import PlannedRun


def data_check(planned: PlannedRun, as_json: bool) -> None:
    """Print the ledger of a run's rows, or its JSON.

    Raises: DataError, after printing what was read before it.
    """
    from sft_play.data.ledger import DataAccount
    from sft_play.data.ledger_tables import ledger_lines
    from sft_play.data.pipeline import build_ledger

    account = DataAccount()
    try:
        ledger = build_ledger(planned, account)
    except DataError:
        print(as_text(account.as_json()) if as_json else "\n".join(account.lines()), flush=True)
        raise
    print(as_text(ledger.as_json()) if as_json else "\n".join(ledger_lines(ledger)))
