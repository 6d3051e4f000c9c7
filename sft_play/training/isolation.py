"""Check that the documents of a packed batch are isolated, and that the parts of a row are not.

Documents are isolated by a convention between position ids, attention and cache. A model's code, a
patched kernel or a new version can break it without an error.

Legend: T tokens of a document, V vocabulary.
"""

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sft_kernels.boundaries import Documents
from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of
from sft_kernels.trees import Branch
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ConfigError
from sft_play.models.context import ContextGroup
from sft_play.training.checks import modes_restored, rounds_coarsely

LENGTHS = (19, 27)  # of the documents; not a multiple of a kernel's block size
# For a long row, which reveals chunks and blocks that a model cuts by the position in the row
FIRST_PART = 0.38  # no chunk of the second document starts at a chunk boundary of the row
LONG_ROW = 1024  # tokens; on a GPU more than twice a length that the model's config names
CUT_BY_PLACE = "chunk|block|floor"  # in the names of such lengths; a window is a distance
# The limits are relative to the change of a document's logits when it does attend to the previous
# one. A batch with other tokens in the other document runs the same kernels, so the logits are
# bit-identical if documents are isolated.
MAX_SEEN = 0.01
# A document run separately uses other kernels; their rounding in half precision adds up over many
# layers.
MAX_ROUNDED = 0.25
# In MoE models, rounding also routes tokens to other experts, which changes the tokens that attend
# to them: 8 layers of gpt-oss with random weights changed by 0.26 in bfloat16 on an H200. Rounding
# to float8 turns a difference in the last bit into a step of 6 %: Llama 3.1 8B with random weights
# changed by 0.28.
MAX_ROUNDED_COARSE = 0.5
# gpt-oss-120b with random weights changed by 0.62 on an H100, in 36 layers. The first document of a
# row shows the rounding part: no earlier document could change its logits.
MAX_BEYOND_FIRST = 1.5


@dataclass(frozen=True)
class CrossDocumentEffect:
    """Largest absolute differences of a document's logits."""

    seen: float  # when the tokens of the other document change
    apart: float  # between packed and run separately; the median over tokens if rounding is coarse
    joined: float  # between continuing the other document and run separately: without any isolation
    first: float = 0.0  # as `apart`, for a row's first document: rounding only
    is_coarse: bool = False  # rounding can change the chosen expert or the float8 value

    @property
    def holds(self) -> bool:
        is_unseen = self.seen <= MAX_SEEN * self.joined
        limit = MAX_ROUNDED * self.joined
        if self.is_coarse:
            limit = max(MAX_ROUNDED_COARSE * self.joined, MAX_BEYOND_FIRST * self.first)
        return is_unseen and self.apart <= limit


def check_cross_document(
    model: nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
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
            f"train.packing: {type(getattr(model, 'module', model)).__name__} does not isolate "
            f"packed documents: logits of a document change by {found.seen:.2g} with another "
            f"document's tokens and differ by {found.apart:.2g} from those without packing "
            f"({found.joined:.2g} without isolation); set TRAIN_PACKING=false"
        )


def check_context(
    model: nn.Module, context: ContextGroup, vocabulary: int, process: Process
) -> None:
    """Raise ConfigError unless ranks that share a row get the same result as a single rank.

    `model` is the wrapped model. Every rank must call it.
    """
    ids = np.random.default_rng(0).integers(vocabulary, size=sum(LENGTHS))
    documents = np.split(ids, [LENGTHS[0]])
    collator = PackCollator(0, len(ids), varlen=True)
    whole = _batch([documents], collator, process.device)
    part = context.part.cut(whole)
    tokens = part.ids.shape[1]
    alone = Documents.of_lengths([tokens]).on(process.device)
    cut_off = replace(part, documents=alone)  # attends to no token of another part
    with modes_restored(model), torch.no_grad():
        model.eval()
        expected, shared, without = (
            model(**batch.arguments).logits[0].float()
            for batch in (whole, context.shared(part), cut_off)
        )
    expected = expected[context.rank * tokens :][:tokens]
    real = len(expected)  # the last part may end with padding
    rounded = _median if rounds_coarsely(model) else _difference
    found = process.gather(
        (rounded(shared[:real], expected), _difference(without[:real], expected))
    )
    apart, moved = map(max, zip(*found, strict=True))
    if not apart <= MAX_ROUNDED * moved:
        name = type(base_model_of(getattr(model, "module", model))).__name__
        raise ConfigError(
            f"train.context_parallel={context.size}: logits of {name} change by {apart:.2g} if "
            f"ranks share a row, and by {moved:.2g} if its parts do not see each other; set "
            "TRAIN_CONTEXT_PARALLEL=1"
        )


