"""The tensors of an adapter: how a run keeps them, and how PEFT's files have them.

Whatever writes an adapter, reads one or compares with one does it here, in the names and shapes of
PEFT's `adapter_model.safetensors`. A tensor that a run keeps in another shape is turned into that
of the file by `as_published`, and back by `as_kept`: both take tensors by the names of the model's
parameters, so the state of an optimizer can go through them as well.

Every rank must call each of these functions.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, distributed, nn

from sft_play.errors import first_line
from sft_play.models.experts import SharedParamWrapper

ADAPTER = "default"  # PEFT's name of the one adapter


SIZES = re.compile(
    r"size mismatch for (\S+): .*torch\.Size\((\[.*?\])\) from.*torch\.Size\((\[.*?\])\)"
)


def why_not_fitting(error: BaseException) -> str:
    """Return the first tensor whose size differs between an adapter and the model, with both sizes.

    `error` is torch's; its first line names no tensor.
    """
    found = SIZES.search(str(error))
    if found is None:
        return first_line(error)
    name = found[1].removeprefix("base_model.model.")
    advice = ""
    if any(word in name for word in ("embed", "wte", "lm_head")):
        advice = ". If tokens were added, set MODEL_NAME to the base with the resized vocabulary"
    return f"{name} has size {found[2]} in the adapter and {found[3]} in the base{advice}"


@dataclass(frozen=True)
class ExpertPart:
    """Where the matrix of a rank's experts lies in that of all experts (models.expert_parallel)."""

    shape: tuple[int, int, int]  # of the part with its experts apart: (E, r, in) or (out, r, E)
    dim: int  # that of the experts
    rank: int
    ranks: int

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a matrix of all experts."""
        own = self.shape[self.dim]
        shape = [*self.shape]
        shape[self.dim] = own * self.ranks
        part = whole.reshape(shape).narrow(self.dim, own * self.rank, own)
        return self._as_matrix(part).clone()

    def whole(self, part: Tensor) -> Tensor:
        """Return the matrix of all experts, in host memory. Every rank must call it."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        distributed.all_gather(parts, part.contiguous())
        apart = [each.cpu().view(self.shape) for each in parts]
        return self._as_matrix(torch.cat(apart, dim=self.dim))

    def _as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1) if self.dim == 0 else tensor.flatten(1, 2)


def part_of(parameter: Tensor) -> ExpertPart | None:
    """Return which part of all experts a parameter is, None for one that every rank has whole."""
    return getattr(parameter, "expert_part", None)


def parts_of(model: nn.Module) -> dict[str, ExpertPart]:
    """Return the parts of experts among a model's parameters, by name."""
    parts = {name: part_of(parameter) for name, parameter in model.named_parameters()}
    return {name: part for name, part in parts.items() if part is not None}


def as_published(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of a model's parameters in the shapes of an adapter's file."""
    return _reshaped(model, tensors, ExpertPart.whole, SharedParamWrapper.for_every_expert)


def as_kept(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the shapes of the model's parameters: the reverse of `as_published`.

    Raises: ConfigError if the model shares an adapter among experts that have their own.
    """
    return _reshaped(model, tensors, ExpertPart.cut, SharedParamWrapper.for_all_experts)


def _reshaped(
    model: PeftModel,
    tensors: Mapping[str, Tensor],
    of_part: Callable[[ExpertPart, Tensor], Tensor],
    of_shared: Callable[[SharedParamWrapper, str, Tensor], Tensor],
) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, part in parts_of(model).items():
        if name in found:
            found[name] = of_part(part, found[name])
    for name, factor, wrapper in _shared_factors(model):
        if name in found:
            found[name] = of_shared(wrapper, factor, found[name])
    return found


def _shared_factors(model: PeftModel) -> Iterator[tuple[str, str, SharedParamWrapper]]:
    """Yield the factors that experts share: a parameter's name, lora_A or lora_B, its module."""
    for name, module in model.named_modules():
        if isinstance(module, SharedParamWrapper):
            for factor in ("lora_A", "lora_B"):
                yield f"{name}.{factor}.{ADAPTER}.weight", factor, module


def published_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the tensors of a model's adapter, in the names and shapes of its file."""
    tensors = as_published(model, model.state_dict())
    # by default PEFT would ask the hub whether the vocabulary was resized
    return get_peft_model_state_dict(model, tensors, ADAPTER, save_embedding_layers=False)


def load_published(model: PeftModel, folder: str | Path, is_trainable: bool = False) -> NamedTuple:
    """Give the adapter of a model the tensors in a folder.

    Return the names of those that are missing there, and of those that the model has no place for.
    """

    def reshape(module: PeftModel, tensors: dict[str, Tensor], *_: Any) -> None:
        tensors.update(as_kept(module, tensors))

    hook = model.register_load_state_dict_pre_hook(reshape)
    try:
        return model.load_adapter(str(folder), ADAPTER, is_trainable=is_trainable)
    finally:
        hook.remove()
