"""FlashAttention 4 in place of torch's attention kernels, where a run asks for it.

flash-attn-4 compiles a kernel when it is first called, in seconds, and it is a beta version. So a
run first compares each kind of call with attention's definition. Where that raises, or gives
something else, torch's kernels compute attention for the rest of the run, and one line of the log
says why.

Legend: N tokens of all documents, H query heads, K key and value heads, D features of a head.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sft_play.errors import first_line
from sft_play.models.fast.attention.reference import attend_lengths
from sft_play.models.fast.attention.scoring import Scoring
from sft_play.models.fast.documents import Documents
from sft_play.plan.needs import FLASH4

logger = logging.getLogger(__name__)

MODULE = "flash_attn.cute"
HEADS = (64, 128)  # features: an H200 has shown these right, and 80 wrong
NO_KERNEL = "is used for heads of 64 and 128 features, without sinks and soft caps"
# Tokens. A bound on documents that is no longer than a tile makes the package compile other kernels
# for short documents; tiles have up to 192.
SHORTEST_BOUND = 256
MANY_DOCUMENTS = 256  # with more than these it compiles other kernels
# Of the compiler, about arguments that it knows while it compiles
NEEDLESS_WARNING = r"Argument aux_data .* cannot be converted to a JitArgument"
CHECKED_LENGTHS = (300, 0, 1, 150)  # tokens of documents; graphs pad with empty ones
CHECKED_WINDOW = 70
# Of a whole tensor, over its size. Rounding to bfloat16 makes 0.3 percent; one wrong row of those
# that are checked makes 3.
LARGEST_ERROR = 2e-2


class Kind(NamedTuple):
    """What the package compiles one set of kernels for."""

    features: int
    query_heads: int  # of each key head
    key_heads: int
    dtype: torch.dtype
    has_window: bool
    has_many_documents: bool
    needs_gradient: bool
    is_deterministic: bool


@dataclass
class Choice:
    """What computes the attention of this process."""

    function: Callable[..., tuple[Tensor, Tensor | None]] | None = None  # None: torch's kernels
    version: str = ""
    why_not: str | None = None  # where FlashAttention 4 is asked for
    checked: set[Kind] = field(default_factory=set)

    @property
    def is_settled(self) -> bool:
        """Return whether the log says what computes attention."""
        return bool(self.checked) or self.why_not is not None


choice = Choice()


def choose(is_asked: bool) -> None:
    """Choose FlashAttention 4 if it is asked for and can be imported, else torch's kernels."""
    choice.function = None
    choice.why_not = None
    choice.checked.clear()
    if not is_asked:
        return
    warnings.filterwarnings("ignore", NEEDLESS_WARNING, UserWarning)
    try:
        choice.version = importlib.metadata.version(FLASH4)
        choice.function = importlib.import_module(MODULE).flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001 - it loads libraries, which raise anything
        give_up(f"cannot be imported ({type(error).__name__}: {first_line(error)})")


def give_up(reason: str) -> None:
    """Let torch's kernels compute attention for the rest of the run, and say why."""
    choice.function = None
    choice.why_not = f"FlashAttention 4 {reason}"
    silence = "MODEL_ATTN_IMPLEMENTATION=auto asks for torch's kernels"
    logger.warning("attention: %s; %s", kernel_in_force(), silence)


def kernel_in_force() -> str:
    """Return what computes attention: FlashAttention 4, or torch and why where it was asked for."""
    if choice.function is not None and choice.checked:
        return f"FlashAttention 4 ({FLASH4} {choice.version})"
    return "torch" if choice.why_not is None else f"torch; {choice.why_not}"


def suits(features: int, value_features: int, dtype: torch.dtype, scoring: Scoring) -> bool:
    """Return whether FlashAttention 4 is in force and computes attention of this form."""
    if choice.function is None or scoring.sinks is not None or scoring.softcap is not None:
        return False
    return features in HEADS and features == value_features and dtype.itemsize == 2


def takes(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> bool:
    """Return whether FlashAttention 4 computes this; the first call of a kind checks that.

    query (N, H, D), key and value (N, K, D).
    """
    if not suits(query.shape[-1], value.shape[-1], query.dtype, scoring):
        return False
    kind = Kind(
        features=query.shape[-1],
        query_heads=query.shape[1] // key.shape[1],
        key_heads=min(key.shape[1], 2),
        dtype=query.dtype,
        has_window=scoring.window is not None,
        has_many_documents=len(documents.boundaries) - 1 > MANY_DOCUMENTS,
        needs_gradient=any(tensor.requires_grad for tensor in (query, key, value)),
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if kind in choice.checked:
        return True
    reason = _why_not(kind, query.device)
    if reason is not None:
        give_up(reason)
        return False
    is_first = not choice.checked
    choice.checked.add(kind)
    if is_first:
        logger.info("attention: %s", kernel_in_force())
    return True


def attend(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention (N, H, D) of what `takes` has taken, without waiting for the GPU."""
    assert choice.function is not None, "`takes` was asked before"
    starts, longest = documents
    bound = max(longest, SHORTEST_BOUND)
    on_gpu = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_gpu:
        out, _ = choice.function(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=bound,
            max_seqlen_k=bound,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=(None, None) if scoring.window is None else (scoring.window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return out


def _why_not(kind: Kind, device: torch.device) -> str | None:
    """Return what is wrong with a kind of call, in words that follow the package's name."""
    lengths = CHECKED_LENGTHS + (1,) * (MANY_DOCUMENTS * kind.has_many_documents)
    scoring = Scoring(kind.features**-0.5, CHECKED_WINDOW if kind.has_window else None)
    inputs, grad = _numbers(kind, sum(lengths), device)
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0)
    documents = Documents(boundaries.int(), max(lengths))
    heads = f"heads of {kind.features} features"
    try:
        with torch.autocast(device.type, enabled=False), torch.enable_grad():
            found = _results(attend(*inputs, scoring, documents), inputs, grad)
    except torch.OutOfMemoryError:  # which says nothing of the package
        raise
    except Exception as error:  # noqa: BLE001 - a compiler, which raises anything
        return f"does not run for {heads} ({type(error).__name__}: {first_line(error)})"
    # on the CPU: products on a GPU may be in TF32, or be refused where they must be deterministic
    wide = [tensor.detach().cpu().float().requires_grad_(kind.needs_gradient) for tensor in inputs]
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        expected = _results(attend_lengths(*wide, scoring, list(lengths)), wide, grad.cpu().float())
    for name, right in expected.items():
        error = float((found[name].cpu().float() - right).norm() / right.norm())
        if not error <= LARGEST_ERROR:
            return f"computes something else for {heads} ({name} by {error:.1e} of its size)"
    return None


def _numbers(kind: Kind, tokens: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return query (N, H, D), key and value (N, K, D), and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    heads = kind.query_heads * kind.key_heads
    made = []
    for count in (heads, kind.key_heads, kind.key_heads, heads):
        shape = (tokens, count, kind.features)
        made.append(torch.randn(shape, generator=generator, device=device).to(kind.dtype))
    inputs = [tensor.requires_grad_(kind.needs_gradient) for tensor in made[:3]]
    return inputs, made[3]


def _results(out: Tensor, inputs: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return an output, and the gradients of inputs that require one, by name."""
    results = {"output": out.detach()}
    if out.requires_grad:
        names = ("gradient of queries", "gradient of keys", "gradient of values")
        results |= zip(names, torch.autograd.grad(out, inputs, grad), strict=True)
    return results
