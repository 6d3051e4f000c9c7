"""The files that data settings name: a file, a folder, or a data set of the Hugging Face hub.

Hub data sets are fetched by the datasets library. Loads no torch.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.messages import NOT_UTF8, not_utf8
from sft_play.config.schema import Config, DataSection, SourceSection, env_name
from sft_play.data.file_kinds import ENDINGS, MARKDOWN, TEXTS, base_format, file_format
from sft_play.data.files import Chunk, digest_files, read_chunks, suggest_path
from sft_play.data.row_detection import ChunkTask, detect_format
from sft_play.data.row_formats import RowFormat
from sft_play.data.rows import Columns, Json
from sft_play.data.text_files import split_of
from sft_play.errors import DataError, EnvironmentFault
from sft_play.plan.config_json import go_offline_without_network
from sft_play.progress import Stage, watched_stage

logger = logging.getLogger(__name__)

DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
LOG_IN = "type `hf auth login`, or set HF_TOKEN"
MAX_REASON_CHARACTERS = 300
SETTINGS = {"train": "train_path", "validation": "val_path", "test": "test_path"}  # of data
Paths = tuple[Path, ...]
SPARK_PART = "part-"  # start of the names of files that Spark writes; some have no row
# Files that the datasets library saves next to the rows
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
OF_SYSTEM = re.compile("/|/(proc|sys)(/.*)?|/(dev|run|usr|etc|var|boot)")  # not walked
# Files about the others, which are not listed as unread
HOUSEKEEPING = re.compile(
    "(?i)(readme|licen[cs]e|copying|notice|authors|citation|change(log|s)|contributing|"
    "dataset_?card|thumbs.db|desktop.ini)\\b"
)
# Files that may have rows: a folder with one of them is refused instead of read in part
UNSUPPORTED = """
    .xls .ods .xml .yaml .yml .feather .orc .avro .pkl .pickle .npy .npz .h5 .hdf5 .zip .tar .tgz
    .gz .bz2 .xz .zst .lz4 .7z .rar .db .sqlite .sqlite3 .tfrecord .msgpack
    """.split()


def is_dataset_id(name: str) -> bool:
    """Return whether a name may be that of a hub data set."""
    return DATASET_ID.fullmatch(name) is not None and file_format(Path(name)) is None


def _fetch(section: SourceSection, where: str) -> Paths:
    """Return the Arrow files in which the datasets library keeps a split; `where` begins errors.

    Raises: DataError if the hub has no such rows, EnvironmentFault if it cannot be reached.
    """
    go_offline_without_network()
    import datasets
    import httpx
    import pyarrow as pa

    if not SPLIT_NAME.fullmatch(section.split):
        raise DataError(
            f"{where}: split {section.split!r} is no name; name one split, such as train, or a "
            "part of one, such as train[:10%]"
        )
    hint = suggest_path(Path(section.path)) or "."
    try:
        loaded = datasets.load_dataset(section.path, name=section.subset, split=section.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            page = f"https://huggingface.co/datasets/{section.path}"
            raise EnvironmentFault(
                f"{where}: a gated data set; ask for access at {page}, then {LOG_IN}"
            ) from None
        raise DataError(
            f"{where}: no such path, and no such data set on the hub{hint} "
            f"If it is a private one, {LOG_IN}"
        ) from None
    except (
        FileNotFoundError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
        pa.ArrowException,
        ValueError,
    ) as error:  # a loading script, no rows, damaged rows, an unknown split or subset
        raise DataError(
            f"{where}: {_sentence(error)} Name one of its parts as [{{path: {section.path}, "
            "subset: <subset>, split: <split>}], or fetch its files and name their folder"
        ) from None
    except (ConnectionError, httpx.HTTPError) as error:
        raise EnvironmentFault(
            f"{where}: no such path{hint} The hub cannot be asked: {_sentence(error)} "
            "Check the network and HF_HUB_OFFLINE, "
            "or fetch the data set elsewhere and name its folder"
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{where}: cannot be fetched: {_sentence(error)} "
            "See that HF_HOME has room and may be written"
        ) from None
    return tuple(Path(file["filename"]) for file in loaded.cache_files)


def _sentence(error: Exception) -> str:
    """Return the message of a library's error as one sentence."""
    words = (str(error) or type(error).__name__).split()
    return " ".join(words)[:MAX_REASON_CHARACTERS].rstrip(".") + "."


