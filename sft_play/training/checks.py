"""Checks of a model before and during training.

The engine: libraries fall back to another wrapper without a message. Causality: an encoder, or a
model that reads its prompt in both directions, would learn to copy what it is to predict.
Packing: documents are isolated by a convention between position ids, attention and cache, which a
model's code, a patched kernel or a new version can break silently. Ranks: gradients are summed
over them, weights are not, so what one rank alone does to its weights stays.

Legend: T tokens of a document, V vocabulary.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sft_play.data.collate import PackCollator, TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ConfigError, DivergedError, EnvironmentFault
from sft_play.models.adapter_state import part_of
from sft_play.models.delivered import rounds_inputs
from sft_play.models.experts import expert_weights, ranks_of_experts
from sft_play.models.fast.attention.ulysses import ContextGroup
from sft_play.models.fast.documents import CONTEXT, Documents
from sft_play.models.fast.setup import base_model_of
from sft_play.models.float8.linear import has_float8
from sft_play.models.sharding import is_divided, own_part
from sft_play.process import Process
from sft_play.training.memory import innermost

WRAPPERS_OF_STRATEGY = {
    "single": (None,),
    "ddp": ("DistributedDataParallel",),
    "fsdp": (None, "DistributedDataParallel"),  # that of adapters, over divided weights
    "ep": (None, "DistributedDataParallel"),  # without one where experts alone are trained
    "deepspeed": ("DeepSpeedEngine",),
}
WRAPPERS = ("DistributedDataParallel", "DeepSpeedEngine", "DataParallel")
TEXT_TOKENS = 24
# Of the change of the last token's own logits. Earlier ones are the same sums of the same numbers:
# 55 of 56 model types give the same bits. BERT with random weights moves them by 2e-3.
MAX_MOVED = 1e-4
MAX_MOVED_COARSE = 0.05  # experts multiply the tokens that are sent to them together, in 16 bits
LENGTHS = (19, 27)  # of the documents; no multiple of a kernel's block size
# Of a long row, which shows chunks and blocks that a model cuts by the place in the row
FIRST_PART = 0.38  # no chunk of the second document begins where one of the row does
LONG_ROW = 1024  # tokens; on a GPU past twice a length that the model's config names
CUT_BY_PLACE = "chunk|block|floor"  # in the names of such lengths; a window is a distance
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
MAX_ROUNDED_COARSE = 0.5
# A view of the same bytes as integers
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUMMED_AT_ONCE = 1 << 24  # elements: a CPU copies them to int64


def check_engine(model: nn.Module, strategy: str) -> None:
    """Raise EnvironmentFault unless the model is wrapped as the strategy demands.

    Libraries fall back to another wrapper without a message.
    """
    wrapped = type(model).__name__
    found = wrapped if wrapped in WRAPPERS else None
    if found not in WRAPPERS_OF_STRATEGY[strategy]:
        raise EnvironmentFault(
            f"strategy={strategy} was planned, and the model is wrapped in {wrapped}; try make "
            "doctor"
        )
    for name, has_divided in (("fsdp", is_divided(model)), ("ep", ranks_of_experts(model) > 1)):
        if has_divided != (strategy == name):
            raise EnvironmentFault(
                f"strategy={strategy} was planned, and the weights are "
                f"{'' if has_divided else 'not '}divided by {name}; try make doctor"
            )


def check_finite(model: nn.Module, step: int) -> None:
    """Raise DivergedError when a trained weight, or this rank's part of it, is NaN or infinite."""
    for name, parameter in _trained(model).items():
        own = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's part of this rank
        if not torch.isfinite(own_part(own)).all():
            raise DivergedError(
                f"{name} holds NaN or infinity at step {step}: the run has diverged; try a lower "
                "TRAIN_LEARNING_RATE"
            )


def check_finite_optimizer(optimizer: Any, step: int) -> None:
    """Raise DivergedError when a moment of the optimizer is NaN or infinite."""
    for state in innermost(optimizer).state.values():
        for name, value in state.items():
            is_number = torch.is_tensor(value) and value.is_floating_point()
            if is_number and not torch.isfinite(own_part(value)).all():
                raise DivergedError(
                    f"the optimizer's {name} holds NaN or infinity at step {step}: the run has "
                    "diverged; try a lower TRAIN_LEARNING_RATE"
                )