def measure_cross_document(
    model: nn.Module, collator: PackCollator, vocabulary: int, device: torch.device, shared: int = 0
) -> CrossDocumentEffect:
    """Return how much the documents of a batch affect each other, without dropout.

    The batch has two sequences of the same two documents in both orders, as rows or in one row.
    For a document in a long row, only the last logits are compared. If the documents have a
    beginning of `shared` tokens, they are branches of a tree, and the others are compared.
    """
    is_coarse = rounds_coarsely(model)
    generator = np.random.default_rng(0)  # the same on all ranks
    first = generator.integers(vocabulary, size=LENGTHS[0])
    other = generator.integers(vocabulary, size=LENGTHS[0])
    second = generator.integers(vocabulary, size=LENGTHS[1])
    start = generator.integers(vocabulary, size=shared)

    def packed(*sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return the logits (T, V) of the documents of each of two sequences."""
        whole = [(np.concatenate([start, one]), other) for one, other in sequences]
        arguments = _batch(whole, collator, device, shared).arguments
        # (2, T, V), or (1, T, V) in one row
        logits = model(**{"use_cache": False, **arguments}).logits.float()
        tokens = shared + sum(LENGTHS)
        one, other = logits if len(logits) == 2 else (logits[0], logits[0, tokens:])
        return one[:tokens], other[:tokens]

    def alone(*parts: np.ndarray) -> Tensor:
        """Return logits (T, V); if rounding is coarse, with the kernels of packed documents."""
        ids = np.concatenate([start, *parts])
        plain = {"input_ids": torch.from_numpy(ids)[None].to(device)}
        inputs = _batch([(ids,)], collator, device).arguments if is_coarse else plain
        return model(**{"use_cache": False, **inputs}).logits[0, : len(ids)].float()

    with modes_restored(model), torch.no_grad():
        model.eval()
        behind, before = packed((first, second), (second, first))
        behind_other, before_other = packed((other, second), (second, other))
        by_itself = alone(second)[shared:]
        after_first = alone(first, second)
        ends = [] if shared else _ends_of_long_row(model, collator, vocabulary, device)
    begin, length = shared + LENGTHS[0], LENGTHS[1]
    behind = behind[begin : begin + length]
    behind_other = behind_other[begin : begin + length]
    before = before[shared : shared + length]
    before_other = before_other[shared : shared + length]
    pairs = [(behind, by_itself), (before, by_itself), *ends]
    rounded = _median if is_coarse else _difference
    return CrossDocumentEffect(
        seen=max(_difference(behind, behind_other), _difference(before, before_other)),
        apart=max(rounded(*pair) for pair in pairs),
        joined=_difference(after_first[begin:], by_itself),
        first=rounded(before, by_itself),
        is_coarse=is_coarse,
    )


def _ends_of_long_row(
    model: nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the last logits (LENGTHS[1], V) of a long row's second document, packed and by itself.

    Empty if rows are short, or if the model's class cannot compute only some of the logits.
    """
    base = base_model_of(getattr(model, "module", model))
    tokens = LONG_ROW
    if device.type != "cpu":  # on a CPU it would take minutes
        lengths = vars(base.config.get_text_config()).items()
        named = [value for name, value in lengths if re.search(CUT_BY_PLACE, name)]
        tokens = max([tokens, *(2 * value for value in named if isinstance(value, int))])
    tokens = min(tokens, collator.max_seq_len)
    begin = int(FIRST_PART * tokens)
    is_partial = "logits_to_keep" in inspect.signature(type(base).forward).parameters
    if begin <= LENGTHS[0] or not is_partial:
        return []
    text = np.random.default_rng(0).integers(vocabulary, size=tokens)
    first, second = text[:begin], text[begin:]

    def last(*documents: np.ndarray) -> Tensor:
        batch = _batch([documents], collator, device)
        padding = batch.ids.shape[1] - sum(map(len, documents))
        kept = LENGTHS[1] + padding  # an integer: the head may be on another GPU
        return model(**batch.arguments, logits_to_keep=kept).logits[0, : LENGTHS[1]].float()

    return [(last(first, second), last(second))]


def _batch(
    sequences: Sequence[Sequence[np.ndarray]],
    collator: PackCollator,
    device: torch.device,
    shared: int = 0,
) -> Batch:
    """Return the batch of sequences of documents, or of two that share a beginning."""
    return collator([_sequence(documents, shared) for documents in sequences]).to(device)


def _sequence(documents: Sequence[np.ndarray], shared: int) -> TokenSequence:
    ids = np.concatenate(documents)
    labels = np.full(len(ids), IGNORE_INDEX)
    lengths = [len(document) for document in documents]
    trees = tuple((Branch(0, length),) for length in lengths)
    if shared:
        trees = ((Branch(0, lengths[0]), Branch(shared, lengths[1])),)
    return TokenSequence(ids, labels, trees)


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest absolute difference, or NaN if either tensor has one."""
    return (one - two).abs().max().item()


def _median(one: Tensor, two: Tensor) -> float:
    """Return the median over tokens of the largest absolute difference, NaN as above."""
    return (one - two).abs().amax(-1).median().item()
