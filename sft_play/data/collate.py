"""Samples to batches: sequences of one or more documents as tensors.

A sequence's documents never see each other, and the first token of each is predicted by nothing.
Legend: B sequences of a micro-batch, T tokens of its widest, N documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from sft_play.data.packing import padded_width
from sft_play.data.render import IGNORE_INDEX

Batch = dict[str, torch.Tensor | int]


class Document(Protocol):
    """Ids and labels of one sample, each (T,)."""

    ids: Sequence[int] | np.ndarray
    labels: Sequence[int] | np.ndarray


class Documents(Protocol):
    """Samples by index, such as a `store.Split`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...


@dataclass(frozen=True)
class TokenSequence:
    """Documents one behind the other: ids (T,) and labels (T,) int64, with the length of each document."""

    ids: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]
    real_tokens: int  # those of documents that are no fillers


class TrainRows(Dataset[TokenSequence]):
    """Sequences by the index of their sample, or the indices of several; `~index` (negative) is a sample without loss, a filler."""

    def __init__(self, samples: Documents):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: int | Sequence[int]) -> TokenSequence:
        indices = [indices] if isinstance(indices, int) else indices
        documents = [self.samples[max(index, ~index)] for index in indices]
        labels = [
            _labels(document, is_filler=index < 0)
            for index, document in zip(indices, documents, strict=True)
        ]
        lengths = tuple(map(len, labels))
        return TokenSequence(
            ids=np.concatenate([document.ids for document in documents], dtype=np.int64),
            labels=np.concatenate(labels),
            lengths=lengths,
            real_tokens=sum(
                length for index, length in zip(indices, lengths, strict=True) if index >= 0
            ),
        )


def _labels(document: Document, is_filler: bool) -> np.ndarray:
    if is_filler:
        return np.full(len(document.labels), IGNORE_INDEX, dtype=np.int64)
    assert document.labels[0] == IGNORE_INDEX, (
        "a first token that is trained would be predicted from the document before it"
    )
    return np.asarray(document.labels, dtype=np.int64)


@dataclass(frozen=True)
class PadCollator:
    """One document a row, padded on the right: input_ids, attention_mask and labels, each (B, T) int64.

    T is the longest row, and with `max_seq_len` one of the few widths of `padded_width`.
    """

    pad_id: int
    max_seq_len: int | None = None

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        assert all(len(sequence.lengths) == 1 for sequence in sequences), (
            "an attention mask keeps no documents apart"
        )
        width = _width(sequences, self.max_seq_len)
        return {
            "input_ids": _padded([sequence.ids for sequence in sequences], self.pad_id, width),
            "attention_mask": _padded(
                [np.ones_like(sequence.ids) for sequence in sequences], 0, width
            ),
            "labels": _padded([sequence.labels for sequence in sequences], IGNORE_INDEX, width),
        }


@dataclass(frozen=True)
class PackCollator:
    """Documents one behind the other: input_ids, labels and position_ids, each (B, T) int64.

    position_ids begin at 0 in every document, and the padding on the right is a document of its own: this, together with
    no attention_mask and no key-value cache, is what transformers tells documents apart by. With `varlen`, the boundaries
    of all documents of the flattened batch come along for flash attention, which by itself finds them in one row alone:
    cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, max_length_q and max_length_k. There padding is the end of a row's last
    document, where nothing reads it: a row of one document is then one as a whole, which the fastest kernels can take.

    >>> two = TokenSequence(np.array([5, 6, 7, 8, 9]), np.array([-100, 6, -100, 8, 9]), lengths=(2, 3), real_tokens=5)
    >>> {name: tensor.tolist() for name, tensor in PackCollator(0, max_seq_len=8)([two]).items()}
    {'input_ids': [[5, 6, 7, 8, 9, 0, 0, 0]], 'labels': [[-100, 6, -100, 8, 9, -100, -100, -100]], 'position_ids': [[0, 1, 0, 1, 2, 0, 1, 2]]}
    """

    pad_id: int
    max_seq_len: int
    varlen: bool = False

    def __call__(self, sequences: Sequence[TokenSequence]) -> Batch:
        width = _width(sequences, self.max_seq_len)
        lengths = [(*sequence.lengths, width - len(sequence.ids)) for sequence in sequences]
        documents = [length for row in lengths for length in row if length]  # (N,)
        positions = np.concatenate([np.arange(length) for length in documents]).reshape(
            len(sequences), width
        )
        batch: Batch = {
            "input_ids": _padded([sequence.ids for sequence in sequences], self.pad_id, width),
            "labels": _padded([sequence.labels for sequence in sequences], IGNORE_INDEX, width),
            "position_ids": torch.from_numpy(positions),
        }
        if self.varlen:
            documents = [
                length for *before, last, padding in lengths for length in (*before, last + padding)
            ]  # (N,)
            boundaries = torch.tensor([0, *np.cumsum(documents)], dtype=torch.int32)
            batch |= {
                "cu_seq_lens_q": boundaries,
                "cu_seq_lens_k": boundaries,
                "max_length_q": max(documents),
                "max_length_k": max(documents),
            }
        return batch


def labelled(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the labels (B, T) of a batch are predicted, and what: positions (N,) in the flattened (B * T), targets (N,), int64.

    Found here, on the CPU: a GPU that counts them makes its CPU wait for the number.

    >>> [found.tolist() for found in labelled(torch.tensor([[-100, 6, 7], [-100, -100, 9]]))]
    [[0, 1, 4], [6, 7, 9]]
    """
    following = labels[:, 1:]
    rows, columns = following.ne(IGNORE_INDEX).nonzero(as_tuple=True)
    return rows * labels.shape[1] + columns, following[rows, columns]


def _width(sequences: Sequence[TokenSequence], max_seq_len: int | None) -> int:
    longest = max(len(sequence.ids) for sequence in sequences)
    return longest if max_seq_len is None else padded_width(longest, max_seq_len)


def _padded(arrays: Sequence[np.ndarray], fill: int, width: int) -> torch.Tensor:
    out = np.full((len(arrays), width), fill, dtype=np.int64)  # (B, T)
    for row, values in zip(out, arrays, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out)