@torch.no_grad()
def check_causality(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """Raise ConfigError if changing the last token of a text moves the logits of earlier ones.

    In evaluation and in training mode, which some models mask differently. Every rank must call it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, TEXT_TOKENS), generator=generator)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % vocabulary
    limit = MAX_MOVED_COARSE if rounds_coarsely(model) else MAX_MOVED
    with modes_restored(model):
        for mode in (False, True):
            model.train(mode)
            one, other = (_logits(model, text.to(device)) for text in (ids, changed))
            change = (one - other).abs().amax(-1)  # (T,)
            moved, own = change[:-1].max().item(), change[-1].item()
            if moved > limit * own:  # NaN is left to the first evaluation
                base = base_model_of(getattr(model, "module", model))
                raise ConfigError(
                    f"model.name={base.name_or_path}: {type(base).__name__} sees tokens that come "
                    f"later: changing the last one moves earlier logits by {moved:.2g}, and its "
                    f"own by {own:.2g}; set MODEL_NAME to a causal language model"
                )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits (T, V) of ids (1, T), with the same dropout at every call."""
    gpus = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(0)
        return model(input_ids=ids, use_cache=False).logits[0].float()


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
        limit = MAX_ROUNDED_COARSE if self.is_coarse else MAX_ROUNDED
        return is_unseen and self.apart <= limit * self.joined


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
            "train.packing: packed documents are not kept apart by "
            f"{type(getattr(model, 'module', model)).__name__}: its logits change by "
            f"{found.seen:.2g} with the tokens of another document and by {found.apart:.2g} "
            f"against the document by itself, of {found.joined:.2g} for one text; "
            "set TRAIN_PACKING=false"
        )


def check_context(
    model: nn.Module, context: ContextGroup, vocabulary: int, process: Process
) -> None:
    """Raise ConfigError unless ranks that share a row compute what one of them computes by itself.

    `model` is the wrapped model. Every rank must call it.
    """
    ids = np.random.default_rng(0).integers(vocabulary, size=sum(LENGTHS))
    documents = np.split(ids, [LENGTHS[0]])
    collator = PackCollator(0, len(ids), varlen=True)
    whole = _inputs([documents], collator, process.device)
    part = context.part.cut(whole)
    tokens = part["input_ids"].shape[1]
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=process.device)
    cut_off = {**part, **Documents(ends, tokens).arguments}  # sees no token of another part
    with modes_restored(model), torch.no_grad():
        model.eval()
        expected, shared, without = (
            model(**inputs).logits[0].float()
            for inputs in (whole, {**part, CONTEXT: context}, cut_off)
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
            f"train.context_parallel={context.size}: logits of {name} change by {apart:.2g} where "
            f"ranks share a row, and by {moved:.2g} where its parts do not see each other; set "
            "TRAIN_CONTEXT_PARALLEL=1"
        )


