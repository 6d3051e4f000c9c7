"""Tune the kernels of flash-linear-attention on as many tokens as a step has.

Triton times the variants of a kernel when it is first called, and keeps the fastest for every later
size, on disk too. A proof on a few tokens would choose for those.
"""

from typing import Any

import torch
from torch import Tensor

from sft_play.models.fast.capture import LENGTHS, Call
from sft_play.models.fast.documents import DocumentBatch, Documents, PackedDocuments
from sft_play.models.fast.mixers.find import hidden_states
from sft_play.models.fast.mixers.forward import forward_packed
from sft_play.models.fast.proof import Forward, Trial
from sft_play.models.linear_attention import torch_code, uses_fla
from sft_play.progress import Stage, watched

TUNED_TOKENS = 8192
TUNED_DOCUMENT = 512  # tokens of each document
TITLE = "tuning the kernels of linear attention for this GPU, which a later run finds on disk"


def tune_kernels(trial: Trial, fast: Forward, packed: PackedDocuments) -> None:
    """Run a mixer's fast code forward and backward on TUNED_TOKENS, if its kernels need tuning."""
    with torch_code(False):
        if not uses_fla(next(trial.module.parameters())):
            return
        call = Call(tiled(trial.call.args), tiled(trial.call.kwargs))
        hidden = hidden_states(call, TUNED_TOKENS)
        before = packed.batch
        packed.batch = _documents(hidden.device)
        try:
            with watched(Stage(TITLE), trial.process.is_main), torch.enable_grad():
                hidden.requires_grad_()
                output = forward_packed(packed, fast, trial.module, *call.args, **call.kwargs)
                mixed = output[0] if isinstance(output, tuple) else output
                torch.autograd.grad(mixed.float().sum(), hidden)
        finally:
            packed.batch = before


def tiled(value: Any) -> Any:
    """Return the arguments of a call with their tokens repeated to TUNED_TOKENS."""
    if isinstance(value, tuple | list):
        return type(value)(tiled(item) for item in value)
    if isinstance(value, dict):
        return {name: tiled(item) for name, item in value.items()}
    tokens = sum(LENGTHS)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens:
        return value
    indices = torch.arange(TUNED_TOKENS, device=value.device) % tokens
    return value.detach().index_select(1, indices)


def _documents(device: torch.device) -> DocumentBatch:
    boundaries = torch.arange(0, TUNED_TOKENS + 1, TUNED_DOCUMENT, dtype=torch.int32, device=device)
    lengths = [TUNED_DOCUMENT] * (TUNED_TOKENS // TUNED_DOCUMENT)
    return DocumentBatch(Documents(boundaries, TUNED_DOCUMENT), lengths)
