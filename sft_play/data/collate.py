"""Samples to batches: sequences of one or more documents as tensors.

The documents of a sequence never see each other, and nothing predicts the first token of each.
Legend: B sequences of a micro-batch, T tokens of its widest, N documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from sft_play.data.image_inputs import ImageInputs
from sft_play.data.packing import batch_shape, padded_width
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.rows import ImageFile
from sft_play.data.store import Sample, Split

Batch = dict[str, torch.Tensor | int | list[int]]
WEIGHTS = "loss_weights"  # (B, T) float32 of labels, where some weigh other than 1


@dataclass(frozen=True)
class TokenSequence:
    """One or more documents: ids (T,) and labels (T,) int64, and the length of each document."""

    ids: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]
    real_tokens: int  # without fillers
    weights: np.ndarray | None = None  # (T,) of labels in the loss; None: each weighs 1
    images: tuple[tuple[ImageFile, ...], ...] = ()  # of each document; (): none has any

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """The lengths of the documents that are no fillers."""
        if self.real_tokens == sum(self.lengths):
            return self.lengths
        documents = np.split(self.labels, np.cumsum(self.lengths)[:-1])
        return tuple(len(labels) for labels in documents if (labels != IGNORE_INDEX).any())


class TrainRows(Dataset[TokenSequence]):
    """Sequences by the index of their sample, or by the indices of several.

    `~index` (negative) stands for a filler: the sample's ids, without loss.
    """

    def __init__(self, samples: Sequence[Sample] | Split):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: int | Sequence[int]) -> TokenSequence:
        if isinstance(indices, int):
            indices = [indices]
        documents = []
        for index in indices:
            sample = self.samples[max(index, ~index)]
            ids = np.asarray(sample.ids, dtype=np.int64)
            labels = np.asarray(sample.labels, dtype=np.int64)
            assert labels[0] == IGNORE_INDEX, (
                "a first token that is trained would be predicted from the document before it"
            )
            real_tokens = len(ids)
            if index < 0:
                labels = np.full_like(labels, IGNORE_INDEX)
                real_tokens = 0
            lengths = (len(ids),)
            documents.append(
                TokenSequence(ids, labels, lengths, real_tokens, sample.weights, (sample.images,))
            )
        return _join(documents)


def _join(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one sequence of the documents of several."""
    weights = _weights(sequences)
    return TokenSequence(
        np.concatenate([sequence.ids for sequence in sequences]),
        np.concatenate([sequence.labels for sequence in sequences]),
        tuple(chain.from_iterable(sequence.lengths for sequence in sequences)),
        sum(sequence.real_tokens for sequence in sequences),
        np.concatenate(weights) if weights else None,
        tuple(chain.from_iterable(sequence.images for sequence in sequences)),
    )


