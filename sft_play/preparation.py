"""What the front end does with rows: tokenise a run's before its launch, account for them, show them. Loads no torch until it does."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import Config
from sft_play.errors import DataError, EnvironmentFault
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.sources import SETTINGS, paths_of
from sft_play.plan.workload import Counted, estimated, estimated_tokens
from sft_play.runs.files import read_json, write_json, write_text
from sft_play.runs.folder import RunFolder

if TYPE_CHECKING:
    from sft_play.data.assemble import PreparedData
    from sft_play.data.preview import Shown

SAMPLED_BYTES = 16 << 20  # of data files, for an estimate


def prepared(config: Config) -> "PreparedData":
    """Return the data of a resolved config, tokenised now where the cache has no samples of it, and note its counts. Raises DataError."""
    from sft_play.data import prepare

    found = prepare.find_sources(config)  # before transformers is imported, which takes seconds
    from sft_play.models.tokenizer import load_tokenizer

    data = prepare.assemble(config, prepare.tokenised(config, found, load_tokenizer(config)))
    tokens, labelled = int(data.train.lengths.sum()), int(data.train.records["trained"].sum())
    write_json(_note_of(config), asdict(Counted(len(data.train), tokens, labelled / tokens)))
    return data


def counted(config: Config) -> Counted | str:
    """Return how many samples a resolved config trains on, as noted when they were last prepared, else estimated; or why nobody can say."""
    note = _note_of(config)
    if note.is_file():
        return Counted(**read_json(note))
    away = [path for path in paths_of(config.data.train_path) if not Path(path).exists()]
    if away:
        return f"{away[0]} is of the hub; make data-check fetches and counts it"
    try:
        return _estimated(config)
    except DataError as error:
        return str(error).splitlines()[0]


def _estimated(config: Config) -> Counted | str:
    from sft_play.data.sources import SourceEntry, find

    data, sources = config.data, []
    for part in data.train_path if isinstance(data.train_path, list) else [data.train_path]:
        path, weight = (part, None) if isinstance(part, str) else (part.path, part.weight)
        sources.append(
            (
                *_sampled(
                    find(SourceEntry(path), "data.train_path").files, config.model.max_seq_len
                ),
                weight,
            )
        )
    rows, held_out = sum(rows for rows, _, _ in sources), 0.0
    if not data.val_path:
        from sft_play.data.splits import MOST_HELD_OUT

        held_out = min(data.val_size, MOST_HELD_OUT / max(1.0, rows))
    return estimated(sources, held_out) if rows else "the files hold no row"


def _note_of(config: Config) -> Path:
    """Return where the counts of these rows are noted: under the settings, and the size and time of every local file."""
    from sft_play.data import cache

    paths = [
        Path(path)
        for value in (getattr(config.data, name) for name in SETTINGS)
        for path in paths_of(value)
    ]
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file()
    ]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    model = config.model.model_dump(include={"name", "revision", "max_seq_len", "chat_template"})
    facts = {
        "data": config.data.model_dump(),
        "model": model,
        "seed": config.train.order_seed,
        "files": stats,
    }
    return (
        cache.root_of(config)
        / "counts"
        / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"
    )


def _sampled(files: Sequence[Path], max_seq_len: int) -> tuple[float, float]:
    """Return about how many rows files hold, and the tokens of a row, from the first SAMPLED_BYTES of them."""
    from sft_play.data.files import read_chunks

    rows, tokens, read = 0, 0.0, 0
    for chunk in (chunk for file in files for chunk in read_chunks(file)):
        rows, read = rows + len(chunk.records), read + chunk.bytes_read
        tokens += estimated_tokens(
            (len(chunk.raw(number)) for number in range(len(chunk.records))), max_seq_len
        )
        if read >= SAMPLED_BYTES:
            break
    whole = sum(file.stat().st_size for file in files)
    return (rows * max(1.0, whole / read), tokens / rows) if rows else (0.0, 0.0)


def tokenize(folder: RunFolder, planned: PlannedRun) -> PlannedRun:
    """Tokenize a run's rows before any process group, and note where they are.

    Returns the run with its rows counted. Rows that are set aside go to quarantine/.
    Raises: DataError for what cannot be trained on, before a GPU is asked for.
    """
    from sft_play.data import prepare

    data = prepared(planned.config)
    for split, rows in prepare.quarantined(data.sources).items():
        path = folder.quarantine / f"{split}.jsonl"
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"warning: {len(rows)} {split} rows cannot be used and are in {path}")
    fullest = fullest_step(data, planned)
    padded = padding(data, planned, fullest)
    folder.write_data({"sources": prepare.as_json(data.sources), "padding": padded})
    if not planned.plan.packing:
        return planned
    return replace(planned, plan=planned.plan.packed(fullest))


def fullest_step(data: "PreparedData", planned: PlannedRun) -> int:
    """Return the sequences of the fullest packed step: of the run, or of an epoch if not packed."""
    from sft_play.data import order

    train = planned.config.train
    epochs = train.passes(len(data.train)) if planned.plan.packing else 1
    return order.fullest_step(data.train.lengths, planned.plan.layout, train.order_seed, epochs)


def padding(data: "PreparedData", planned: PlannedRun, fullest: int) -> dict[str, int]:
    """Return the tokens of an epoch, and those computed with their padding, packed and not."""
    from sft_play.data import order

    layout = planned.plan.layout
    seed = planned.config.train.order_seed
    return vars(order.padding(data.train.lengths, layout, layout.packed(fullest), seed))


def ledger(planned: PlannedRun) -> dict[str, Any]:
    """Return the ledger of a config's data."""
    from sft_play.data.check import ledger_json

    data = prepared(planned.config)
    padded = padding(data, planned, fullest_step(data, planned))
    return {**ledger_json(data, planned.config.model.max_seq_len), "padding": padded}


def preview(
    planned: PlannedRun, source: Path, first: int, page: str | None, no_color: bool
) -> None:
    """Print what the model sees of some training samples, and write it as a page.

    `source` is the config file, and `first` how many of the first samples are among those shown.
    Raises: EnvironmentFault.
    """
    from sft_play.data.check import ledger_json
    from sft_play.data.preview import packed_samples, show
    from sft_play.data.preview_page import page as page_of
    from sft_play.models.tokenizer import load_tokenizer

    config = planned.config
    data = prepared(config)
    packed = []
    if planned.plan.packing:
        layout = planned.plan.layout.packed(fullest_step(data, planned))
        packed = packed_samples(data.train.lengths, layout, config.train.order_seed)
    sequences = show(data, load_tokenizer(config), first, config.data.too_long, packed)
    print_sequences(sequences, no_color)
    path = Path(page or Path(config.train.output_dir) / "preview.html")
    facts = {
        "config": str(source),
        "model": config.model.name,
        "train_on": config.data.train_on,
        "packing": "on" if planned.plan.packing else "off",
    }
    try:
        write_text(path, page_of(facts, ledger_json(data, config.model.max_seq_len), sequences))
    except OSError as error:
        raise EnvironmentFault(
            f"--page {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
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
