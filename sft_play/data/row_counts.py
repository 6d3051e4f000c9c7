"""How many samples and tokens a config trains on, recorded or estimated.

Loads no torch, no numpy.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sft_play.config.schema import Config, SourceSection
from sft_play.data.beginnings import held_out_share, read_beginning
from sft_play.data.sources import SETTINGS, local_files, source_sections
from sft_play.errors import DataError
from sft_play.plan.workload import Counted, estimated, estimated_tokens
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import cache_folder

if TYPE_CHECKING:
    from sft_play.data.assemble import RunData


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
