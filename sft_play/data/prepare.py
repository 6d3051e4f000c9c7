"""From data settings to what a run trains on and is judged by. Loads no torch.

The front end reads and tokenises, once and before any process group (`find_sources`, `tokenised`, `as_json`); every rank opens
what that made (`from_json`, `assemble.assemble`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, SourceSection
from sft_play.data import cache, tokenize
from sft_play.data.assemble import PreparedData, Tokenised, TokenisedSource, assemble
from sft_play.data.render import template_of
from sft_play.data.sources import Source, SourceEntry, find
from sft_play.errors import DataError

SETTINGS = {"train": "data.train_path", "validation": "data.val_path", "test": "data.test_path"}


def find_sources(config: Config) -> dict[str, tuple[Source, ...]]:
    """Return the sources of each split that has rows of its own, after a look at the first rows of every file. Raises DataError."""
    found = {}
    for split, setting in SETTINGS.items():
        value = getattr(config.data, setting.removeprefix("data."))
        if value is not None:
            found[split] = tuple(
                find(_entry(part, config), setting)
                for part in ([value] if isinstance(value, str) else value)
            )
    for sources in found.values():
        for source in sources:
            tokenize.look(source, tokenize.Policy.of(config))
    return found


def tokenised(config: Config, found: Mapping[str, Sequence[Source]], tokenizer: Any) -> Tokenised:
    """Return every source with the folder of its samples, made now where the cache has none. Raises DataError, OutOfMemory."""
    policy = tokenize.Policy.of(config)
    of_tokenizer = cache.digest_of_tokenizer(tokenizer, template_of(tokenizer))
    return {
        split: tuple(
            _tokenised(source, policy, tokenizer, of_tokenizer, cache.root_of(config))
            for source in sources
        )
        for split, sources in found.items()
    }


def _entry(part: str | SourceSection, config: Config) -> SourceEntry:
    """Return a source of a setting, with the columns that hold for all where it names none."""
    given = SourceSection(path=part) if isinstance(part, str) else part
    return SourceEntry(
        given.path, given.weight, given.split, given.subset, given.columns or config.data.columns
    )


def _tokenised(
    source: Source, policy: tokenize.Policy, tokenizer: Any, of_tokenizer: str, root: Path
) -> TokenisedSource:
    digest = cache.digest_of_files(source.files)
    key = cache.key_of(
        digest,
        of_tokenizer,
        {
            **asdict(policy),
            "columns": dict(source.columns),
            "suffixes": [path.suffix for path in source.files],
        },
    )
    folder = cache.entry(root, key, lambda aside: tokenize.build(aside, source, policy, tokenizer))
    return TokenisedSource(
        source.name, tuple(map(str, source.files)), source.weight, digest, str(folder)
    )


def prepare(config: Config, tokenizer: Any) -> PreparedData:
    """Return the data of a run, tokenised here or found in the cache. Raises DataError, OutOfMemory."""
    return assemble(config, tokenised(config, find_sources(config), tokenizer))


def as_json(sources: Tokenised) -> dict[str, Any]:
    """Return what data.json of a run holds: where the samples of each split are."""
    return {split: [asdict(source) for source in parts] for split, parts in sources.items()}


def from_json(facts: Mapping[str, Any]) -> Tokenised:
    """Return what `as_json` was given. Raises DataError when samples are no longer there."""
    sources = {
        split: tuple(TokenisedSource.from_json(part) for part in parts)
        for split, parts in facts.items()
    }
    for source in (source for parts in sources.values() for source in parts):
        if not (Path(source.folder) / tokenize.META).is_file():
            raise DataError(
                f"{source.folder}: the tokenised rows of {source.name} are gone; start the run anew, which makes them again"
            )
    return sources


def quarantined(sources: Tokenised) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each split that could not be used: origin, reason, row."""
    found: dict[str, list[dict[str, str]]] = {}
    for split, parts in sources.items():
        for source in parts:
            for line in (
                (Path(source.folder) / tokenize.BAD_ROWS).read_text(encoding="utf-8").splitlines()
            ):
                row = json.loads(line)
                origin = f"{source.files[row['file']]}{row['place']}"
                found.setdefault(split, []).append(
                    {"origin": origin, "reason": row["reason"], "row": row["row"]}
                )
    return found
