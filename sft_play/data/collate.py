"""Collate samples to batches: sequences of one or more documents as tensors.

The documents of a sequence never see each other, and nothing predicts the first token of each. The
pixels of all images of a batch are one input, in the order of their tokens, so the vision encoder
runs once. Images are opened here, in the processes that load batches.

Legend: B sequences of a micro-batch, T tokens of its widest, N documents, I images.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sft_kernels.boundaries import Documents, ImageBlock
from sft_kernels.loss.tokens import labelled
from sft_kernels.trees import Branch, lay_out
from sft_play.data.batch import Batch
from sft_play.data.images import decode
from sft_play.data.packing import batch_shape, padded_width
from sft_play.data.processor import Processor
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.rows import ImageFile, Images
from sft_play.data.store import Sample, Split
from sft_play.data.trees import Units

TYPES = ("mm_token_type_ids", "token_type_ids")  # names of the token types in models


@dataclass(frozen=True)
class TokenSequence:
    """One or more documents: ids (T,) and labels (T,) int64, and the branches of each document."""

    ids: np.ndarray
    labels: np.ndarray
    trees: tuple[tuple[Branch, ...], ...]  # of each document, its samples
    weights: np.ndarray | None = None  # (T,) of labels in the loss; None: each weight is 1
    images: tuple[Images, ...] = ()  # per document; (): no document has images

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each document."""
        return tuple(sum(branch.new for branch in tree) for tree in self.trees)

    @property
    def real_branches(self) -> list[Branch]:
        """The samples of the documents that are not fillers."""
        documents = np.split(self.labels, np.cumsum(self.lengths)[:-1])
        are_real = [(labels != IGNORE_INDEX).any() for labels in documents]
        return list(chain.from_iterable(compress(self.trees, are_real)))


class TrainRows(Dataset[TokenSequence]):
    """Sequences by the index of their sample, or of their unit, or by the indices of several.

    `~index` (negative) represents a filler: the same ids, without loss.
    """

    def __init__(self, samples: Sequence[Sample] | Split, units: Units | None = None):
        """Without units each sample is one."""
        self.samples = samples
        self.units = units

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: int | Sequence[int]) -> TokenSequence:
        if isinstance(indices, int):
            indices = [indices]
        documents = []
        for index in indices:
            document = self._document(max(index, ~index))
            if index < 0:
                labels = np.full_like(document.labels, IGNORE_INDEX)
                document = replace(document, labels=labels)
            documents.append(document)
        return _join(documents)

    def _document(self, index: int) -> TokenSequence:
        """Return the sequence of a sample, or of a unit's samples as a tree."""
        first, *others = [index] if self.units is None else self.units.samples(index)
        document = _new_tokens(self.samples[first])
        assert document.labels[0] == IGNORE_INDEX, (
            "a first token that is trained would be predicted from the document before it"
        )
        if not others:
            return document
        parts = [
            _new_tokens(self.samples[other], int(self.samples.shared[other])) for other in others
        ]
        joined = _join([document, *parts])
        return replace(joined, images=((),), trees=(tuple(chain.from_iterable(joined.trees)),))


def _new_tokens(sample: Sample, shared: int = 0) -> TokenSequence:
    """Return a sample without its first tokens, which another one of its tree has."""
    ids = np.asarray(sample.ids[shared:], dtype=np.int64)
    labels = np.asarray(sample.labels[shared:], dtype=np.int64)
    weights = None if sample.weights is None else sample.weights[shared:]
    return TokenSequence(ids, labels, ((Branch(shared, len(ids)),),), weights, (sample.images,))