@dataclass(frozen=True)
class Source:
    """One source as files: at least one, in reading order."""

    name: str
    files: Paths
    columns: Columns
    section: SourceSection  # as the user wrote it
    left: tuple[str, ...] = ()  # other splits in the folder
    unread: Paths = ()  # other files in the folder; rows may name some as images
    may_lack_columns: bool = False  # data.columns may name columns that only training rows have

    def read(self) -> Iterator[ChunkTask]:
        """Yield the chunks of all files. Raises DataError."""
        for number in range(len(self.files)):
            yield from self.read_file(number)

    def read_file(self, number: int) -> Iterator[ChunkTask]:
        """Yield the chunks of a file, in the format of the first one. Raises DataError."""
        path = self.files[number]
        row_format = None
        for chunk in read_chunks(path):
            row_format = row_format or self.detect(chunk)
            yield ChunkTask(number, chunk, row_format)
        if row_format is None:
            row = '{"question": "...", "answer": "..."}'
            raise DataError(f"{path}: no rows; a row is such as {row}")

    def detect(self, first: Chunk) -> RowFormat:
        """Return the row format of a file from its first chunk. Raises DataError."""
        try:
            return detect_format(first, self.columns)
        except DataError:
            if self.may_lack_columns:
                with contextlib.suppress(DataError):
                    found = detect_format(first, {})
                    logger.info("%s: read without data.columns: it has none", first.path)
                    return found
            raise

    def bounds(self, rows: int) -> tuple[int, int]:
        """Return the start and end of its part of `rows` rows; % are rounded as in datasets."""
        start, stop = (self.section.part or "[:]")[1:-1].split(":")
        return _bound(start or "0", rows), _bound(stop or "100%", rows)

    @property
    def file_bytes(self) -> int:
        return sum(size for size, *_ in self.states())

    def states(self) -> list[tuple[int, ...]]:
        """Return the size of each file, and properties that a write changes. Raises DataError."""
        try:
            found = [file.stat() for file in self.files]
        except FileNotFoundError as error:
            words = f"{error.filename}: removed while it was read; put it back, and start again"
            raise DataError(words) from None
        return [(each.st_size, each.st_ino, each.st_mtime_ns, each.st_ctime_ns) for each in found]

    def refuse_change(self, before: list[tuple[int, ...]]) -> None:
        """Raise DataError if a file has changed since `before`."""
        for file, then, now in zip(self.files, before, self.states(), strict=True):
            if now != then:
                raise DataError(
                    f"{file}: written to while it was tokenized ({then[0]:,} bytes, now "
                    f"{now[0]:,}); nothing is kept: start again when it is complete"
                )


def _bound(text: str, rows: int) -> int:
    count = int(text.removesuffix("%"))
    if text.endswith("%"):
        count = round(rows * count / 100)
    return rows + count if text.startswith("-") else count


def find_sources(config: Config) -> dict[str, tuple[Source, ...]]:
    """Return the sources of each split that has rows; downloads hub data sets once.

    Raises DataError, and EnvironmentFault if the hub cannot be reached.
    """
    found: dict[str, tuple[Source, ...]] = {}
    for split, name in SETTINGS.items():
        value = getattr(config.data, name)
        if value is not None:
            found[split] = tuple(
                find_source(section, f"data.{name}", config.data)
                for section in source_sections(value)
            )
    for source in found.get("train", ()):
        for left in (split for split in source.left if split not in found):
            typed = env_name(f"data.{SETTINGS[left]}")
            note = "%s: the train rows are read, the %s rows are left out; %s=%s takes them"
            logger.warning(note, source.name, left, typed, source.name)
    return found


