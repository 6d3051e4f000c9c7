"""The front end's use of the data room with a plan: tokenize a run's rows, account for them, show
them. Loads no torch until then.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.schema import Config
from sft_play.data import row_counts
from sft_play.errors import DataError, EnvironmentFault
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.workload import Counted
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder

if TYPE_CHECKING:
    from sft_play.data.assemble import RunData
    from sft_play.data.ledger import Ledger, PaddedTokens
    from sft_play.data.tokenized import TokenizedSplits


def build_data(config: Config) -> "RunData":
    """Return the data of a resolved config, tokenized now if the cache has none, and record its
    counts. Raises DataError.
    """
    from sft_play.data.assemble import assemble
    from sft_play.data.sources import find_sources
    from sft_play.data.tokenize import tokenize_sources

    sources = find_sources(config)  # before transformers is imported, which takes seconds
    from sft_play.models.tokenizer import load_tokenizer

    data = assemble(config, tokenize_sources(config, sources, load_tokenizer(config)))
    row_counts.record_counts(config, data)
    return data


def counted(config: Config) -> Counted | str:
    """Return how many samples a resolved config trains on, or why nobody can say."""
    try:
        return row_counts.count_rows(config)
    except DataError as error:
        return str(error).splitlines()[0]


def tokenize(folder: RunFolder, planned: PlannedRun) -> PlannedRun:
    """Tokenize a run's rows before any process group, write data.json, and return the run with its
    rows counted.

    Rows that are set aside go to quarantine/. Raises DataError for what cannot be trained on,
    before a GPU is asked for.
    """
    from sft_play.data.data_facts import DataFacts

    data = build_data(planned.config)
    write_quarantine(folder, data.sources)
    fullest = fullest_step(data, planned)
    folder.write_data(DataFacts(data.sources, padding(data, planned, fullest)).to_json())
    if not planned.plan.packing:
        return planned
    return replace(planned, plan=planned.plan.packed(fullest))


def write_quarantine(folder: RunFolder, sources: "TokenizedSplits") -> None:
    """Write the rows that were set aside to quarantine/, and print a warning for each split."""
    from sft_play.data.tokenized import read_bad_rows

    for split, rows in read_bad_rows(sources).items():
        path = folder.quarantine / f"{split}.jsonl"
        lines = []
        for row in rows:
            facts = {"origin": row.origin, "reason": row.reason, "row": row.raw}
            lines.append(json.dumps(facts, ensure_ascii=False) + "\n")
        write_text(path, "".join(lines))
        print(f"warning: {len(rows)} {split} rows cannot be used and are in {path}")


def fullest_step(data: "RunData", planned: PlannedRun) -> int:
    """Return the sequences of the fullest packed step: of the whole run where it packs, else of its
    first epoch.
    """
    from sft_play.data import order

    train = planned.config.train
    epochs = train.passes(len(data.train)) if planned.plan.packing else 1
    return order.fullest_step(data.train.lengths, planned.plan.layout, train.order_seed, epochs)


def padding(data: "RunData", planned: PlannedRun, fullest: int) -> "PaddedTokens":
    """Return the tokens of an epoch, and those that it computes with their padding, packed and not."""
    from sft_play.data import order

    layout = planned.plan.layout
    seed = planned.config.train.order_seed
    return order.padding(data.train.lengths, layout, layout.packed(fullest), seed)


def ledger(planned: PlannedRun) -> "Ledger":
    """Return the ledger of a config's data."""
    data = build_data(planned.config)
    padded = padding(data, planned, fullest_step(data, planned))
    return replace(data.ledger, padding=padded)


def preview(
    planned: PlannedRun, source: Path, first: int, page: str | None, no_color: bool
) -> None:
    """Print what the model sees of some training samples, and write it as a page, whose path is
    printed last. Raises EnvironmentFault.

    `source` is the config file; the `first` samples are among those shown.
    """
    from sft_play.data.preview import first_packed_sequence, preview_sequences
    from sft_play.data.preview_page import render_page
    from sft_play.data.preview_text import print_sequences
    from sft_play.models.tokenizer import load_tokenizer

    config = planned.config
    data = build_data(config)
    packed: list[int] = []
    if planned.plan.packing:
        layout = planned.plan.layout.packed(fullest_step(data, planned))
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
    print(path)
