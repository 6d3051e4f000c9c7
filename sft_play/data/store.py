"""Tokenized samples on disk: written once, mapped into memory by every process.

A store is a folder of flat little-endian arrays: the ids of all samples in sequence, whether each
id is trained, and a record for each sample; and what happened to the source's rows. The samples of
a row are a tree (`data.trees`), and tokens that a sample shares with the one before it are written
once. Loads no torch.
Legend: N samples, T tokens of one.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from sft_play.data.file_kinds import format_origin
from sft_play.data.render import IGNORE_INDEX, RenderedSample
from sft_play.data.row_hashes import RowHashes
from sft_play.data.rows import ImageFile, Images, PromptIds
from sft_play.data.trees import depth_first

RECORDS = "samples.bin"
ID = np.dtype("<i4")
WEIGHT = np.dtype("<f4")
FIELDS = """
end <i8           of its new tokens in ids.bin
shared <i4        tokens at its start that the sample before it has, too
number <i8        the row's line or index in its file
exact <u8         hash of the row's text
normalized <u8    hash of its words in lower case
question <u8      hash of those before its last trained answer
group <u8         hash of its value in the column data.split_by, 0 if that names none
file <i4          which file of the source
answer_start <i4  first token of the last answer; 0: none, as in plain text
trained <i4       tokens that carry loss
cut <i4           tokens of its row that the length policy cut
weights <i8       start of its new tokens' weights in weights.bin; -1: each weight is 1
images <i8        end of its images in images.bin
image_tokens <i4  that represent the images
"""
RECORD = np.dtype([tuple(line.split()[:2]) for line in FIELDS.split("\n")[1:-1]])
IMAGE = np.dtype(
    [
        ("end", "<i8"),  # of its bytes in image_bytes.bin
        ("is_path", "?"),
        ("width", "<i4"),
        ("height", "<i4"),
    ]
)


ARRAYS = {  # the files of the fields of SampleArrays
    "ids.bin": ID,
    "trained.bin": np.dtype(np.bool_),
    "weights.bin": WEIGHT,
    RECORDS: RECORD,
    "images.bin": IMAGE,
    "image_bytes.bin": np.dtype(np.uint8),  # per image: its path, or its content
}


@dataclass(frozen=True)
class Sample:
    """One sequence as the model sees it.

    ids (T,) int32; labels (T,) int64, IGNORE_INDEX if no loss; weights (T,) float32 of tokens in
    the loss, None if each is 1; the images that ids represent, in order.
    """

    ids: np.ndarray
    labels: np.ndarray
    answer_start: int
    weights: np.ndarray | None = None
    images: Images = ()

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))

    @property
    def prompt(self) -> PromptIds:
        """The ids before the last answer, i.e. the prompt at inference; empty for plain text."""
        return PromptIds(self.ids[: self.answer_start].tolist(), self.images)


class Store:
    """The samples of one source, read-only; opening it reads only sizes."""

    def __init__(self, folder: Path, files: Sequence[str] = (), name: str = ""):
        """`files` are those of its rows, `name` is the source's name in scores."""
        self.folder = folder
        self.files = files
        self.name = name
        arrays = [_map_array(folder / file, dtype) for file, dtype in ARRAYS.items()]
        self.ids, self.trained, self.weights, self.records, self.images, self.image_bytes = arrays
        self.shared = self.records["shared"]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        start, end = self._bounds("end", index)
        shared = int(self.shared[index])
        new = np.asarray(self.ids[start:end])
        ids = np.concatenate([*self._beginning(index, shared), new])
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        labels[shared:] = np.where(self.trained[start:end], new, IGNORE_INDEX)
        first, weights = int(self.records["weights"][index]), None
        if first >= 0:
            weights = np.ones(len(ids), WEIGHT)
            weights[shared:] = self.weights[first : first + end - start]
        images = tuple(self._image(place) for place in range(*self._bounds("images", index)))
        return Sample(ids, labels, int(self.records["answer_start"][index]), weights, images)

    def _beginning(self, index: int, missing: int) -> list[np.ndarray]:
        """Return the first `missing` ids of a sample in parts, from the samples before it."""
        parts: list[np.ndarray] = []
        while missing:
            index -= 1
            shared = int(self.shared[index])
            if shared < missing:
                start, _ = self._bounds("end", index)
                parts.append(np.asarray(self.ids[start : start + missing - shared]))
                missing = shared
        return parts[::-1]

    def _bounds(self, column: str, index: int) -> tuple[int, int]:
        """Return the start and end of a sample in an array; `column` contains the ends."""
        ends = self.records[column]
        return int(ends[index - 1]) if index else 0, int(ends[index])

    def _image(self, place: int) -> ImageFile:
        start = int(self.images["end"][place - 1]) if place else 0
        end, is_path, *size = self.images[place].tolist()
        data = self.image_bytes[start:end].tobytes()
        return ImageFile(data.decode() if is_path else "", b"" if is_path else data, *size)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (N,) int64."""
        return np.diff(self.records["end"], prepend=0) + self.shared

    @cached_property
    def pixels(self) -> np.ndarray:
        """Pixels of the images of each sample, (N,) int64."""
        sizes = self.images["width"].astype(np.int64) * self.images["height"]
        return np.diff(np.cumsum([0, *sizes])[self.records["images"]], prepend=0)


class StoredSample(NamedTuple):
    """A sample to be stored."""

    rendered: RenderedSample
    file: int  # of its row, in the source
    number: int  # of its row, in the file
    hashes: RowHashes  # of its row
    cut: int  # tokens of its row that the length policy cut
    image_tokens: int = 0  # that represent its images


class SampleArrays(NamedTuple):
    """Samples in the format of a store: ids and trained of all tokens, records (N,) RECORD.

    `weights` are those of samples with weights; `images` (I,) IMAGE with `image_bytes`.
    """

    ids: np.ndarray
    trained: np.ndarray
    weights: np.ndarray
    records: np.ndarray
    images: np.ndarray
    image_bytes: np.ndarray


class StoreWriter(contextlib.ExitStack):
    """Appends samples to a store folder; its memory does not grow with the number of samples."""

    def __init__(self, folder: Path):
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [self.enter_context((folder / name).open("wb")) for name in ARRAYS]
        self._sizes = dict.fromkeys(SampleArrays._fields, 0)  # elements written so far

    def append(self, samples: SampleArrays) -> None:
        """Add samples whose `end`, `weights` and `images` count from 0."""
        records, images = samples.records.copy(), samples.images.copy()
        tokens = int(records["end"][-1]) if len(records) else 0
        assert len(samples.ids) == len(samples.trained) == tokens, (
            "the records end where the ids do"
        )
        records["end"] += self._sizes["ids"]
        records["weights"][records["weights"] >= 0] += self._sizes["weights"]
        records["images"] += self._sizes["images"]
        images["end"] += self._sizes["image_bytes"]
        arrays = samples._replace(records=records, images=images)
        named = zip(self._files, arrays._asdict().items(), ARRAYS.values(), strict=True)
        for file, (name, array), dtype in named:
            self._sizes[name] += len(array)
            file.write(np.ascontiguousarray(array, dtype=dtype).tobytes())


def to_arrays(samples: Sequence[StoredSample]) -> SampleArrays:
    """Return samples as arrays, those of each row as a tree."""
    ids: list[np.ndarray] = []  # new tokens of each sample
    labels: list[np.ndarray] = []
    records = np.zeros(len(samples), dtype=RECORD)
    weights: list[float] = []
    images: list[ImageFile] = []
    end = end_of_images = 0
    for index, (stored, common) in enumerate(_as_trees(samples)):
        sample, file, number, hashes, cut, image_tokens = stored
        ids.append(np.array(sample.ids[common:], ID))
        labels.append(np.array(sample.labels[common:], np.int64))
        end += len(ids[-1])
        tokens = (sample.answer_start, sample.trained_tokens, cut)
        first = -1 if sample.weights is None else len(weights)
        weights += (sample.weights or ())[common:]
        images += sample.images
        end_of_images += len(sample.images)
        places = (first, end_of_images, image_tokens)
        records[index] = (end, common, number, *hashes, file, *tokens, *places)
    held = [image.data or image.path.encode() for image in images]
    ends = np.cumsum([len(data) for data in held])
    table = [(end, bool(image.path), *image.size) for end, image in zip(ends, images, strict=True)]
    return SampleArrays(
        np.concatenate([np.zeros(0, ID), *ids]),
        np.concatenate([np.zeros(0, np.int64), *labels]) != IGNORE_INDEX,
        np.array(weights, WEIGHT),
        records,
        np.array(table, IMAGE),
        np.frombuffer(b"".join(held), np.uint8),
    )


def _as_trees(samples: Sequence[StoredSample]) -> list[tuple[StoredSample, int]]:
    """Return samples, those of each row as a tree, with the tokens that each shares.

    A sample shares no token that it trains, its last one, or any next to images.
    """
    found = []
    for _, row in groupby(samples, key=itemgetter(slice(1, 4))):
        of_row = list(row)
        if len(of_row) == 1 or of_row[0].rendered.images:
            found += zip(of_row, repeat(0), strict=False)
            continue
        order, common = depth_first([np.array(sample.rendered.ids) for sample in of_row])
        for index, shared in zip(order, common, strict=True):
            labels = np.array(of_row[index].rendered.labels)
            trained = np.append(labels != IGNORE_INDEX, True).argmax()
            found.append((of_row[index], min(shared, int(trained), len(labels) - 1)))
    return found


class Split:
    """Samples of one or more stores in a fixed order; some may be repeated."""

    def __init__(self, stores: Sequence[Store], indices: Sequence[np.ndarray]):
        """`indices` are the samples' indices in each store."""
        self.stores = tuple(stores)
        counts = [len(part) for part in indices]
        self.store_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.index_in = np.concatenate([np.zeros(0, np.int64), *indices], dtype=np.int64)

    @classmethod
    def whole(cls, stores: Sequence[Store]) -> Self:
        """Return all samples of stores."""
        return cls(stores, [np.arange(len(store)) for store in stores])

    def take(self, mask: np.ndarray) -> "Split":
        """Return the samples for which `mask` (N,) is true, or those at indices."""
        taken = Split(self.stores, ())
        taken.store_of = self.store_of[mask]
        taken.index_in = self.index_in[mask]
        return taken

    def __len__(self) -> int:
        return len(self.index_in)

    def __getitem__(self, index: int) -> Sample:
        return self.stores[self.store_of[index]][int(self.index_in[index])]

    @property
    def has_images(self) -> bool:
        """Whether one of the samples has an image."""
        return bool(self.image_counts.any())

    @property
    def image_counts(self) -> np.ndarray:
        """Images of each sample, (N,) int64."""
        return self._gather(lambda store: np.diff(store.records["images"], prepend=0))

    def source(self, index: int) -> str | None:
        """Return the name of a sample's source in scores, None if there is only one."""
        has_several = len({store.name for store in self.stores}) > 1
        return self.stores[self.store_of[index]].name if has_several else None

    def origin(self, index: int) -> str:
        """Return `file:line` or `file[index]` of a sample's row."""
        store = self.stores[self.store_of[index]]
        record = store.records[self.index_in[index]]
        return format_origin(Path(store.files[record["file"]]), int(record["number"]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (N,) int64."""
        return self._gather(lambda store: store.lengths)

    @cached_property
    def records(self) -> np.ndarray:
        """Record of each sample, (N,) RECORD: `end` refers to its store, `file` to all of them."""
        records = self._gather(lambda store: store.records, RECORD)
        first_file = np.cumsum([0, *(len(store.files) for store in self.stores)])  # of each store
        records["file"] += first_file[self.store_of]
        return records

    @cached_property
    def shared(self) -> np.ndarray:
        """Tokens that each sample shares with the one before it in the split, (N,) int64."""
        shared = self._gather(lambda store: store.shared)
        steps = np.diff(self.index_in, prepend=-1)
        steps[1:][np.diff(self.store_of) != 0] = 0
        shared[steps < 1] = 0  # rows may be repeated
        for index in np.flatnonzero((steps > 1) & (shared > 0)):  # samples between are left out
            last = int(self.index_in[index])
            between = self.stores[self.store_of[index]].shared[last - steps[index] + 1 : last + 1]
            shared[index] = between.min()
        return shared

    @cached_property
    def pixels(self) -> np.ndarray:
        """Pixels of the images of each sample, (N,) int64."""
        return self._gather(lambda store: store.pixels)

    def _gather(self, column: Callable[[Store], np.ndarray], dtype: Any = np.int64) -> np.ndarray:
        values = np.zeros(len(self), dtype=dtype)
        for number, store in enumerate(self.stores):
            is_in_store = self.store_of == number
            values[is_in_store] = column(store)[self.index_in[is_in_store]]
        return values


def _map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    # an older store may lack it, and an empty file cannot be mapped
    if not path.exists() or not path.stat().st_size:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
