"""Whether the files that the data settings name hold what a run was made of. Loads no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, SourceSection
from sft_play.data import hub
from sft_play.data.rows import Json
from sft_play.data.sources import SETTINGS, digest_source, find_source, name_of, source_sections

Recorded = Mapping[str, Any]  # a source as data.json has it


def changed_sources(facts: Json, config: Config) -> dict[str, list[str]]:
    """Return in what the sources are not those of a run's data.json (`facts`), by setting.

    Files are compared by their bytes, and read only where their size is that of the run's. A source
    of the same name is the run's where it is of the hub, or where its files are gone.
    Raises: DataError where a setting names nothing that can be read.
    """
    changed: dict[str, list[str]] = {}
    for split, name in SETTINGS.items():
        setting = f"data.{name}"
        sections = source_sections(getattr(config.data, name))
        reasons = _differences(sections, facts["sources"].get(split, []), setting)
        if reasons:
            changed[setting] = reasons
    return changed


def _differences(
    sections: Sequence[SourceSection], recorded: Sequence[Recorded], setting: str
) -> list[str]:
    if len(sections) != len(recorded):
        return [f"sources={len(sections)}, and it was trained with {len(recorded)}"]
    reasons = []
    for now, then in zip(sections, recorded, strict=True):
        reason = _difference(now, then, setting)
        if reason is not None:
            reasons.append(reason)
    return reasons


def _difference(now: SourceSection, then: Recorded, setting: str) -> str | None:
    """Return in what a source is not the one that was recorded, None where it is."""
    name = name_of(now)
    if now.weight != then["weight"]:
        return f"{name} has weight {now.weight}, and it was trained with {then['weight']}"
    is_gone_or_of_hub = not Path(now.path).exists()
    names = (name, str(Path(now.path).resolve()))  # a run has absolute paths
    if is_gone_or_of_hub and then["name"] in names:
        return None
    if is_gone_or_of_hub and hub.is_dataset_id(now.path):
        return f"{name} is another data set than {then['name']}, with which it was trained"
    source = find_source(now, setting)
    has_other_size = then.get("file_bytes") not in (None, source.file_bytes)  # None: not recorded
    if has_other_size or digest_source(source) != then["digest"]:
        return f"{name} has other bytes than the files that it was trained with"
    return None
