"""How many training rows there are, and how long in tokens, before a run is planned.

Recorded when the same rows were tokenized, or estimated from the beginning of each source, which
takes a second or two for files of any size. Loads no torch, unless a tokenizer must be fetched.
"""

import hashlib
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sft_play.config.schema import Config, DataSection, SourceSection
from sft_play.data.files import Chunk, read_chunks
from sft_play.data.row_detection import detect_format
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import parse_rows
from sft_play.data.rows import MAX_HELD_OUT_ROWS, Row
from sft_play.data.sources import (
    SETTINGS,
    find_source,
    local_files,
    source_sections,
    system_prompt_of,
)
from sft_play.data.token_counter import TokenCounter
from sft_play.errors import DataError
from sft_play.plan import sources
from sft_play.plan.recipe import RowFacts
from sft_play.plan.workload import CHARACTERS_PER_TOKEN, Counted, estimated, estimated_tokens
from sft_play.runs.cache import cache_folder
from sft_play.runs.files import read_json, write_json

if TYPE_CHECKING:
    from sft_play.data.assemble import RunData


READ_BYTES = 16 << 20  # of each source


@dataclass(frozen=True)
class Beginning:
    """The first READ_BYTES of a source, or all of a smaller one."""

    chunks: tuple[Chunk, ...]
    rows: int  # that were read
    all_rows: float  # of the source; estimated by the size of its files where more is left

    @property
    def is_estimated(self) -> bool:
        return self.all_rows > self.rows


def read_beginning(files: Iterable[Path]) -> Beginning:
    """Return the beginning of files, in their order. Raises DataError."""
    files = tuple(files)
    chunks = []
    bytes_read = 0
    for chunk in chain.from_iterable(map(read_chunks, files)):
        chunks.append(chunk)
        bytes_read += chunk.bytes_read
        if bytes_read >= READ_BYTES:
            break
    rows = sum(len(chunk.records) for chunk in chunks)
    share = 1.0
    if bytes_read >= READ_BYTES:
        share = max(1.0, sum(file.stat().st_size for file in files) / bytes_read)
    return Beginning(tuple(chunks), rows, rows * share)


def held_out_share(data: DataSection, rows: float) -> float:
    """Return which part of `rows` training rows is held out for evaluation."""
    return 0.0 if data.val_path else min(data.val_size, MAX_HELD_OUT_ROWS / max(1.0, rows))


SAMPLED_ROWS = 2000  # of all sources together
COUNTED_CHARACTERS = 2 << 20  # a tokenizer takes about a second
FEWEST_COUNTED_ROWS = 50


class SourceSample(NamedTuple):
    """The beginning of one source, and the format of each of its files."""

    section: SourceSection
    beginning: Beginning
    formats: dict[Path, RowFormat]


class Lengths(NamedTuple):
    """Tokens of rows, shortest first, and why no tokenizer counted them, None where one did."""

    tokens: tuple[int, ...]
    uncounted_because: str | None = None


def look_at_rows(config: Config, environ: Mapping[str, str], may_fetch: bool) -> RowFacts | str:
    """Return what a config's training rows are like, or why nobody can say.

    With `may_fetch`, rows and a tokenizer that are not on this machine are fetched.
    Raises: EnvironmentFault when they cannot be fetched.
    """
    data = sources.resolved(config.data)
    try:
        samples = [
            _read_source(section, config, may_fetch) for section in source_sections(data.train_path)
        ]
    except DataError as error:  # the run itself names every bad row and stops
        return str(error).splitlines()[0]
    rows = _sampled_rows(samples, config)
    if not rows:
        return "none of the first rows can be used"
    lengths = _lengths_of(rows, _find_counter(config, environ, may_fetch), config.model.name)
    mean_tokens = sum(lengths.tokens) / len(lengths.tokens)
    held_out = held_out_share(data, sum(sample.beginning.all_rows for sample in samples))
    of_sources = [
        (sample.beginning.all_rows, mean_tokens, sample.section.weight) for sample in samples
    ]
    return RowFacts(
        rows=estimated(of_sources, held_out).samples,
        lengths=lengths.tokens,
        is_estimated=any(sample.beginning.is_estimated for sample in samples),
        uncounted_because=lengths.uncounted_because,
    )


def _read_source(section: SourceSection, config: Config, may_fetch: bool) -> SourceSample:
    """Return the beginning of a source. Raises DataError."""
    if not may_fetch and not Path(section.path).exists():
        raise DataError(f"{section.path} is not on this machine yet")
    source = find_source(section, "data.train_path", config.data.columns)
    beginning = read_beginning(source.files)
    if not beginning.rows:
        raise DataError(f"{section.path}: no rows")
    paths = dict.fromkeys(chunk.path for chunk in beginning.chunks)
    formats = {path: detect_format(path, source.columns) for path in paths}
    return SourceSample(section, beginning, formats)


def _sampled_rows(samples: Sequence[SourceSample], config: Config) -> list[Row]:
    """Return SAMPLED_ROWS of the samples' rows; those that cannot be used are left out.

    They are drawn at random, the same ones each time: rows at equal distances may be all alike.
    """
    positions = range(sum(sample.beginning.rows for sample in samples))
    if len(positions) > SAMPLED_ROWS:
        positions = sorted(random.Random(0).sample(positions, SAMPLED_ROWS))
    rows: list[Row] = []
    start = 0  # of a chunk, among all rows
    for sample in samples:
        for chunk in sample.beginning.chunks:
            end = start + len(chunk.records)
            of_chunk = positions[bisect_left(positions, start) : bisect_left(positions, end)]
            if of_chunk:
                drawn = chunk.take([position - start for position in of_chunk])
                row_format = sample.formats[chunk.path]
                parsed = parse_rows(drawn, row_format, system_prompt_of(config))
                rows.extend(row for row in parsed if isinstance(row, Row))
            start = end
    return rows


