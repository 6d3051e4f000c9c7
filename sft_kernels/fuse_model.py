"""Fuse a model for any trainer, and undo it. Legend: B rows, T tokens per row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from sft_kernels.attention.forward import implementations
from sft_kernels.boundaries import DOCUMENTS, Documents
from sft_kernels.install import FusedKernels, install_kernels, why_no_trees
from sft_kernels.linears.four_bit import keep_differentiable
from sft_kernels.loss.head import FusedHead, forward_of_head
from sft_kernels.loss.tokens import labelled
from sft_kernels.process import Process
from sft_kernels.sharded import device_of, is_sharded
from sft_kernels.training_setup import TrainingSetup, base_model_of, is_training
from sft_kernels.trees import Branch, lay_out

BEFORE = "before_sft_kernels"  # attribute of a base model, see `undo`


class Fused(NamedTuple):
    """What was fused of a model, and the largest difference that each proof found."""

    kernels: FusedKernels
    proofs: dict[str, float]  # relative to the largest number

    def __str__(self) -> str:
        """Return a line for the parts, and one for each proof."""
        lines = [self.kernels.line()]
        lines += [f"{name}: differs by {error:.1e}" for name, error in self.proofs.items()]
        return "\n".join(lines)


def fuse(model: PreTrainedModel | PeftModel, compute_dtype: torch.dtype | None = None) -> Fused:
    """Fuse every part of a model whose fused result is proven to be the same, and return these.

    Call it on every rank, after adapters are added, on the device that trains, and before DDP or
    FSDP2 wraps the model, as trainers do. `compute_dtype` is that of mixed precision, by default
    the model's.

    If the loss is fused, a model in training mode that gets labels (B, T) returns it, and no
    logits. Documents of a packed row are found by cu_seq_lens_q, or by position_ids.

    Raises: ValueError if the model is fused already, or sharded.
    """
    base = base_model_of(model)
    if BEFORE in vars(base):
        raise ValueError("the model is fused already; call sft_kernels.undo(model) first")
    if is_sharded(model):
        raise ValueError("the model is sharded; call sft_kernels.fuse(model) before fully_shard")
    setup = TrainingSetup(
        model,
        Process.alone(device_of(next(base.parameters())), compute_dtype or base.dtype),
        is_full=not isinstance(model, PeftModel),
    )
    modules = {
        # hooks are added to dictionaries
        module: {
            name: value.copy() if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        for module in model.modules()
    }
    vars(base)[BEFORE] = implementations(setup.decoder), modules
    keep_differentiable(base)
    kernels = install_kernels(setup)
    head = forward_of_head(model)
    head = head if isinstance(head, FusedHead) else None
    call = _TrainerCall(kernels, head, why_no_trees(base, kernels))
    base.register_forward_pre_hook(call.before, with_kwargs=True, prepend=True)
    base.register_forward_hook(call.after)
    return Fused(kernels, setup.newly_proved)


def undo(model: PreTrainedModel | PeftModel) -> None:
    """Restore a fused model's original implementation. Raises: ValueError if it is not fused."""
    before = vars(base_model_of(model)).get(BEFORE)
    if before is None:
        raise ValueError("the model is not fused; sft_kernels.fuse(model) fuses it")
    configs, modules = before
    for config, attention in configs:
        config._attn_implementation = attention
    for module, attributes in modules.items():
        now = vars(module)
        kept = {name: now[name] for name in ("_parameters", "_buffers", "_modules", "training")}
        now.clear()
        now.update(attributes | kept)


@dataclass
class _TrainerCall:
    """What trainers pass to a model in training: documents of a packed row, and labels."""

    kernels: FusedKernels
    head: FusedHead | None
    no_trees: str | None  # why it takes no trees of samples
    total: Any = None  # tokens that the loss is divided by, if the head computes it

    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Name the documents, and give the labels to the head."""
        if self.total is not None:  # the call before failed
            self.total = self.head.tokens = None
        if not is_training(model):
            return None
        kwargs = dict(kwargs)
        mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
        tree, parents = getattr(kwargs.get(DOCUMENTS), "tree", None), None
        if tree is not None:
            no_loss = None if self.head else "its loss is not fused"
            if reason := self.no_trees or no_loss:
                raise ValueError(f"this model takes no trees: {reason}")
            parents = torch.from_numpy(lay_out(tree.branches).parents).to(model.device)
        if mask is None and self.kernels.reads_boundaries:
            kwargs.setdefault(DOCUMENTS, _documents(**kwargs))
        elif mask is not None and (mask.dim() != 2 or (mask.diff() > 0).any()):
            # not padded on the right: with positions, the attention of the model reads the mask
            kwargs.setdefault(
                "position_ids", torch.arange(mask.shape[-1], device=mask.device)[None]
            )
        # the last: TRL's own head
        if self.head is not None and labels is not None and "fused_lm_head" not in kwargs:
            del kwargs["labels"]
            self.head.tokens = labelled(labels, parents=parents)
            self.total = kwargs.pop("num_items_in_batch", None)
            if self.total is None:
                self.total = self.head.tokens.total_weight
        return args, kwargs

    def after(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Return the output with the loss and without logits, if the head has computed it."""
        if self.total is not None:
            loss = self.head.nll.reshape(()) / self.total
            self.total = self.head.tokens = self.head.nll = None
            if isinstance(output, tuple):  # return_dict=False
                return (loss, None, *output[1:])
            output["loss"], output["logits"] = loss, None
        return output


def documents(*parts: int | Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return a fused model's arguments for a packed row (1, T) of documents, on the CPU.

    A part is the tokens of a document, or a tree of samples that begin alike. A tree has a pair for
    each sample, depth first: how many tokens of the sample before it begin the sample, and how many
    new tokens follow. The row has each token once. A label stands at its token and is predicted by
    the token before it in the sample, so `labels` (1, T) have a tree's tokens, too. No token
    predicts the first one of a document: give it the label -100. A row with a tree ignores it.

    >>> documents(2, [(0, 3), (1, 2)])["position_ids"].tolist()
    [[0, 1, 0, 1, 2, 1, 2]]
    """
    trees = [[(0, part)] if isinstance(part, int) else part for part in parts]
    branches = [Branch(*branch) for tree in trees for branch in tree]
    positions, ends, _ = map(torch.from_numpy, lay_out(branches))
    found = Documents.of_lengths([sum(new for _, new in tree) for tree in trees])
    if any(branch.shared for branch in branches):
        found = found.as_trees(positions, ends, branches)
    return {DOCUMENTS: found, "position_ids": positions[None]}


def _documents(
    cu_seq_lens_q: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **_: Any
) -> Documents | None:
    """Return the documents of a packed row (1, T); None if the row is one. Waits for the GPU."""
    boundaries = cu_seq_lens_q
    if boundaries is None:
        if position_ids is None or position_ids.shape[:-1] != (1,):
            return None
        starts = (position_ids[0] == 0).nonzero()[:, 0]
        boundaries = nn.functional.pad(starts, (0, 1), value=position_ids.shape[1])
    return Documents(boundaries.int(), int(boundaries.diff().max()))