def source_sections(value: str | list[str | SourceSection] | None) -> list[SourceSection]:
    """Return the sources in a setting like data.train_path, each as a section."""
    if value is None:
        return []
    sections = []
    for part in value if isinstance(value, list) else [value]:
        sections.append(SourceSection(path=part) if isinstance(part, str) else part)
    return sections


def find_source(section: SourceSection, setting: str, data: DataSection | None = None) -> Source:
    """Return the files of a source; `data` has the columns if the section has none.

    Raises: DataError if nothing of that name exists, EnvironmentFault if the hub cannot be
    reached.
    """
    data = data or DataSection()
    path = Path(section.path)
    where = f"{setting}={section.path}"
    left: tuple[str, ...] = ()
    unread: Paths = ()
    if path.exists():
        has_split = section.split != "train" and not path.is_dir()
        if section.subset is not None or has_split:
            choice = f"split {section.split!r}"
            if section.subset is not None:
                choice = f"subset {section.subset!r}"
            raise DataError(
                f"{where}: {choice} is of hub data sets, and this is a path; "
                "name the file or folder that contains it"
            )
        if not path.is_dir() and file_format(path) is None:
            raise DataError(f"{where}: {ENDINGS}")
        split = split_of(section.split)
        if split == "train":  # as none is named
            split = next(s for s, name in SETTINGS.items() if setting == f"data.{name}")
        files = (path,)
        if path.is_dir():
            files, unread = _list_folder(path, where, data.format)
            files, left = _choose_split(path, where, split, files)
    elif is_dataset_id(section.path):
        files = _fetch(section, where)
    else:
        hint = suggest_path(path) or "; write a data file, a folder of them, or a hub data set id"
        raise DataError(f"{where}: no such file or folder{hint}")
    columns = section.columns or data.columns
    may_lack_columns = setting != "data.train_path" and not section.columns
    return Source(name_of(section), files, columns, section, left, unread, may_lack_columns)


def name_of(section: SourceSection) -> str:
    """Return the name of a source in messages and reports."""
    return f"{section.path} ({section.subset})" if section.subset else section.path


def digest_source(source: Source) -> str:
    """Return the SHA-256 of the contents of a source's files."""
    size = f"{source.file_bytes / 1e9:.1f} GB"
    with watched_stage(Stage(f"reading {source.name}", measure=lambda: size)):
        try:
            return digest_files(source.files, source.section.choice)
        except FileNotFoundError:
            source.states()  # which says so
            raise


def _choose_split(
    folder: Path, where: str, wanted: str | None, files: Paths
) -> tuple[Paths, tuple[str, ...]]:
    """Return the files of a folder, or those of its wanted split, and the remaining splits.

    Raises: DataError if some files belong to splits, and others do not.
    """
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        parts = reversed(file.relative_to(folder).parts)  # a file's name takes precedence
        by_split.setdefault(next(filter(None, map(split_of, parts)), None), []).append(file)
    if len(by_split) == 1 and not (folder / "dataset_dict.json").is_file():
        return files, ()
    if wanted not in by_split or None in by_split:
        found = [f"{split or 'no split'}: {held[0]}" for split, held in by_split.items()]
        raise DataError(
            f"{where}: the files seem to be of several splits ({', '.join(found)}); "
            f"name the file or folder of the {wanted} rows"
        )
    return tuple(by_split[wanted]), tuple(sorted(by_split.keys() - {wanted}))


