"""The cross-document check: run the model to see whether packed documents attend to each other.

They are isolated by a convention between position ids, attention and cache. A model's own code, a
patched kernel or a new version can break it silently.

Legend: T tokens of a document, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sft_play.data.collate import PackCollator, TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ConfigError
from sft_play.models.experts import expert_weights
from sft_play.models.float8.linear import has_float8

LENGTHS = (19, 27)  # of the documents; no multiple of a kernel's block size
# The limits are fractions of the change of a document's logits when it does attend to the one
# before it. A batch with other tokens in the other document runs the same kernels, so its logits
# are the same bits where documents are isolated.
MAX_SEEN = 0.01
# A document by itself runs other kernels; their rounding in half precision adds up over many
# layers.
MAX_ROUNDED = 0.25
# Rounding also sends tokens of a mixture of experts to other experts, and they take along those
# that attend to them: 8 layers of gpt-oss with random weights changed by 0.26 in bfloat16 on an
# H200. Rounding to float8 makes a step of 6 % of a difference in the last bit: Llama 3.1 8B with
# random weights changed by 0.28.
MAX_COARSE = 0.5


@dataclass(frozen=True)
class CrossDocumentEffect:
    """Largest absolute differences of a document's logits."""

    seen: float  # when the tokens of the other document change
    apart: float  # between packed and by itself; where rounding is coarse the median over tokens
    joined: float  # between continuing the other document and by itself: without any isolation
    is_coarse: bool = False  # rounding chooses experts, or steps of float8

    @property
    def holds(self) -> bool:
        is_unseen = self.seen <= MAX_SEEN * self.joined
        limit = MAX_COARSE if self.is_coarse else MAX_ROUNDED
        return is_unseen and self.apart <= limit * self.joined


def check_cross_document(
    model: torch.nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
) -> None:
    """Raise ConfigError unless the model isolates the documents of a packed batch.

    `model` is the wrapped model (DDP, ZeRO), after the trainer has turned the cache off. Every rank
    must call it.
    """
    found = measure_cross_document(model, collator, vocabulary, device)
    if math.isnan(found.joined):
        return  # the model computes NaN, packed or not: the first evaluation reports it
    if not found.holds:
        raise ConfigError(
            "train.packing: packed documents are not kept apart by "
            f"{type(getattr(model, 'module', model)).__name__}: its logits change by "
            f"{found.seen:.2g} with the tokens of another document and by {found.apart:.2g} "
            f"against the document by itself, of {found.joined:.2g} for one text; "
            "set TRAIN_PACKING=false"
        )


def measure_cross_document(
    model: torch.nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
) -> CrossDocumentEffect:
    """Return how much the documents of a batch affect each other, without dropout.

    The batch has two sequences of the same two documents, in either order, as rows or in one row.
    """
    generator = np.random.default_rng(0)  # the same on all ranks
    first = generator.integers(vocabulary, size=LENGTHS[0])
    other = generator.integers(vocabulary, size=LENGTHS[0])
    second = generator.integers(vocabulary, size=LENGTHS[1])

    def packed(*sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits (T, V) of the documents of each of two sequences."""
        batch = collator([_sequence(documents) for documents in sequences])
        del batch["labels"]
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to(device)
        logits = model(**batch).logits.float()  # (2, T, V), or (1, T, V) in one row
        tokens = sum(LENGTHS)
        one, other = logits if len(logits) == 2 else (logits[0], logits[0, tokens:])
        return one[:tokens], other[:tokens]

    def alone(ids: np.ndarray) -> torch.Tensor:
        return model(input_ids=torch.from_numpy(ids)[None].to(device)).logits[0].float()  # (T, V)

    with _without_dropout(model), torch.no_grad():
        behind, before = packed((first, second), (second, first))
        behind_other, before_other = packed((other, second), (second, other))
        by_itself = alone(second)
        after_first = alone(np.concatenate([first, second]))
    begin, length = LENGTHS
    behind = behind[begin : begin + length]
    behind_other = behind_other[begin : begin + length]
    before = before[:length]
    before_other = before_other[:length]
    is_coarse = bool(expert_weights(model)) or has_float8(model)
    rounded = _median if is_coarse else _difference
    return CrossDocumentEffect(
        seen=max(_difference(behind, behind_other), _difference(before, before_other)),
        apart=max(rounded(behind, by_itself), rounded(before, by_itself)),
        joined=_difference(after_first[begin:], by_itself),
        is_coarse=is_coarse,
    )


def _sequence(documents: Sequence[np.ndarray]) -> TokenSequence:
    ids = np.concatenate(documents)
    labels = np.full(len(ids), IGNORE_INDEX)
    lengths = tuple(len(document) for document in documents)
    return TokenSequence(ids, labels, lengths, len(ids))


def _difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the largest absolute difference, or NaN where either tensor has one."""
    return (one - two).abs().max().item()


def _median(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the median over tokens of the largest absolute difference, NaN as above."""
    return (one - two).abs().amax(-1).median().item()


@contextlib.contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode
