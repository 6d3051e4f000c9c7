"""Count the training rows and their tokens, before a run is planned.

Some rows are tokenized as in a run, once: the result is cached. If the tokenizer is not on this
machine, CHARACTERS_PER_TOKEN characters count as one token. Loads no torch, unless rows are
tokenized.
"""

import contextlib
import hashlib
import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.loader import environment
from sft_play.config.schema import Config
from sft_play.data.files import Chunk, digest_files, read_chunks, refuse_bad_rows
from sft_play.data.ledger import Tally
from sft_play.data.row_detection import ChunkTask, take_rows
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows
from sft_play.data.rows import MAX_HELD_OUT_ROWS, BadRow
from sft_play.data.sources import SETTINGS, Source, find_source, find_sources, source_sections
from sft_play.errors import DataError
from sft_play.plan import sources
from sft_play.plan.config_json import fetched_commits, find_file, find_folder
from sft_play.plan.counting import counting_versions, digest_of_code
from sft_play.plan.recipe import RowFacts
from sft_play.plan.workload import CHARACTERS_PER_TOKEN, Counted, epoch_rows
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import cache_folder

if TYPE_CHECKING:
    from sft_play.data.assemble import RunData

READ_BYTES = 16 << 20  # per source
SAMPLED_ROWS = 2000  # of all sources together, each by its share of an epoch
SAMPLED_BYTES = 4 << 20  # size on disk; fewer long rows are drawn
FEWEST_ROWS = 50
DIGESTED_BYTES = 256 << 20  # of a source: a sixth of a second
MODEL_FILES = ".json .jinja .model .txt .tiktoken .py".split()  # all but the weights
# by the path of their record, which they do not get: a tokenizer may count their tokens later
_uncounted: dict[Path, RowFacts] = {}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class SourceHead:
    """The first READ_BYTES of a source, or all of a smaller one."""

    source: Source
    chunks: list[Chunk]
    rows: int  # that were read
    all_rows: float  # of the source; estimated from the size of its files if not all was read


def look_at_rows(
    config: Config, environ: Mapping[str, str], may_fetch: bool, tokenizes: bool = True
) -> RowFacts | str:
    """Return facts about a config's training rows, or why they are not known.

    With `may_fetch`, rows and a tokenizer that are not on this machine are downloaded. Without
    `tokenizes`, characters are counted, unless a tokenizer has counted these rows before.
    Raises: EnvironmentFault when they cannot be fetched.
    """
    config = config.changed({"data": sources.resolved(config.data)})
    model = config.model
    path = _record_path(config)
    if path.is_file():
        facts = read_json(path)
        return RowFacts(**{**facts, "lengths": tuple(facts["lengths"])})
    if path in _uncounted and not may_fetch:
        return _uncounted[path]
    try:
        begun = _read_beginnings(config, may_fetch)
    except DataError as error:  # the run itself reports every bad row and stops
        return str(error).splitlines()[0]
    shares = epoch_rows([(one.all_rows, one.source.section.weight) for one in begun])
    drawn = [part for one in zip(begun, shares, strict=True) for part in _draw(*one, sum(shares))]
    is_here = any(find_file(model.name, file, model.revision, environ) for file in TOKENIZER_FILES)
    reason = None
    if not tokenizes:
        reason = "a run tokenizes them when it starts"
    elif not may_fetch and not is_here:
        reason = f"the tokenizer of {model.name} is not on this machine"
    if reason is None:
        lengths, tally, names_files = _tokenize(drawn, config)
    else:
        lengths, tally, names_files = _count_characters(drawn, config), Tally(), False
    if not lengths:
        return "none of the first rows can be used"
    held_out = 0.0
    if not config.data.val_path:
        all_rows = sum(one.all_rows for one in begun)
        held_out = min(config.data.val_size, MAX_HELD_OUT_ROWS / all_rows)
    facts = RowFacts(
        rows=max(1, round((1 - held_out) * sum(shares))),
        lengths=tuple(sorted(lengths)),
        is_estimated=any(one.all_rows > one.rows for one in begun),
        uncounted_because=reason,
        are_texts=all(task.row_format.name == "text" for task in drawn),
        labelled=tally.trained_tokens / tally.tokens if tally.tokens else None,
        samples_per_row=(tally.samples or 1) / (tally.rows_used or 1),
        distinct=(tally.distinct_tokens or 1) / (tally.tokens or 1),
    )
    if reason is not None:
        _uncounted[path] = facts
    elif not names_files:  # images may change
        # the tokenizer, the rows, and so the name of the record may have been fetched meanwhile
        write_json(_record_path(config), asdict(facts))
    return facts


def check_first_rows(config: Config) -> None:
    """Raise DataError for unusable rows among the first rows of each file."""
    prompt = SystemPrompt.from_config(config, decodes=False)
    for source in chain.from_iterable(find_sources(config).values()):
        for number in range(len(source.files)):
            _, chunk, row_format = next(source.read_file(number))
            rows = parse_record_rows(chunk, row_format, prompt)
            bad = [row for row in rows if isinstance(row, BadRow)]
            refuse_bad_rows(bad, len(chunk.records))


def count_rows_or_reason(config: Config) -> Counted | str:
    """Return how many samples and tokens a resolved config trains on, or why this is not known.

    The numbers were recorded when the rows were tokenized, or are estimates.
    """
    path = _record_path(config, config.model.max_seq_len)
    if path.is_file():
        return Counted(**read_json(path))
    facts = look_at_rows(config, {}, may_fetch=False, tokenizes=False)
    return facts if isinstance(facts, str) else Counted.estimate(facts, config.model.max_seq_len)


