"""Tokenised samples on disk: written once, mapped into memory by every process that reads them. Loads no torch.

A store is a folder of flat arrays, little-endian: the ids of all samples one behind the other, whether each is trained,
and a record for each sample. Legend: N samples, T tokens of one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from sft_play.data.files import origin_of
from sft_play.data.render import IGNORE_INDEX, Rendered

IDS, TRAINED, RECORDS = "ids.bin", "trained.bin", "records.bin"
RECORD = np.dtype(
    [
        ("end", "<i8"),  # of its tokens in ids.bin
        ("number", "<i8"),  # the row's line or index in its file
        ("exact", "<u8"),  # hash of the row's text
        (
            "normalised",
            "<u8",
        ),  # hash of the same in lower case, runs of blanks and punctuation as one blank
        ("file", "<i4"),  # which file of the source
        (
            "answer_start",
            "<i4",
        ),  # where the last answer's first token is; 0: none, as in plain text
        ("trained", "<i4"),  # tokens that carry loss
        ("cut", "<i4"),  # tokens that the length policy took off this sample's left
    ]
)


@dataclass(frozen=True)
class Sample:
    """One sequence as the model sees it: ids (T,) int32, labels (T,) int64 with IGNORE_INDEX where no loss."""

    ids: np.ndarray
    labels: np.ndarray
    answer_start: int

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))

    @property
    def prompt(self) -> list[int]:
        """The ids before the last answer: what the model is given when it is to answer; empty for plain text."""
        return self.ids[: self.answer_start].tolist()


class Store:
    """The samples of one source, read-only; opening it reads nothing but sizes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.records = _mapped(folder / RECORDS, RECORD)
        self.ids = _mapped(folder / IDS, np.dtype("<i4"))
        self.trained = _mapped(folder / TRAINED, np.dtype(np.bool_))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        end = int(self.records["end"][index])
        start = int(self.records["end"][index - 1]) if index else 0
        ids = np.asarray(self.ids[start:end])
        labels = np.where(self.trained[start:end], ids.astype(np.int64), IGNORE_INDEX)
        return Sample(ids, labels, int(self.records["answer_start"][index]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (N,) int64."""
        return np.diff(self.records["end"], prepend=0)


@dataclass(frozen=True)
class Origin:
    """What a record needs to know of a sample's row."""

    file: int
    number: int
    exact: int
    normalised: int


class StoreWriter:
    """Appends samples to a store folder; what it holds in memory does not grow with the number of samples."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: (folder / name).open("wb") for name in (IDS, TRAINED, RECORDS)}
        self.tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    def append(self, ids: np.ndarray, trained: np.ndarray, records: np.ndarray) -> None:
        """Add samples: their ids and masks one behind the other, and their records, whose `end` counts from here."""
        assert len(ids) == len(trained) == (records["end"][-1] if len(records) else 0), (
            "the records end where the ids do"
        )
        records = records.copy()
        records["end"] += self.tokens
        self.tokens += len(ids)
        for name, array, dtype in (
            (IDS, ids, "<i4"),
            (TRAINED, trained, np.bool_),
            (RECORDS, records, RECORD),
        ):
            self._files[name].write(np.ascontiguousarray(array, dtype=dtype).tobytes())


def as_arrays(
    samples: Sequence[tuple[Rendered, Origin, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, trained, records) of samples, each with its origin and the tokens cut off its left."""
    records = np.zeros(len(samples), dtype=RECORD)
    ids = np.fromiter(chain.from_iterable(rendered.ids for rendered, _, _ in samples), dtype="<i4")
    labels = np.fromiter(
        chain.from_iterable(rendered.labels for rendered, _, _ in samples), dtype=np.int64
    )
    trained = labels != IGNORE_INDEX
    for name in ("number", "exact", "normalised", "file"):
        records[name] = [getattr(origin, name) for _, origin, _ in samples]
    records["answer_start"] = [rendered.answer_start for rendered, _, _ in samples]
    records["cut"] = [cut for _, _, cut in samples]
    records["end"] = np.cumsum([len(rendered.ids) for rendered, _, _ in samples], dtype=np.int64)
    counted = np.concatenate([[0], np.cumsum(trained)])  # trained tokens before each position
    records["trained"] = (
        counted[records["end"]] - counted[np.r_[0, records["end"][:-1]]] if len(samples) else 0
    )
    return ids, trained, records


class Split:
    """Samples of one or more stores in a fixed order, some of them perhaps several times."""

    def __init__(
        self,
        stores: Sequence[Store],
        chosen: Sequence[tuple[int, np.ndarray]],
        files: Sequence[Sequence[str]] = (),
    ):
        """`chosen` holds (store, indices of samples in it); `files`, what the files of each store are called."""
        self.stores, self.files = tuple(stores), tuple(files)
        self.store_of = np.concatenate(
            [np.full(len(indices), number, dtype=np.int32) for number, indices in chosen]
            or [np.zeros(0, np.int32)]
        )
        self.index_in = np.concatenate(
            [np.asarray(indices, dtype=np.int64) for _, indices in chosen]
            or [np.zeros(0, np.int64)]
        )

    @classmethod
    def whole(cls, store: Store) -> Self:
        """Return all samples of a store."""
        return cls([store], [(0, np.arange(len(store)))])

    def __len__(self) -> int:
        return len(self.index_in)

    def __getitem__(self, index: int) -> Sample:
        return self.stores[self.store_of[index]][int(self.index_in[index])]

    def origin(self, index: int) -> str:
        """Return `file:line` or `file[index]` of a sample's row."""
        store = self.store_of[index]
        record = self.stores[store].records[self.index_in[index]]
        return origin_of(Path(self.files[store][record["file"]]), int(record["number"]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (N,) int64."""
        return self._of_each(lambda store: store.lengths, np.dtype(np.int64))

    @cached_property
    def records(self) -> np.ndarray:
        """Record of each sample, (N,) RECORD; `end` counts within the sample's own store."""
        return self._of_each(lambda store: store.records, RECORD)

    def _of_each(self, column: Any, dtype: np.dtype) -> np.ndarray:
        values = np.zeros(len(self), dtype=dtype)
        for number, store in enumerate(self.stores):
            mine = self.store_of == number
            values[mine] = column(store)[self.index_in[mine]]
        return values


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return (
        np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
    )  # nothing cannot be mapped