def _list_folder(folder: Path, where: str, read_as: str) -> tuple[Paths, Paths]:
    """Return the data files in and below a folder, sorted, and files that are not read."""
    if OF_SYSTEM.fullmatch(os.path.realpath(folder)):
        raise DataError(f"{where}: a folder of the system; name the folder of the data files")
    files: list[Path] = []
    unsupported: list[Path] = []
    unread: list[Path] = []
    try:
        for path in _walk(folder):
            ends = (path.suffix.lower() in UNSUPPORTED, path.name.startswith(SPARK_PART))
            if file_format(path) and not path.is_dir():
                is_read = base_format(path) != MARKDOWN or read_as == "text"
                (files if is_read else unread).append(path)
            elif path.is_dir() or any(ends):
                unsupported.append(path)  # also a linked folder, which might lead back here
            else:
                unread.append(path)
    except OSError as error:
        reason = f"{error.filename} cannot be read: {error.strerror}"
        raise DataError(f"{where}: {reason}; name the folder of the data files") from None
    if unsupported:
        more = f" and {len(unsupported) - 1} more" if len(unsupported) > 1 else ""
        raise DataError(
            f"{where}: contains {unsupported[0]}{more}, which is not read; "
            f"move it away, or begin its name with _; {ENDINGS}"
        )
    texts = [path for path in files if base_format(path) in TEXTS]
    if texts and len(texts) < len(files):  # a README.txt, for example
        raise DataError(
            f"{where}: contains {texts[0]} next to files of rows; "
            "move it away, or begin its name with _"
        )
    notes = [path for path in unread if base_format(path) == MARKDOWN]
    if not files and notes:
        raise DataError(
            f"{where}: contains only .md files ({len(notes)}, the first is {min(notes)}); "
            "DATA_FORMAT=text reads them as plain texts"
        )
    if not files:
        raise DataError(f"{where}: no data file in this folder; {ENDINGS}")
    unread = [path for path in unread if not HOUSEKEEPING.match(path.name)]
    return tuple(sorted(files, key=lambda path: path.relative_to(folder).as_posix())), tuple(unread)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files and linked folders in and below a folder that are not hidden or empty."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if not_utf8(entry.name):
                raise DataError(f"{path} {NOT_UTF8}")
            if entry.name.startswith((".", "_")) or entry.name in METADATA:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(path)
            elif not entry.name.startswith(SPARK_PART) or entry.stat().st_size:
                yield path


def changed_sources(facts: Json, config: Config) -> dict[str, list[str]]:
    """Return by setting how the sources differ from those in a run's data.json (`facts`).

    Files are compared by their bytes, and read only if they have the run's size. A source
    with the same name is considered the same if it is on the hub, or if its files are missing.
    Raises: DataError if a setting names nothing that can be read.
    """
    changed: dict[str, list[str]] = {}
    for split, name in SETTINGS.items():
        setting = f"data.{name}"
        sections = source_sections(getattr(config.data, name))
        recorded = facts["sources"].get(split, [])
        if len(sections) != len(recorded):
            changed[setting] = [f"sources={len(sections)}, and it was trained with {len(recorded)}"]
            continue
        pairs = zip(sections, recorded, strict=True)
        found = [_find_difference(*pair, setting, config.data) for pair in pairs]
        reasons = [reason for reason in found if reason is not None]
        if reasons:
            changed[setting] = reasons
    return changed


def _find_difference(now: SourceSection, then: Json, setting: str, data: DataSection) -> str | None:
    """Return how a source differs from the one in data.json, None if it does not."""
    name = name_of(now)
    asked = (f"weight {now.weight}", now.choice or "all rows")
    trained = (f"weight {then['weight']}", then.get("choice") or "all rows")
    for wanted, used in zip(asked, trained, strict=True):
        if wanted != used:
            return f"{name} has {wanted}, and it was trained with {used}"
    if not Path(now.path).exists():  # missing, or on the hub
        if then["name"] in (name, str(Path(now.path).resolve())):  # a run has absolute paths
            return None
        if is_dataset_id(now.path):
            return f"{name} is another data set than {then['name']}, with which it was trained"
    source = find_source(now, setting, data)
    has_other_size = then.get("file_bytes") not in (None, source.file_bytes)  # None: not recorded
    if has_other_size or digest_source(source) != then["digest"]:
        return f"{name} has other bytes than the files that it was trained with"
    return None