def record_counts(config: Config, data: "RunData") -> None:
    """Record how many samples and tokens a resolved config trains on; images may change."""
    if data.train.has_images:
        return
    train = data.train
    tokens = int(train.lengths.sum())
    counted = Counted(
        len(train),
        tokens,
        int(train.records["trained"].sum()) / tokens,
        samples_per_row=len(train) / len(data.row_ends),
        distinct=1 - int(train.shared.sum()) / tokens,
    )
    write_json(_record_path(config, config.model.max_seq_len), asdict(counted))


def _read_beginnings(config: Config, may_fetch: bool) -> list[SourceHead]:
    """Return the start of each training source. Raises: DataError if one has no row."""
    begun = []
    for section in source_sections(config.data.train_path):
        if not may_fetch and not Path(section.path).exists():
            raise DataError(
                f"{section.path} is not on this machine yet; make data-check fetches it"
            )
        source = find_source(section, "data.train_path", config.data)
        chunks = []
        bytes_read = 0
        for chunk in chain.from_iterable(map(read_chunks, source.files)):
            chunks.append(chunk)
            bytes_read += chunk.bytes_read
            if bytes_read >= READ_BYTES:
                break
        rows = sum(len(chunk.records) for chunk in chunks)
        if not rows:
            raise DataError(f"{section.path}: no rows")
        is_part = bytes_read >= READ_BYTES
        all_rows = rows * max(1.0, source.file_bytes / bytes_read) if is_part else rows
        if section.choice:
            start, stop = source.bounds(round(all_rows))
            all_rows = min(section.rows or all_rows, max(0, stop - start), all_rows)
        begun.append(SourceHead(source, chunks, rows, all_rows))
    return begun


def _draw(begun: SourceHead, share: float, all_shares: float) -> list[ChunkTask]:
    """Return a source's share of SAMPLED_ROWS, the same rows each time.

    They are drawn at random: rows at equal distances may be all alike.
    """
    bytes_read = sum(chunk.bytes_read for chunk in begun.chunks)
    most = max(FEWEST_ROWS, begun.rows * SAMPLED_BYTES // max(1, bytes_read))
    wanted = math.ceil(min(SAMPLED_ROWS, most) * share / all_shares)
    positions = range(begun.rows)
    if begun.rows > wanted:
        positions = sorted(random.Random(0).sample(positions, wanted))
    formats: dict[Path, RowFormat] = {}
    for chunk in begun.chunks:
        if chunk.path not in formats:
            formats[chunk.path] = begun.source.detect(chunk)
    tasks = [ChunkTask(0, chunk, formats[chunk.path]) for chunk in begun.chunks]
    return list(take_rows(tasks, positions))


def _count_characters(drawn: list[ChunkTask], config: Config) -> list[int]:
    """Return the approximate number of tokens of rows, from their characters."""
    prompt = SystemPrompt.from_config(config, decodes=False)
    lengths = []
    for _, chunk, row_format in drawn:
        for rows in parse_record_rows(chunk, row_format, prompt):
            for row in () if isinstance(rows, BadRow) else rows:
                said = sum(len(message.content) for message in row.messages)
                lengths.append(math.ceil((len(row.plain_text) + said) / CHARACTERS_PER_TOKEN))
    return lengths


def _tokenize(drawn: list[ChunkTask], config: Config) -> tuple[list[int], Tally, bool]:
    """Return the tokens of samples, the counts of their rows, and whether these name files.

    Raises: DataError, EnvironmentFault.
    """
    import numpy as np

    from sft_play.data.chunk_tokenizer import ChunkTokenizer  # transformers: seconds
    from sft_play.data.processor import without_torch
    from sft_play.data.tokenize import tokenize_tasks

    with without_torch(config.model):
        from sft_play.data.tokenizer import load_tokenizer

    config = config.changed({"model.max_seq_len": 1 << 30})  # so that no row is cut
    tokenizer = ChunkTokenizer(config, load_tokenizer(config), decodes=False)
    lengths: list[int] = []
    names_files = False
    tally = Tally()
    for done in tokenize_tasks(iter(drawn), tokenizer, processes=1):
        records = done.samples.records
        lengths += (np.diff(records["end"], prepend=0) + records["shared"]).tolist()
        tally.add(done.tally)
        names_files |= bool(done.image_states)
    return lengths, tally, names_files


def _record_path(config: Config, max_seq_len: int | None = None) -> Path:
    """Return the path of the facts of a config's rows; with `max_seq_len`, the counts of a run.

    The name digests what the samples depend on: settings, rows, files of the model, and code.
    """
    model, environ = config.model, environment()
    facts: list[Any] = [config.data.model_dump(), model.model_dump(exclude={"max_seq_len"})]
    facts += [
        max_seq_len,
        config.train.order_seed,
        counting_versions(),
        digest_of_code("sft_play/data/*.*"),
    ]
    for name in SETTINGS.values():
        for section in source_sections(getattr(config.data, name)):
            if not Path(section.path).exists():
                facts.append(fetched_commits(section.path, environ))
                continue
            with contextlib.suppress(DataError):  # reported when the rows are read
                facts.append(_contents(find_source(section, f"data.{name}", config.data)))
    folders = [find_folder(model.name, model.revision, environ), Path(model.adapter or os.devnull)]
    files = [
        file
        for folder in filter(None, folders)
        for pattern in ("*", "*/*.jinja")
        for file in folder.glob(pattern)
    ]
    read = [file for file in sorted(files) if file.suffix in MODEL_FILES and file.is_file()]
    if model.has_template_file:
        read.append(Path(model.chat_template or ""))
    facts.append(digest_files(read))
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(config) / "counts" / f"{key}.json"


def _contents(source: Source) -> Any:
    """Return the digest of a source's files; of large ones what every write changes (ctime)."""
    if source.file_bytes > DIGESTED_BYTES:
        return source.states()
    return digest_files(source.files)