def _weights(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Return the weights of each sequence, [] where each token of all weighs 1."""
    if all(sequence.weights is None for sequence in sequences):
        return []
    return [
        np.ones(len(sequence.ids), np.float32) if sequence.weights is None else sequence.weights
        for sequence in sequences
    ]


@dataclass(frozen=True)
class PadCollator:
    """One document a row, padded on the right.

    Gives input_ids, attention_mask and labels, each (B, T) int64. T is the longest row, or with
    `max_seq_len` one of the few widths of `padded_width`.
    """

    pad_id: int
    max_seq_len: int | None = None
    images: ImageInputs | None = None  # of a base that reads them

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        assert all(len(sequence.lengths) == 1 for sequence in sequences), (
            "an attention mask keeps no documents apart"
        )
        ids = [sequence.ids for sequence in sequences]
        width = max(map(len, ids))
        if self.max_seq_len is not None:
            width = padded_width(width, self.max_seq_len)
        batch: Batch = {
            "input_ids": _pad(ids, self.pad_id, width),
            "attention_mask": _pad([np.ones_like(row) for row in ids], 0, width),
            "labels": _pad([sequence.labels for sequence in sequences], IGNORE_INDEX, width),
            **_pad_weights(sequences, width),
        }
        if self.images is not None:
            batch |= self.images(images_by_document(sequences), batch["input_ids"])
        return batch


@dataclass(frozen=True)
class PackCollator:
    """Rows of several documents: input_ids, labels and position_ids, each (B, T) int64.

    With `in_one_row` all documents of the batch are one row, with less than 64 tokens of padding;
    but rows of one document each stay rows where they need no padding to speak of, and one alone
    in any case.

    position_ids begin at 0 in every document, and the padding on the right counts as a document.
    transformers tells documents apart by them, if there is no attention_mask and no key-value
    cache. With `varlen`, the batch also has the boundaries of all documents of the flattened batch:
    cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, max_length_q and max_length_k. Flash attention
    needs them, as it finds documents by itself only in a batch of one row. There the padding
    belongs to the row's last document, after its end, where nothing attends to it: a row of one
    document stays one, which the fastest kernels can take.

    >>> ids = np.array([5, 6, 7, 8, 9])
    >>> labels = np.array([-100, 6, -100, 8, 9])
    >>> two = TokenSequence(ids, labels, lengths=(2, 3), real_tokens=5)
    >>> batch = PackCollator(0, max_seq_len=8)([two])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[5, 6, 7, 8, 9, 0, 0, 0]], [[0, 1, 0, 1, 2, 0, 1, 2]])
    >>> batch["labels"].tolist()
    [[-100, 6, -100, 8, 9, -100, -100, -100]]
    """

    pad_id: int
    max_seq_len: int
    varlen: bool = False
    brings_lengths: bool = False  # with varlen: document_lengths too, a list that stays on the CPU
    in_one_row: bool = False  # with varlen
    images: ImageInputs | None = None  # of a base that reads them

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        lengths = [sequence.lengths for sequence in sequences]
        rows, width = batch_shape(lengths, self.max_seq_len, self.in_one_row)
        if rows < len(sequences):
            sequences = [_join(sequences)]
        batch: Batch = {
            "input_ids": _pad([sequence.ids for sequence in sequences], self.pad_id, width),
            "labels": _pad([sequence.labels for sequence in sequences], IGNORE_INDEX, width),
            "position_ids": _position_ids(sequences, width),
            **_pad_weights(sequences, width),
        }
        if self.varlen:
            filled: list[int] = []  # (N,)
            for sequence in sequences:
                *others, last = sequence.lengths
                filled += [*others, last + width - len(sequence.ids)]
            boundaries = torch.tensor([0, *np.cumsum(filled)], dtype=torch.int32)
            batch["cu_seq_lens_q"] = boundaries
            batch["cu_seq_lens_k"] = boundaries
            batch["max_length_q"] = max(filled)
            batch["max_length_k"] = max(filled)
            if self.brings_lengths:
                batch["document_lengths"] = filled
        if self.images is not None:
            documents = [sequence.lengths for sequence in sequences]
            batch |= self.images(images_by_document(sequences), batch["input_ids"], documents)
        return batch


def images_by_document(sequences: Sequence[TokenSequence]) -> list[tuple[ImageFile, ...]]:
    """Return the images of each document of sequences."""
    return list(chain.from_iterable(sequence.images for sequence in sequences))


class LabelledPositions(NamedTuple):
    """Where the labels (B, T) of a batch are predicted, and what is: each (N,) int64."""

    positions: torch.Tensor  # in the flattened (B * T)
    targets: torch.Tensor


def labelled(labels: torch.Tensor) -> LabelledPositions:
    """Return the positions whose next token has a label, and these labels.

    Computed here, on the CPU: a GPU that counts them makes its CPU wait for the number.

    >>> [found.tolist() for found in labelled(torch.tensor([[-100, 6, 7], [-100, -100, 9]]))]
    [[0, 1, 4], [6, 7, 9]]
    """
    next_labels = labels[:, 1:]
    rows, columns = next_labels.ne(IGNORE_INDEX).nonzero(as_tuple=True)
    return LabelledPositions(rows * labels.shape[1] + columns, next_labels[rows, columns])


def _position_ids(sequences: Sequence[TokenSequence], width: int) -> torch.Tensor:
    position_ids = np.zeros((len(sequences), width), dtype=np.int64)  # (B, T)
    for row, sequence in zip(position_ids, sequences, strict=True):
        lengths = (*sequence.lengths, width - len(sequence.ids))
        row[:] = np.concatenate(list(map(np.arange, lengths)))
    return torch.from_numpy(position_ids)


def _pad_weights(sequences: Sequence[TokenSequence], width: int) -> Batch:
    """Return {WEIGHTS: (B, T)}, {} where each token weighs 1."""
    rows = _weights(sequences)
    return {WEIGHTS: _pad(rows, 0, width, np.float32)} if rows else {}


def _pad(
    rows: Sequence[np.ndarray], fill: int, width: int, dtype: type[np.generic] = np.int64
) -> torch.Tensor:
    padded = np.full((len(rows), width), fill, dtype=dtype)  # (B, T)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return torch.from_numpy(padded)