def _find_counter(
    config: Config, environ: Mapping[str, str], may_fetch: bool
) -> TokenCounter | None:
    counter = TokenCounter.find(config, environ)
    if counter is None and may_fetch:
        from sft_play.data.tokenizer import load_tokenizer  # transformers: seconds

        counter = TokenCounter.of(load_tokenizer(config))
    return counter


def _lengths_of(rows: Sequence[Row], counter: TokenCounter | None, model: str) -> Lengths:
    """Return the tokens of rows.

    Where they have much text, some rows are counted, and the others have as many tokens for each
    character.
    """
    characters = [_characters(row) for row in rows]
    if counter is None:
        reason = f"the tokenizer of {model} is not on this machine"
        return Lengths(_by_characters(characters, 1 / CHARACTERS_PER_TOKEN), reason)
    step = math.ceil(sum(characters) / COUNTED_CHARACTERS)
    step = max(1, min(step, len(rows) // FEWEST_COUNTED_ROWS))
    counted: dict[int, int] = {}
    for position, tokens in zip(
        range(0, len(rows), step), counter.count(rows[::step]), strict=True
    ):
        if tokens is not None:
            counted[position] = tokens
    if not counted:
        reason = f"the chat template of {model} takes none of them"
        return Lengths(_by_characters(characters, 1 / CHARACTERS_PER_TOKEN), reason)
    ratio = sum(counted.values()) / max(1, sum(characters[position] for position in counted))
    if step == 1:
        return Lengths(tuple(sorted(counted.values())))
    return Lengths(_by_characters(characters, ratio))


def _characters(row: Row) -> int:
    return len(row.plain_text) + sum(len(message.content) for message in row.messages)


def _by_characters(characters: Sequence[int], tokens_per_character: float) -> tuple[int, ...]:
    return tuple(sorted(math.ceil(count * tokens_per_character) for count in characters))


class SourceEstimate(NamedTuple):
    """About how many rows a source has, and the tokens of a row."""

    rows: float
    tokens_per_row: float
    weight: float | None


def record_counts(config: Config, data: "RunData") -> None:
    """Record how many samples and tokens a resolved config trains on."""
    tokens = int(data.train.lengths.sum())
    trained_tokens = int(data.train.records["trained"].sum())
    counted = Counted(len(data.train), tokens, trained_tokens / tokens)
    write_json(_record_path(config), asdict(counted))


def count_rows(config: Config) -> Counted:
    """Return how many samples a resolved config trains on.

    The number was recorded when the same rows were tokenized, or is an estimate.
    Raises DataError for rows that cannot be read, are not on this machine, or do not exist.
    """
    path = _record_path(config)
    if path.is_file():
        return Counted(**read_json(path))
    for section in source_sections(config.data.train_path):
        if not Path(section.path).exists():
            raise DataError(f"{section.path} is of the hub; make data-check fetches and counts it")
    return estimate_rows(config)


def count_rows_or_reason(config: Config) -> Counted | str:
    """Return how many samples a resolved config trains on, or why nobody can say."""
    try:
        return count_rows(config)
    except DataError as error:
        return str(error).splitlines()[0]


def estimate_rows(config: Config) -> Counted:
    """Estimate samples and tokens of the training rows from the first 16 MiB of each source.

    Raises DataError where the files hold no row.
    """
    sections = source_sections(config.data.train_path)
    estimates = [_estimate_source(section, config.model.max_seq_len) for section in sections]
    rows = sum(estimate.rows for estimate in estimates)
    if rows == 0:
        raise DataError("the files hold no row")
    return estimated(estimates, held_out_share(config.data, rows))


def _estimate_source(section: SourceSection, max_seq_len: int) -> SourceEstimate:
    files = local_files(Path(section.path), f"data.train_path={section.path}")
    beginning = read_beginning(files)
    if not beginning.rows:
        return SourceEstimate(0.0, 0.0, section.weight)
    tokens = 0.0
    for chunk in beginning.chunks:
        characters = (len(chunk.raw(position)) for position in range(len(chunk.records)))
        tokens += estimated_tokens(characters, max_seq_len)
    return SourceEstimate(beginning.all_rows, tokens / beginning.rows, section.weight)


def _record_path(config: Config) -> Path:
    """Return where the counts of a config are recorded.

    The name digests its settings, and the path, size and time of every local file.
    """
    facts = {
        "data": config.data.model_dump(),
        "model": config.model.model_dump(
            include={
                *("name", "revision", "max_seq_len", "chat_template"),
                *("template_kwargs", "template_date"),
            }
        ),
        "seed": config.train.order_seed,
        "files": [_file_facts(file) for file in _local_files(config)],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(config) / "counts" / f"{key}.json"


def _local_files(config: Config) -> Iterator[Path]:
    for setting in SETTINGS.values():
        for section in source_sections(getattr(config.data, setting)):
            path = Path(section.path)
            candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield from (file for file in candidates if file.is_file())


def _file_facts(file: Path) -> list[str | int]:
    stat = file.stat()
    return [str(file), stat.st_size, stat.st_mtime_ns]
