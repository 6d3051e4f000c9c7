"""`make preview`: training samples on the terminal and as a page."""

from pathlib import Path

from sft_play.errors import EnvironmentFault
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.files import write_text


def preview(
    planned: PlannedRun, source: Path, first: int, page: str | None, no_color: bool
) -> Path:
    """Print what the model sees of some training samples, write it as a page, return its path.

    `source` is the config file; the `first` samples are among those shown.
    Raises: EnvironmentFault when the page cannot be written.
    """
    from sft_play.data.pipeline import packed_run, prepare_run_data
    from sft_play.data.preview import first_packed_sequence, preview_sequences, print_sequences
    from sft_play.data.preview_page import render_page
    from sft_play.data.tokenizer import load_tokenizer

    config = planned.config
    data = prepare_run_data(config)
    packed: list[int] = []
    if planned.plan.packing:
        layout = packed_run(planned, data).plan.layout
        packed = first_packed_sequence(data.train.lengths, layout, config.train.order_seed)
    tokenizer = load_tokenizer(config)
    sequences = preview_sequences(data, tokenizer, first, config.data.too_long, packed)
    print_sequences(sequences, no_color)
    path = Path(page or Path(config.train.output_dir) / "preview.html")
    facts = {
        "config": str(source),
        "model": config.model.name,
        "train_on": config.data.train_on,
        "packing": "on" if planned.plan.packing else "off",
    }
    try:
        write_text(path, render_page(facts, data.ledger, sequences))
    except OSError as error:
        raise EnvironmentFault(
            f"--page {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
    return path