def measure_cross_document(
    model: nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
) -> CrossDocumentEffect:
    """Return how much the documents of a batch affect each other, without dropout.

    The batch has two sequences of the same two documents, in either order, as rows or in one row.
    Of a document in a long row only the last logits are compared.
    """
    generator = np.random.default_rng(0)  # the same on all ranks
    first = generator.integers(vocabulary, size=LENGTHS[0])
    other = generator.integers(vocabulary, size=LENGTHS[0])
    second = generator.integers(vocabulary, size=LENGTHS[1])

    def packed(*sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return the logits (T, V) of the documents of each of two sequences."""
        inputs = _inputs(sequences, collator, device)
        logits = model(**inputs).logits.float()  # (2, T, V), or (1, T, V) in one row
        tokens = sum(LENGTHS)
        one, other = logits if len(logits) == 2 else (logits[0], logits[0, tokens:])
        return one[:tokens], other[:tokens]

    def alone(ids: np.ndarray) -> Tensor:
        return model(input_ids=torch.from_numpy(ids)[None].to(device)).logits[0].float()  # (T, V)

    with modes_restored(model), torch.no_grad():
        model.eval()
        behind, before = packed((first, second), (second, first))
        behind_other, before_other = packed((other, second), (second, other))
        by_itself = alone(second)
        after_first = alone(np.concatenate([first, second]))
        ends = _ends_of_long_row(model, collator, vocabulary, device)
    begin, length = LENGTHS
    behind = behind[begin : begin + length]
    behind_other = behind_other[begin : begin + length]
    before = before[:length]
    before_other = before_other[:length]
    pairs = [(behind, by_itself), (before, by_itself), *ends]
    is_coarse = rounds_coarsely(model)
    rounded = _median if is_coarse else _difference
    return CrossDocumentEffect(
        seen=max(_difference(behind, behind_other), _difference(before, before_other)),
        apart=max(rounded(*pair) for pair in pairs),
        joined=_difference(after_first[begin:], by_itself),
        is_coarse=is_coarse,
    )


def _ends_of_long_row(
    model: nn.Module, collator: PackCollator, vocabulary: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the last logits (LENGTHS[1], V) of a long row's second document, packed and alone.

    Empty where rows are short, and where the model's class cannot leave out the other logits.
    """
    base = base_model_of(getattr(model, "module", model))
    tokens = LONG_ROW
    if device.type != "cpu":  # there it would take minutes
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
        batch = _inputs([documents], collator, device)
        padding = batch["input_ids"].shape[1] - sum(map(len, documents))
        kept = LENGTHS[1] + padding  # a number: the head may be on another GPU
        return model(**batch, logits_to_keep=kept).logits[0, : LENGTHS[1]].float()

    return [(last(first, second), last(second))]


def _inputs(
    sequences: Sequence[Sequence[np.ndarray]], collator: PackCollator, device: torch.device
) -> dict[str, Any]:
    """Return what a model gets of sequences of documents."""
    batch = collator([_sequence(documents) for documents in sequences])
    del batch["labels"]
    for name, value in batch.items():
        if isinstance(value, Tensor):
            batch[name] = value.to(device)
    return batch


def _sequence(documents: Sequence[np.ndarray]) -> TokenSequence:
    ids = np.concatenate(documents)
    labels = np.full(len(ids), IGNORE_INDEX)
    lengths = tuple(len(document) for document in documents)
    return TokenSequence(ids, labels, lengths, len(ids))


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest absolute difference, or NaN where either tensor has one."""
    return (one - two).abs().max().item()


def _median(one: Tensor, two: Tensor) -> float:
    """Return the median over tokens of the largest absolute difference, NaN as above."""
    return (one - two).abs().amax(-1).median().item()


@contextlib.contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Put every module back into its mode, training or evaluation, on leaving."""
    was_training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode


def rounds_coarsely(model: nn.Module) -> bool:
    """Return whether rounding chooses experts, or steps of float8."""
    return bool(expert_weights(model)) or has_float8(model) or rounds_inputs(model)


def has_equal_copies(model: nn.Module, process: Process) -> bool:
    """Return whether every rank holds all trained weights, rounded alike. Every rank must call it.

    ZeRO-3 and FSDP give each rank a part, and GPUs of two kinds add in another order.
    """
    for parameter in _trained(model).values():
        if hasattr(parameter, "ds_tensor") or isinstance(parameter, DTensor):
            return False
    return len(set(process.gather(_device_name(process.device)))) == 1


def check_equal_ranks(model: nn.Module, process: Process, step: int) -> None:
    """Compare the trained weights of all ranks, bit by bit. Every rank must call it.

    Experts that a rank has for itself are left out.
    Raises: EnvironmentFault, on every rank, where they differ.
    """
    own = bit_sums({name: p for name, p in _trained(model).items() if part_of(p) is None})
    sums = process.gather(own)
    for rank, others in enumerate(sums):
        differing = [name for name in own if others[name] != sums[0][name]]
        if differing:
            raise EnvironmentFault(
                f"{len(differing)} of {len(own)} trained tensors of rank {rank} are not those of "
                f"rank 0 at step {step}, {differing[0]} first: a GPU computes wrongly "
                "(nvidia-smi -q -d ECC counts its errors), or the ranks did not train together; "
                "resume from an earlier checkpoint without that GPU"
            )


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's elements read as integers; one changed bit changes it.

    Of tensors that ZeRO-3 or FSDP divides it is the sum of this rank's part. The sums, modulo
    2^64, do not round. Waits for the GPU once.
    """
    sums: list[Tensor] = []
    for tensor in tensors.values():
        flat = own_part(getattr(tensor, "ds_tensor", tensor)).detach().reshape(-1)
        parts = flat.view(INTEGER_OF_SIZE[flat.element_size()]).split(SUMMED_AT_ONCE)
        sums.append(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum())
    if not sums:
        return {}
    device = sums[0].device  # a placed model is on several
    numbers = torch.stack([number.to(device) for number in sums]).tolist()
    return dict(zip(tensors, numbers, strict=True))


def _trained(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPUs"
