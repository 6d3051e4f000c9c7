"""Fuse a model for any trainer, and undo it. Legend: B rows, T tokens per row."""

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from sft_kernels.attention.forward import implementations
from sft_kernels.documents import DOCUMENTS, Documents
from sft_kernels.install import FusedKernels, install_kernels
from sft_kernels.loss.head import FusedHead, output_head
from sft_kernels.loss.tokens import labelled
from sft_kernels.process import Process
from sft_kernels.setup import TrainingSetup, base_model_of, is_training
from sft_kernels.sharded import device_of

BEFORE = "before_sft_kernels"  # attribute of a base model, see `undo`


def fuse(
    model: PreTrainedModel | PeftModel,
    compute_dtype: torch.dtype | None = None,
    longest_row: int | None = None,
    encoders: tuple[nn.Module, ...] = (),
) -> FusedKernels:
    """Fuse every part of a model whose fused result is proven to be the same, and return these.

    Call it on every rank, after adapters are added, on the device that trains. `compute_dtype` is
    that of mixed precision, by default the model's; `longest_row` the tokens of the longest row,
    if all are short; `encoders` the parts that read no text.

    If the loss is fused, a model in training mode that gets labels (B, T) returns it, and no
    logits. Documents of a packed row are found by cu_seq_lens_q, or by position_ids.

    Raises: ValueError if the model is fused already.
    """
    base = base_model_of(model)
    if BEFORE in vars(base):
        raise ValueError("the model is fused already; call sft_kernels.undo(model) first")
    setup = TrainingSetup(
        model,
        Process.of_torch(device_of(next(base.parameters())), compute_dtype or base.dtype),
        is_full=not isinstance(model, PeftModel),
        longest_row=longest_row,
        encoders=encoders,
    )
    modules = {module: _with_copies(vars(module)) for module in model.modules()}
    before = implementations(setup.decoder), modules
    kernels = install_kernels(setup)
    head = vars(output_head(model) or nn.Module()).get("forward")
    call = partial(_trainer_call, kernels, head if isinstance(head, FusedHead) else None)
    base.register_forward_pre_hook(call, with_kwargs=True, prepend=True)
    vars(base)[BEFORE] = before
    return kernels


def undo(model: PreTrainedModel | PeftModel) -> None:
    """Give a fused model its own code back. Raises: ValueError if it is not fused."""
    before = vars(base_model_of(model)).get(BEFORE)
    if before is None:
        raise ValueError("the model is not fused; sft_kernels.fuse(model) fuses it")
    configs, modules = before
    for config, attention in configs:
        config._attn_implementation = attention
    for module, attributes in modules.items():
        names = ("_parameters", "_buffers", "_modules", "training")
        now = vars(module)
        kept = {name: now[name] for name in names}
        now.clear()
        now.update(attributes | kept)


def _with_copies(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of the dictionaries, to which hooks are added."""
    return {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in attributes.items()
    }


def _trainer_call(
    kernels: FusedKernels,
    head: FusedHead | None,
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a base model: read what trainers pass in training.

    That are the documents of a packed row, and labels, whose loss the head computes.
    """
    if not is_training(model):
        return None
    kwargs = dict(kwargs)
    if kernels.reads_boundaries and kwargs.get("attention_mask") is None:
        kwargs.setdefault(DOCUMENTS, _documents(**kwargs))
    labels = kwargs.get("labels")
    if head is None or labels is None or "fused_lm_head" in kwargs:  # the last: TRL's own head
        return args, kwargs
    del kwargs["labels"]
    head.tokens = labelled(labels)
    total = torch.as_tensor(kwargs.pop("num_items_in_batch", None) or head.tokens.total_weight)

    def with_loss(model: nn.Module, args: tuple, output: Any) -> Any:
        """Return the output with the loss, and without logits."""
        hook.remove()
        output["loss"], output["logits"] = head.nll.reshape(()) / total.to(head.nll.device), None
        head.tokens = head.nll = None
        return output

    hook = model.register_forward_hook(with_loss)
    return args, kwargs


def _documents(
    cu_seq_lens_q: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> Documents | None:
    """Return the documents of a packed row (1, T); None if the row is one. Waits for the GPU."""
    boundaries = cu_seq_lens_q
    if boundaries is None:
        if position_ids is None or position_ids.shape[:-1] != (1,):
            return None
        starts = (position_ids[0] == 0).nonzero()[:, 0]
        boundaries = torch.cat((starts, starts.new_tensor([position_ids.shape[1]])))
    return Documents(boundaries.int(), int(boundaries.diff().max()))
