"""From what a data setting names to files of rows: a file, a folder of them, or a data set of the Hugging Face hub. Loads no torch."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.data.files import FORMATS, format_of
from sft_play.errors import DataError, EnvironmentFault

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
SPLIT = re.compile(r"\w+(\.\w+)*")  # not train[:10%]: the files of a data set hold whole splits
METADATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}  # beside the rows that datasets saves
# Files that may well hold rows, so that a folder is not taken for read when they were left out.
UNREAD = (
    ".txt",
    ".xls",
    ".xlsx",
    ".ods",
    ".xml",
    ".yaml",
    ".yml",
    ".feather",
    ".orc",
    ".avro",
    ".pkl",
    ".pickle",
    ".npy",
    ".npz",
    ".h5",
    ".hdf5",
)
UNREAD_ARCHIVES = (
    ".zip",
    ".tar",
    ".tgz",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".lz4",
    ".7z",
    ".rar",
    ".db",
    ".sqlite",
    ".sqlite3",
    ".tfrecord",
    ".msgpack",
)


@dataclass(frozen=True)
class SourceEntry:
    """One source as a setting names it; split and subset are of hub data sets alone."""

    path: str
    weight: float | None = None
    split: str = "train"
    subset: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """One source as files: at least one, in the order in which they are read."""

    name: str
    files: tuple[Path, ...]
    weight: float | None
    columns: Mapping[str, str]


def find(entry: SourceEntry, setting: str) -> Source:
    """Return the files of a source; those of a hub data set are fetched, once.

    Raises: DataError where nothing of that name is, EnvironmentFault where the hub cannot be asked.
    """
    path, where = Path(entry.path), f"{setting}={entry.path}"
    name = entry.path
    if path.exists():
        if entry.subset is not None or entry.split != "train":
            word = (
                f"subset {entry.subset!r}" if entry.subset is not None else f"split {entry.split!r}"
            )
            raise DataError(
                f"{where}: {word} is of hub data sets, and this is a path; name the file or folder that holds it"
            )
        files = _of_folder(path, where) if path.is_dir() else (_checked(path, where),)
    elif HUB_ID.fullmatch(entry.path) and format_of(path) is None:
        files = _of_hub(entry, where)
        name += f" ({entry.subset})" if entry.subset else ""
    else:
        raise DataError(
            f"{where}: no such file or folder{_hint(path) or '; write a data file, a folder of them, or a hub data set id'}"
        )
    return Source(name, files, entry.weight, dict(entry.columns))


def _checked(path: Path, where: str) -> Path:
    if format_of(path) is None:
        raise DataError(f"{where}: a data file ends in {', '.join(FORMATS)}")
    return path


def _of_folder(folder: Path, where: str) -> tuple[Path, ...]:
    """Return the data files of a folder and those below it, by relative name; hidden ones and names that begin with _ are left out."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise DataError(
            f"{where}: holds the splits {', '.join(splits)}; name one: {folder / (splits or ['train'])[0]}"
        )
    found, unread = [], []
    try:
        _collect(folder, found, unread)
    except OSError as error:
        raise DataError(f"{where}: {error.filename} cannot be read: {error.strerror}") from None
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise DataError(
            f"{where}: holds {unread[0]}{more}, which is not read; move it away, or begin its name with _; data files end in {', '.join(FORMATS)}"
        )
    if not found:
        raise DataError(
            f"{where}: no data file in this folder; data files end in {', '.join(FORMATS)}"
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


def _collect(folder: Path, found: list[Path], unread: list[Path]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith((".", "_")) or entry.name in METADATA:
                continue
            if entry.is_dir(follow_symlinks=False):
                _collect(path, found, unread)
            elif format_of(path) and not path.is_dir():
                found.append(path)
            elif path.is_dir() or path.suffix.lower() in (
                *UNREAD,
                *UNREAD_ARCHIVES,
            ):  # a linked folder might lead back here
                unread.append(path)


def _hint(path: Path) -> str:
    """Return the name that a path which is not there most likely means: one like it, beside the first part of it that is missing."""
    parent = next(folder for folder in (*path.parents, Path()) if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    near = difflib.get_close_matches(missing, sorted(entry.name for entry in parent.iterdir()), n=1)
    return f"; did you mean {parent / near[0]}?" if near else ""


def _of_hub(entry: SourceEntry, where: str) -> tuple[Path, ...]:
    """Return the Arrow files in which datasets keeps a split of a hub data set."""
    import datasets
    import httpx
    import pyarrow as pa

    if not SPLIT.fullmatch(entry.split):
        raise DataError(
            f"{where}: split {entry.split!r} is no name; name a whole split, such as train"
        )
    try:
        loaded = datasets.load_dataset(entry.path, name=entry.subset, split=entry.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise _not_found(entry, where, str(error)) from None
    except (
        FileNotFoundError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
        pa.ArrowException,
    ) as error:  # a loading script, no rows, damaged ones
        raise DataError(
            f"{where}: {_shown(error)} Fetch its files, and name their folder"
        ) from None
    except ValueError as error:  # an unknown split or subset
        raise DataError(
            f"{where}: {_shown(error)} Write it as [{{path: {entry.path}, subset: <subset>, split: <split>}}]"
        ) from None
    except (ConnectionError, httpx.HTTPError) as error:
        advice = "Check the network and HF_HUB_OFFLINE, or fetch the data set elsewhere and name its folder"
        raise EnvironmentFault(
            f"{where}: no such path{_hint(Path(entry.path)) or '.'} The hub cannot be asked: {_shown(error)} {advice}"
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{where}: cannot be fetched: {_shown(error)} See that HF_HOME has room and may be written"
        ) from None
    return tuple(Path(file["filename"]) for file in loaded.cache_files)


def _not_found(entry: SourceEntry, where: str, reason: str) -> DataError | EnvironmentFault:
    if "gated" in reason:
        page = f"https://huggingface.co/datasets/{entry.path}"
        return EnvironmentFault(
            f"{where}: a gated data set; ask for access at {page}, then type `hf auth login`, or set HF_TOKEN"
        )
    return DataError(
        f"{where}: no such path, and no such data set on the hub{_hint(Path(entry.path)) or '.'} If it is a private one, type `hf auth login`, or set HF_TOKEN"
    )


def _shown(error: Exception) -> str:
    """Return what a library says, as one sentence."""
    return " ".join((str(error) or type(error).__name__).split())[:300].rstrip(".") + "."
