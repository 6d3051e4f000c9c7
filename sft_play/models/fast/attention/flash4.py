"""FlashAttention 4 in place of torch's attention kernels, on Hopper GPUs where it is installed.

flash-attn-4 compiles a kernel when it is first called, in seconds, and it is a beta version. So a
run that would use it first compares each kind of call with attention's definition. Where that
raises, or gives something else, torch's kernels compute attention for the rest of the run, and one
line of the log says why.

The only module here that sets environment variables: the package reads when it is imported where
it keeps what it has compiled.

Legend: N tokens of all documents, H query heads, K key and value heads, D features of a head.
"""

import contextlib
import fcntl
import importlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sft_play.models.fast.attention.scoring import Scoring
from sft_play.models.fast.documents import Documents

logger = logging.getLogger(__name__)

HOPPER = (9, 0)  # capability: elsewhere nothing was measured
PACKAGE = "flash-attn-4"
MODULE = "flash_attn.cute"
INSTALL = "python -m tools.install add requirements-hopper.txt"
SMALLEST_HEAD, LARGEST_HEAD, HEAD_STEP = 8, 256, 8  # features
# Tokens. A bound on documents that is no longer than a tile makes the package compile other kernels
# for short documents; tiles have up to 192.
SHORTEST_BOUND = 256
MANY_DOCUMENTS = 256  # with more than these it compiles other kernels
CACHE_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
CACHE_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
# Of the compiler, about arguments that it knows while it compiles
NEEDLESS_WARNING = r"Argument aux_data .* cannot be converted to a JitArgument"
CHECKED_LENGTHS = (300, 0, 1, 150)  # tokens of documents; graphs pad with empty ones
CHECKED_WINDOW = 70
# Of a whole tensor, over its size. Rounding to bfloat16 makes 0.3 percent; one wrong row of those
# that are checked makes 3.
LARGEST_ERROR = 2e-2

Function = Callable[..., tuple[Tensor, Tensor | None]]


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

    function: Function | None = None  # of FlashAttention 4; None: torch's kernels
    version: str = ""
    why_not: str | None = None  # on a Hopper GPU
    checked: set[Kind] = field(default_factory=set)


_choice = Choice()


def choose(capability: tuple[int, int], is_allowed: bool = True) -> None:
    """Choose FlashAttention 4 on a GPU of this capability if it is there; log why if it is not.

    Torch's kernels are chosen where it is not allowed.
    """
    _choice.function = None
    _choice.why_not = None
    _choice.checked.clear()
    if capability != HOPPER or not is_allowed:
        return
    try:
        _choice.version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        _choice.why_not = f"FlashAttention 4 is not installed ({INSTALL})"
        logger.info("attention: %s", kernel_in_force())
        return
    _keep_what_is_compiled()
    warnings.filterwarnings("ignore", NEEDLESS_WARNING, UserWarning)
    try:
        _choice.function = importlib.import_module(MODULE).flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001 - it loads libraries, which raise anything
        _give_up(f"cannot be imported ({_spoken(error)})")


def kernel_in_force() -> str:
    """Return what computes attention: FlashAttention 4, or torch and on a Hopper GPU why."""
    if _choice.function is not None and _choice.checked:
        return f"FlashAttention 4 ({PACKAGE} {_choice.version})"
    return "torch" if _choice.why_not is None else f"torch; {_choice.why_not}"


def suits(features: int, value_features: int, dtype: torch.dtype, scoring: Scoring) -> bool:
    """Return whether FlashAttention 4 is in force and computes attention of this form.

    Sinks and soft caps have kernels of their own.
    """
    if _choice.function is None or scoring.sinks is not None or scoring.softcap is not None:
        return False
    is_known_size = SMALLEST_HEAD <= features <= LARGEST_HEAD and features % HEAD_STEP == 0
    return is_known_size and features == value_features and dtype.itemsize == 2


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
    if kind in _choice.checked:
        return True
    reason = _why_not(kind, query.device)
    if reason is not None:
        _give_up(reason)
        return False
    if not _choice.checked:
        _choice.checked.add(kind)
        logger.info("attention: %s", kernel_in_force())
    _choice.checked.add(kind)
    return True


def attend(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, documents: Documents
) -> Tensor:
    """Return attention (N, H, D) of what `takes` has taken, without waiting for the GPU."""
    assert _choice.function is not None, "`takes` was asked before"
    starts, longest = documents
    window = (None, None) if scoring.window is None else (scoring.window - 1, 0)
    bound = max(longest, SHORTEST_BOUND)
    on_gpu = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_gpu:
        out, _ = _choice.function(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=bound,
            max_seqlen_k=bound,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=window,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return out


def _give_up(reason: str) -> None:
    """Let torch's kernels compute attention for the rest of the run, and say why."""
    _choice.function = None
    _choice.why_not = f"FlashAttention 4 {reason}"
    logger.warning("attention: %s", kernel_in_force())


def _spoken(error: Exception) -> str:
    """Return an error in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _why_not(kind: Kind, device: torch.device) -> str | None:
    """Return what is wrong with a kind of call, in words that follow the package's name."""
    lengths = CHECKED_LENGTHS + (1,) * (MANY_DOCUMENTS * kind.has_many_documents)
    scoring = Scoring(kind.features**-0.5, CHECKED_WINDOW if kind.has_window else None)
    inputs, grad = _numbers(kind, sum(lengths), device)
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0)
    documents = Documents(boundaries.int(), max(lengths))
    try:
        with torch.autocast(device.type, enabled=False), torch.enable_grad():
            found = _results(attend(*inputs, scoring, documents), inputs, grad)
    except torch.OutOfMemoryError:  # which says nothing of the package
        raise
    except Exception as error:  # noqa: BLE001 - a compiler, which raises anything
        return f"does not run for heads of {kind.features} features ({_spoken(error)})"
    # on the CPU: products on a GPU may be in TF32, or be refused where they must be deterministic
    wide = [tensor.detach().cpu().float().requires_grad_(kind.needs_gradient) for tensor in inputs]
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        expected = _results(_definition(*wide, scoring, lengths), wide, grad.cpu().float())
    for name, right in expected.items():
        error = float((found[name].cpu().float() - right).norm() / right.norm())
        if not error <= LARGEST_ERROR:
            return (
                f"computes something else for heads of {kind.features} features "
                f"({name} by {error:.1e} of its size)"
            )
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


def _definition(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, lengths: tuple[int, ...]
) -> Tensor:
    """Return attention (N, H, D) by its definition, on the CPU."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(query))
    distance = place[:, None] - place
    sees = (document[:, None] == document) & (distance >= 0)
    if scoring.window is not None:
        sees &= distance < scoring.window
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _keep_what_is_compiled() -> None:
    """Let the package keep compiled kernels in the user's cache, which no other user writes.

    It keeps nothing unless told to. What the user has set stays.
    """
    if CACHE_SWITCH in os.environ:
        return
    try:
        folder = Path(os.environ.get(CACHE_FOLDER) or _default_folder())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as file:  # the package waits for locks, and then fails
            fcntl.flock(file, fcntl.LOCK_SH)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.info("attention: kernels are compiled anew in each run (%s)", error)
        return
    os.environ[CACHE_FOLDER] = str(folder)
    os.environ[CACHE_SWITCH] = "1"


def _default_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "sft-play" / PACKAGE
