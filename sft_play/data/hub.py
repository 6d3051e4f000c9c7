"""Data sets of the Hugging Face hub, fetched by the datasets library. Loads no torch."""

import re
from pathlib import Path

from sft_play.config.schema import SourceSection
from sft_play.data.files import file_format, suggest_path
from sft_play.errors import DataError, EnvironmentFault

DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # whole splits only, not train[:10%]
LOG_IN = "type `hf auth login`, or set HF_TOKEN"
MAX_REASON_CHARACTERS = 300


def is_dataset_id(name: str) -> bool:
    """Return whether a name may be that of a hub data set."""
    return DATASET_ID.fullmatch(name) is not None and file_format(Path(name)) is None


def fetch(section: SourceSection, where: str) -> tuple[Path, ...]:
    """Return the Arrow files in which the datasets library keeps a split; `where` begins errors.

    Raises: DataError where the hub has no such rows, EnvironmentFault where it cannot be reached.
    """
    import datasets
    import httpx
    import pyarrow as pa

    if not SPLIT_NAME.fullmatch(section.split):
        raise DataError(
            f"{where}: split {section.split!r} is no name; name a whole split, such as train"
        )
    try:
        loaded = datasets.load_dataset(section.path, name=section.subset, split=section.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise _not_found(section.path, where, str(error)) from None
    except (
        FileNotFoundError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
        pa.ArrowException,
    ) as error:  # a loading script, no rows, damaged rows
        raise DataError(
            f"{where}: {_sentence(error)} Fetch its files, and name their folder"
        ) from None
    except ValueError as error:  # an unknown split or subset
        raise DataError(
            f"{where}: {_sentence(error)} "
            f"Write it as [{{path: {section.path}, subset: <subset>, split: <split>}}]"
        ) from None
    except (ConnectionError, httpx.HTTPError) as error:
        hint = suggest_path(Path(section.path)) or "."
        raise EnvironmentFault(
            f"{where}: no such path{hint} "
            f"The hub cannot be asked: {_sentence(error)} "
            "Check the network and HF_HUB_OFFLINE, "
            "or fetch the data set elsewhere and name its folder"
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{where}: cannot be fetched: {_sentence(error)} "
            "See that HF_HOME has room and may be written"
        ) from None
    return tuple(Path(file["filename"]) for file in loaded.cache_files)


def _not_found(dataset_id: str, where: str, reason: str) -> DataError | EnvironmentFault:
    if "gated" in reason:
        page = f"https://huggingface.co/datasets/{dataset_id}"
        return EnvironmentFault(
            f"{where}: a gated data set; ask for access at {page}, then {LOG_IN}"
        )
    hint = suggest_path(Path(dataset_id)) or "."
    return DataError(
        f"{where}: no such path, and no such data set on the hub{hint} "
        f"If it is a private one, {LOG_IN}"
    )


def _sentence(error: Exception) -> str:
    """Return what a library's error says, as one sentence."""
    words = (str(error) or type(error).__name__).split()
    return " ".join(words)[:MAX_REASON_CHARACTERS].rstrip(".") + "."
