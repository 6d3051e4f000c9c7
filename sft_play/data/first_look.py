"""A first look at the training rows, before a run is planned: how many, and how long in tokens.

Takes a second or two for files of any size. Loads no torch, unless a tokenizer must be fetched.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sft_play.config.schema import Config, SourceSection
from sft_play.data.beginnings import Beginning, held_out_share, read_beginning
from sft_play.data.row_detection import detect_format
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import parse_rows
from sft_play.data.rows import Row
from sft_play.data.sources import find_source, source_sections, system_prompt_of
from sft_play.data.token_counter import TokenCounter
from sft_play.errors import DataError
from sft_play.plan import sources
from sft_play.plan.recipe import RowFacts
from sft_play.plan.workload import CHARACTERS_PER_TOKEN, estimated

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