def _join(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one sequence with the documents of several sequences."""
    weights = _weights(sequences)
    return TokenSequence(
        np.concatenate([sequence.ids for sequence in sequences]),
        np.concatenate([sequence.labels for sequence in sequences]),
        tuple(chain.from_iterable(sequence.trees for sequence in sequences)),
        np.concatenate(weights) if weights else None,
        tuple(chain.from_iterable(sequence.images for sequence in sequences)),
    )


def _weights(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Return the weights of each sequence, [] if all weights are 1."""
    if all(sequence.weights is None for sequence in sequences):
        return []
    return [
        np.ones(len(sequence.ids), np.float32) if sequence.weights is None else sequence.weights
        for sequence in sequences
    ]


@dataclass(frozen=True)
class ImageInputs:
    """Creates the image inputs of one model.

    `arguments` are those of the model's forward method. `rope` has transformers' `get_rope_index`
    if positions have three axes; packed batches need it. With `gives_blocks`, images are read
    in both directions, and the documents of a packed batch have `image_blocks`.
    """

    processor: Processor
    arguments: frozenset[str]
    dtype: torch.dtype = torch.float32  # of pixels, as the vision encoder computes
    rope: nn.Module | None = None  # on the meta device
    gives_blocks: bool = False

    def __call__(
        self,
        images: Sequence[Sequence[ImageFile]],
        ids: Tensor,
        documents: Sequence[Sequence[int]] = (),
    ) -> dict[str, Any]:
        """Return the inputs for the images of each document; {} if there are no images.

        ids (B, T); `documents` are the lengths of the documents of each row, () if each row is
        one document and the model computes its positions itself.

        Raises: DataError for an image that has changed since its row was read.
        """
        opened = [decode(image) for image in chain.from_iterable(images)]
        if not opened:
            return {}
        batch: dict[str, Any] = self.processor.inputs(opened)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(self.dtype)  # halves the bytes to copy
        types = self._types(ids)
        batch |= {name: types for name in TYPES if name in self.arguments}
        if documents and self.rope is not None:
            batch["position_ids"] = self._positions(images, ids, types, documents, batch)
        return batch

    def blocks(self, ids: Tensor, documents: Sequence[Sequence[int]]) -> list[ImageBlock]:
        """Return the `image_blocks` of a packed batch, [] for a model that reads in one direction.

        ids (B, T); `documents` as above.
        """
        return image_blocks(self._types(ids), documents) if self.gives_blocks else []

    def _types(self, ids: Tensor) -> Tensor:
        return torch.tensor(list(map(self.processor.token_types, ids.tolist())))

    def _positions(
        self,
        images: Sequence[Sequence[ImageFile]],
        ids: Tensor,
        types: Tensor,
        documents: Sequence[Sequence[int]],
        batch: dict[str, Any],
    ) -> Tensor:
        """Return positions (4, B, T): in the text, then by time, height and width."""
        find = self.rope.get_rope_index  # type: ignore[union-attr]
        of_images = inspect.signature(find).parameters.keys() & batch.keys()
        of_images -= set(TYPES)
        found = torch.zeros(4, *ids.shape, dtype=torch.int64)
        counts = iter(map(len, images))
        first = 0  # index of a document's first image
        for row, lengths in enumerate(documents):
            start = 0
            for length in (*lengths, ids.shape[1] - sum(lengths)):
                here = slice(start, start + length)
                is_padding = start == sum(lengths)
                count = 0 if is_padding else next(counts)
                own = {name: batch[name][first : first + count] for name in of_images}
                found[:, row, here] = torch.arange(length)
                if count:
                    found[1:, row, here] = find(
                        ids[row : row + 1, here],
                        mm_token_type_ids=types[row : row + 1, here],
                        **own,
                    )[0][:, 0]
                start += length
                first += count
        return found


def image_blocks(types: Tensor, documents: Sequence[Sequence[int]]) -> list[ImageBlock]:
    """Return the ranges read in both directions: start and end of each image, and its document.

    types (B, T) are 1 for image tokens; all positions refer to the flattened rows.

    >>> image_blocks(torch.tensor([[0, 1, 1, 1, 0, 1]]), [[3, 3]])
    [(1, 3, 0), (3, 4, 3), (5, 6, 3)]
    """
    found = []
    for row, lengths in enumerate(documents):
        begin = row * types.shape[1]
        start = 0
        for length in lengths:
            is_image = [0, *types[row, start : start + length].tolist(), 0]
            edges = [at for at in range(length + 1) if is_image[at] != is_image[at + 1]]
            document = begin + start
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                found.append((document + first, document + last, document))
            start += length
    return found


@dataclass(frozen=True)
class PadCollator:
    """Collates one document per row, padded on the right.

    The model's inputs are input_ids and attention_mask, each (B, T) int64. T is the longest row, or
    with `max_seq_len` one of the few widths of `padded_width`.
    """

    pad_id: int
    max_seq_len: int | None = None
    images: ImageInputs | None = None  # of a base model that reads images

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        assert all(len(sequence.lengths) == 1 for sequence in sequences), (
            "an attention mask keeps no documents apart"
        )
        ids = [sequence.ids for sequence in sequences]
        width = max(map(len, ids))
        if self.max_seq_len is not None:
            width = padded_width(width, self.max_seq_len)
        inputs: dict[str, Any] = {
            "input_ids": _pad(ids, self.pad_id, width),
            "attention_mask": _pad([np.ones_like(row) for row in ids], 0, width),
        }
        if self.images is not None:
            inputs |= self.images(images_by_document(sequences), inputs["input_ids"])
        return _batch(sequences, width, inputs)


@dataclass(frozen=True)
class PackCollator:
    """Collates rows of several documents. Inputs are input_ids and position_ids (B, T) int64.

    With `in_one_row` all documents of the batch form one row, with less than 64 tokens of padding.
    Rows of one document each remain separate rows if they need hardly any padding, and a single
    row always does.

    position_ids start at 0 in every document, and the padding on the right counts as a document.
    transformers separates documents by them if there is no attention_mask and no key-value
    cache. With `varlen`, the batch also has the `Documents` of the flattened batch. Flash attention
    needs them, because it finds documents itself only in a batch of one row. In this case the
    padding belongs to the row's last document, after its end, where no token attends to it. A row
    of one document therefore remains one document, which the fastest kernels support.

    Documents that are trees of several samples need `varlen`.

    >>> ids = np.array([5, 6, 7, 8, 9])
    >>> labels = np.array([-100, 6, -100, 8, 9])
    >>> two = TokenSequence(ids, labels, ((Branch(0, 2),), (Branch(0, 3),)))
    >>> batch = PackCollator(0, max_seq_len=8)([two])
    >>> batch.ids.tolist(), batch.inputs["position_ids"].tolist()
    ([[5, 6, 7, 8, 9, 0, 0, 0]], [[0, 1, 0, 1, 2, 0, 1, 2]])
    >>> batch.labels.tolist()
    [[-100, 6, -100, 8, 9, -100, -100, -100]]
    """

    pad_id: int
    max_seq_len: int
    varlen: bool = False
    in_one_row: bool = False  # with varlen
    images: ImageInputs | None = None  # of a base model that reads images

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        lengths = [sequence.lengths for sequence in sequences]
        rows, width = batch_shape(lengths, self.max_seq_len, self.in_one_row)
        if rows < len(sequences):
            sequences = [_join(sequences)]
        ids = _pad([sequence.ids for sequence in sequences], self.pad_id, width)
        branches = list(chain.from_iterable(_branches(sequence, width) for sequence in sequences))
        positions, ends, parents = map(torch.from_numpy, lay_out(branches))
        inputs = {"input_ids": ids, "position_ids": positions.view_as(ids)}
        blocks: list[ImageBlock] = []
        if self.images is not None:
            lengths = [sequence.lengths for sequence in sequences]
            inputs |= self.images(images_by_document(sequences), ids, lengths)
            blocks = self.images.blocks(ids, lengths)
        documents = None
        if self.varlen:
            filled: list[int] = []  # (N,)
            for sequence in sequences:
                *others, last = sequence.lengths
                filled += [*others, last + width - len(sequence.ids)]
            documents = Documents.of_lengths(filled, blocks)
        if not any(branch.shared for branch in branches):
            return _batch(sequences, width, inputs, documents)
        assert documents is not None, "a mask of positions does not keep branches apart"
        documents = documents.as_trees(positions, ends, branches)
        return _batch(sequences, width, inputs, documents, parents)


def images_by_document(sequences: Sequence[TokenSequence]) -> list[Images]:
    """Return the images of each document of sequences."""
    return list(chain.from_iterable(sequence.images for sequence in sequences))


def _branches(sequence: TokenSequence, width: int) -> Iterator[Branch]:
    """Yield the branches of a padded row; the padding is a document."""
    yield from chain.from_iterable(sequence.trees)
    if width > len(sequence.ids):
        yield Branch(0, width - len(sequence.ids))


def _batch(
    sequences: Sequence[TokenSequence],
    width: int,
    inputs: dict[str, Any],
    documents: Documents | None = None,
    parents: Tensor | None = None,
) -> Batch:
    """Return the batch of sequences that are padded to a width, with their labels.

    In trees, `parents` (B * T,) say which token predicts each.
    """
    labels = _pad([sequence.labels for sequence in sequences], IGNORE_INDEX, width)  # (B, T)
    weights = _weights(sequences)
    padded = _pad(weights, 0, width, np.float32) if weights else None
    loss = labelled(labels, padded, parents)
    branches = list(chain.from_iterable(sequence.real_branches for sequence in sequences))
    return Batch(inputs, None if parents is not None else labels, loss, branches, documents)


def _pad(
    rows: Sequence[np.ndarray], fill: int, width: int, dtype: type[np.generic] = np.int64
) -> Tensor:
    padded = np.full((len(rows), width), fill, dtype=dtype)  # (B, T)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return torch.from_numpy(padded)
