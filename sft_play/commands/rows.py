"""`make preview` and `make data-check`: training samples as they are read, and the ledger."""

from pathlib import Path

from sft_play.commands.call import as_text, write_out
from sft_play.errors import DataError
from sft_play.plan.run_plan import PlannedRun


def preview(
    planned: PlannedRun,
    source: Path,
    first: int,
    page: str | None,
    no_color: bool,
    overwrites: bool = False,
) -> Path:
    """Print some training samples as the model sees them, write a page, and return its path.

    `source` is the config file; the `first` samples are among those shown.
    Raises: ConfigError for a page that exists, unless it `overwrites`; EnvironmentFault when the
    page cannot be written.
    """
    from sft_play.data.pipeline import counted_run, prepare_run_data
    from sft_play.data.preview import first_packed_sequence, preview_sequences, print_sequences
    from sft_play.data.preview_page import render_page
    from sft_play.data.tokenizer import load_tokenizer

    config = planned.config
    data = prepare_run_data(config)
    packed: list[int] = []
    if planned.plan.packing:
        layout = counted_run(planned, data)[1].plan.layout
        packed = first_packed_sequence(data.units(layout.tree_tokens), layout, config.epoch_seed)
    tokenizer = load_tokenizer(config)
    sequences = preview_sequences(data, tokenizer, first, config, packed)
    print_sequences(sequences, no_color)
    path = Path(page or Path(config.train.output_dir) / "preview.html")
    facts = {
        "config": str(source),
        "model": config.model.name,
        "train_on": config.data.train_on,
        "packing": "on" if planned.plan.packing else "off",
    }
    write_out(
        path, render_page(facts, data.ledger, sequences), overwrites or page is None, "--page "
    )
    return path


def data_check(planned: PlannedRun, as_json: bool) -> None:
    """Print the ledger of a run's rows, or its JSON.

    Raises: DataError, after printing the rows read before it.
    """
    from sft_play.data.ledger import DataAccount, ledger_lines
    from sft_play.data.pipeline import build_ledger

    account = DataAccount()
    try:
        ledger = build_ledger(planned, account)
    except DataError:
        print(as_text(account.as_json()) if as_json else "\n".join(account.lines()), flush=True)
        raise
    print(as_text(ledger.as_json()) if as_json else "\n".join(ledger_lines(ledger)))
