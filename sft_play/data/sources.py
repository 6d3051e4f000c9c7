"""The files that data settings name: a file, a folder, or a data set of the Hugging Face hub.

Loads no torch.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import Config, SourceSection
from sft_play.data import cache, hub
from sft_play.data.account import DataAccount
from sft_play.data.bad_rows import BadRows
from sft_play.data.files import FORMATS, base_format, file_format, read_chunks, suggest_path
from sft_play.data.row_detection import detect_format
from sft_play.data.row_parsing import SystemPrompt, parse_rows
from sft_play.data.rows import BadRow
from sft_play.data.tally import Tally
from sft_play.errors import DataError
from sft_play.progress import Stage, watched

SETTINGS = {"train": "train_path", "validation": "val_path", "test": "test_path"}  # of data
CHECKED_ROWS = 2000  # of each file, before a tokenizer is loaded
# Files that the datasets library saves beside the rows
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Files that may hold rows: a folder with one of them is refused, not read in part
UNSUPPORTED = (
    *(".xls", ".ods", ".xml", ".yaml", ".yml", ".feather", ".orc", ".avro"),
    *(".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5"),
    *(".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".7z", ".rar"),
    *(".db", ".sqlite", ".sqlite3", ".tfrecord", ".msgpack"),
)


@dataclass(frozen=True)
class Source:
    """One source as files: at least one, in the order in which they are read."""

    name: str
    files: tuple[Path, ...]
    weight: float | None  # share of an epoch, relative to other sources
    columns: Mapping[str, str]  # field: the file's column

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def find_sources(
    config: Config, account: DataAccount | None = None
) -> dict[str, tuple[Source, ...]]:
    """Return the sources of each split that has rows of its own.

    Checks the first rows of every file, and fetches hub data sets once. What was read is entered in
    the account. Raises DataError, and EnvironmentFault where the hub cannot be reached.
    """
    account = account or DataAccount()
    found: dict[str, tuple[Source, ...]] = {}
    for split, name in SETTINGS.items():
        value = getattr(config.data, name)
        if value is not None:
            found[split] = tuple(
                find_source(section, f"data.{name}", config.data.columns)
                for section in source_sections(value)
            )
    for split, sources in found.items():
        for source in sources:
            account.find(split, source.name, len(source.files))
    for split, sources in found.items():
        for source in sources:
            bad = check_first_rows(source, config)
            dropped = Counter({"bad_row": bad.total})
            tally = Tally(rows_in=bad.rows_read, dropped=dropped)
            account.read(split, source.name, len(source.files), tally)
            if bad.total and config.data.on_bad_row == "fail":
                bad.refuse()
    return found


def source_sections(value: str | list[str | SourceSection] | None) -> list[SourceSection]:
    """Return what a setting such as data.train_path names, each as a section of its own."""
    if value is None:
        return []
    sections = []
    for part in value if isinstance(value, list) else [value]:
        sections.append(SourceSection(path=part) if isinstance(part, str) else part)
    return sections


def find_source(
    section: SourceSection, setting: str, columns: Mapping[str, str] | None = None
) -> Source:
    """Return the files of a source; `columns` holds where the section names none.

    Raises: DataError where nothing of that name exists, EnvironmentFault where the hub cannot be
    reached.
    """
    path = Path(section.path)
    where = f"{setting}={section.path}"
    if path.exists():
        _refuse_hub_options(section, where)
        files = local_files(path, where)
    elif hub.is_dataset_id(section.path):
        files = hub.fetch(section, where)
    else:
        hint = suggest_path(path) or "; write a data file, a folder of them, or a hub data set id"
        raise DataError(f"{where}: no such file or folder{hint}")
    own_columns = dict(section.columns or columns or {})
    return Source(name_of(section), files, section.weight, own_columns)


def name_of(section: SourceSection) -> str:
    """Return the name of a source in messages and reports."""
    return f"{section.path} ({section.subset})" if section.subset else section.path


def digest_source(source: Source) -> str:
    """Return the SHA-256 of the contents of a source's files."""
    size = f"{source.file_bytes / 1e9:.1f} GB"
    with watched(Stage(f"reading {source.name}", measure=lambda: size)):
        return cache.digest_files(source.files)


def check_first_rows(source: Source, config: Config) -> BadRows:
    """Return the bad ones among the first rows of every file: most mistakes show there.

    Raises DataError for a file that cannot be read.
    """
    bad = BadRows()
    for path in source.files:
        row_format = detect_format(path, source.columns)
        chunk = next(read_chunks(path, CHECKED_ROWS))
        rows = parse_rows(chunk, row_format, system_prompt_of(config))
        bad.add(row for row in rows if isinstance(row, BadRow))
        bad.rows_read += len(chunk.records)
    return bad


def system_prompt_of(config: Config) -> SystemPrompt:
    """Return the system message of data.system_prompt."""
    return SystemPrompt(config.data.system_prompt, config.data.system_prompt_mode == "replace")


def local_files(path: Path, where: str) -> tuple[Path, ...]:
    """Return the data files that a path holds; `where` begins errors. Raises DataError."""
    if path.is_dir():
        return _files_of_folder(path, where)
    if file_format(path) is None:
        raise DataError(f"{where}: a data file ends in {', '.join(FORMATS)}")
    return (path,)


def _refuse_hub_options(section: SourceSection, where: str) -> None:
    choice = None
    if section.split != "train":
        choice = f"split {section.split!r}"
    if section.subset is not None:
        choice = f"subset {section.subset!r}"
    if choice:
        raise DataError(
            f"{where}: {choice} is of hub data sets, and this is a path; "
            "name the file or folder that holds it"
        )


def _files_of_folder(folder: Path, where: str) -> tuple[Path, ...]:
    """Return the data files in and below a folder, sorted, without names that begin with . or _."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        example = folder / (splits or ["train"])[0]
        raise DataError(f"{where}: holds the splits {', '.join(splits)}; name one: {example}")
    files: list[Path] = []
    unsupported: list[Path] = []
    try:
        _collect(folder, files, unsupported)
    except OSError as error:
        raise DataError(f"{where}: {error.filename} cannot be read: {error.strerror}") from None
    if unsupported:
        more = f" and {len(unsupported) - 1} more" if len(unsupported) > 1 else ""
        raise DataError(
            f"{where}: holds {unsupported[0]}{more}, which is not read; "
            "move it away, or begin its name with _; "
            f"data files end in {', '.join(FORMATS)}"
        )
    texts = [path for path in files if base_format(path) == ".txt"]
    if texts and len(texts) < len(files):  # perhaps a README.txt
        raise DataError(
            f"{where}: holds {texts[0]} beside files of rows; "
            "move it away, or begin its name with _"
        )
    if not files:
        raise DataError(
            f"{where}: no data file in this folder; data files end in {', '.join(FORMATS)}"
        )
    return tuple(sorted(files, key=lambda path: path.relative_to(folder).as_posix()))


def _collect(folder: Path, files: list[Path], unsupported: list[Path]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith((".", "_")) or entry.name in METADATA:
                continue
            if entry.is_dir(follow_symlinks=False):
                _collect(path, files, unsupported)
            elif file_format(path) and not path.is_dir():
                files.append(path)
            elif path.is_dir() or path.suffix.lower() in UNSUPPORTED:
                unsupported.append(path)  # also a linked folder, which might lead back here
