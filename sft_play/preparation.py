"""What the front end does with rows: tokenise a run's before its launch, account for them, show them. Loads no torch until it does."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.plan.resolve import Plan, with_micro_batches
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder

if TYPE_CHECKING:
    from sft_play.data.arrange import PreparedData
    from sft_play.data.order import Layout
    from sft_play.data.preview import Shown


def prepared(config: Config) -> "PreparedData":
    """Return the data of a resolved config, tokenised now where the cache has no samples of it. Raises DataError."""
    from sft_play.data import prepare

    found = prepare.find_sources(config)  # before transformers is imported, which takes seconds
    from sft_play.models.tokenizer import load_tokenizer

    return prepare.arrange(config, prepare.tokenised(config, found, load_tokenizer(config)))


def tokenise(folder: RunFolder, plan: Plan) -> Plan:
    """Tokenise a run's rows before any process group, write where they are, and return the plan with what follows from them.

    Rows that are set aside go to quarantine/. Raises DataError for what cannot be trained on, before a GPU is asked for.
    """
    from sft_play.data import prepare

    data = prepared(plan.config)
    for split, rows in prepare.quarantined(data.sources).items():
        write_text(folder.quarantine / f"{split}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"warning: {len(rows)} {split} rows cannot be used and are in {folder.quarantine / split}.jsonl")
    folder.write_data({"sources": prepare.as_json(data.sources), "padding": padding(data, plan)})
    if not plan.packing:
        return plan
    from sft_play.data import order

    train = plan.config.train
    return with_micro_batches(plan, order.micro_batches_per_step(data.train.lengths, layout_of(plan), train.order_seed, train.passes(len(data.train))))


def padding(data: "PreparedData", plan: Plan) -> dict[str, int]:
    """Return the tokens of an epoch, and those that it computes with their padding, packed and not."""
    from sft_play.data import order

    return vars(order.padding(data.train.lengths, layout_of(plan), plan.config.train.order_seed))


def layout_of(plan: Plan) -> "Layout":
    """Return how a run cuts up its steps."""
    from sft_play.data.order import Layout

    return Layout(plan.config.model.max_seq_len, plan.chosen.batch_size, plan.chosen.effective_batch, plan.ranks.world_size)


def ledger(plan: Plan) -> dict[str, Any]:
    """Return the ledger of a config's data."""
    from sft_play.data.check import ledger_json

    data = prepared(plan.config)
    return {**ledger_json(data, plan.config.model.max_seq_len), "padding": padding(data, plan)}


def preview(plan: Plan, source: Path, first: int, page: str | None, no_color: bool) -> None:
    """Print what the model sees of some training samples, and write it as a page, whose path comes last. Raises EnvironmentFault.

    `source` is the config file, and `first` how many of the first samples are among those shown.
    """
    from sft_play.data.check import ledger_json
    from sft_play.data.preview import packed_samples, show
    from sft_play.data.preview_page import page as page_of
    from sft_play.models.tokenizer import load_tokenizer

    config, data = plan.config, prepared(plan.config)
    packed = packed_samples(data.train.lengths, layout_of(plan), config.train) if plan.packing else []
    sequences = show(data, load_tokenizer(config), first, config.data.too_long, packed)
    print_sequences(sequences, no_color)
    path = Path(page or Path(config.train.output_dir) / "preview.html")
    facts = {"config": str(source), "model": config.model.name, "train_on": config.data.train_on, "packing": "on" if plan.packing else "off"}
    try:
        write_text(path, page_of(facts, ledger_json(data, config.model.max_seq_len), sequences))
    except OSError as error:
        raise EnvironmentFault(f"--page {path}: {error.strerror}; name a file in a folder that can be written") from None
    print(path)


def print_sequences(sequences: Iterable["Shown"], no_color: bool) -> None:
    """Print sequences in colour, or with marks where the terminal shows none."""
    from rich.console import Console
    from rich.text import Text

    from sft_play.data.preview import in_colour, in_marks

    console = Console(color_system=None) if no_color else Console()
    is_coloured = console.color_system is not None and not console.no_color
    for sequence in sequences:
        shown = Text.assemble(*in_colour(sequence)) if is_coloured else Text(in_marks(sequence))
        console.print(shown, soft_wrap=True)
