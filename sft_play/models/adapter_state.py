"""Convert an adapter's tensors between the shapes of a run and those of PEFT's files.

All code that writes, reads or compares an adapter uses this module. It uses the names and shapes of
PEFT's `adapter_model.safetensors`. If a run stores a tensor in another shape, `as_published`
converts it to the file's shape, and `as_kept` converts it back. Both functions take tensors by the
names of the model's parameters, so they also accept the state of an optimizer.

Every rank must call each of these functions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, distributed

from sft_kernels.expert_modules import SharedParamWrapper
from sft_play.errors import CheckpointError, ConfigError, first_line

ADAPTER = "default"  # PEFT's name of the only adapter


SIZES = re.compile(
    r"size mismatch for (\S+): .*torch\.Size\((\[.*?\])\) from.*torch\.Size\((\[.*?\])\)"
)


def why_not_fitting(error: BaseException) -> str:
    """Return the first tensor whose size differs between an adapter and the model, with both sizes.

    `error` is raised by torch. Its first line names no tensor.
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
    """The position of a rank's part in the matrix of all experts (models.expert_parallel)."""

    shape: tuple[int, int, int]  # of the part, experts separate: (E, r, in) or (out, r, E)
    dim: int  # the dimension of the experts
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
    """Return which part of all experts a parameter is, None if every rank has all of it."""
    return getattr(parameter, "expert_part", None)


def as_published(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from the shapes of the model's parameters to those of an adapter's file.

    The tensors are named by the model's parameters. Return them by the same names.
    """
    return _reshaped(model, tensors, ExpertPart.whole, for_every_expert)


def as_kept(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the shapes of the model's parameters: the reverse of `as_published`.

    Raises: ConfigError if the model shares one adapter among experts that have different adapters.
    """
    return _reshaped(model, tensors, ExpertPart.cut, for_all_experts)


def _reshaped(
    model: PeftModel,
    tensors: Mapping[str, Tensor],
    of_part: Callable[[ExpertPart, Tensor], Tensor],
    of_shared: Callable[[SharedParamWrapper, str, Tensor], Tensor],
) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        if part is not None and name in found:
            found[name] = of_part(part, found[name])
    for path, module in model.named_modules():
        if isinstance(module, SharedParamWrapper):
            for factor in ("lora_A", "lora_B"):
                name = f"{path}.{factor}.{ADAPTER}.weight"
                if name in found:
                    found[name] = of_shared(module, factor, found[name])
    return found


def published_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the tensors of a model's adapter, with the names and shapes of its file."""
    tensors = as_published(model, model.state_dict())
    # by default PEFT would ask the hub whether the vocabulary was resized
    return get_peft_model_state_dict(model, tensors, ADAPTER, save_embedding_layers=False)


def load_published(model: PeftModel, folder: str | Path, is_trainable: bool = False) -> None:
    """Load the adapter tensors in a folder into a model.

    Raises: CheckpointError if the model lacks some of them, or has others, which PEFT only lists.
    """

    def reshape(module: PeftModel, tensors: dict[str, Tensor], *_: Any) -> None:
        tensors.update(as_kept(module, tensors))

    hook = model.register_load_state_dict_pre_hook(reshape)
    try:
        found = model.load_adapter(str(folder), ADAPTER, is_trainable=is_trainable)
    finally:
        hook.remove()
    problems = {
        "are in no part of the model that its adapter_config.json adapts": found.unexpected_keys,
        "that its adapter_config.json describes are missing": found.missing_keys,
    }
    for problem, names in problems.items():
        if names:
            first = min(names).removeprefix("base_model.model.")
            raise CheckpointError(f"{folder}: {len(names)} tensors {problem}, {first} first")


def for_every_expert(wrapper: SharedParamWrapper, factor: str, shared: Tensor) -> Tensor:
    """Return lora_A or lora_B, or a tensor of that shape, in PEFT's layout, on the host."""
    if factor == "lora_A":
        return shared.cpu().repeat(wrapper.experts, 1)
    return shared.cpu().repeat_interleave(wrapper.experts, dim=1)


def for_all_experts(wrapper: SharedParamWrapper, factor: str, published: Tensor) -> Tensor:
    """Return the single factor from PEFT's layout: the reverse of `for_every_expert`.

    Raises: ConfigError if the experts' factors differ.
    """
    experts = wrapper.experts
    if factor == "lora_A":
        by_expert = published.unflatten(0, (experts, -1))
    else:
        by_expert = published.unflatten(1, (-1, experts)).movedim(-1, 0)
    if not torch.equal(by_expert, by_expert[:1].expand_as(by_expert)):
        raise ConfigError(
            f"tuning.lora.experts=shared: the adapter has a different {factor} of "
            f"{wrapper.parameter_name} for each expert; set TUNING_LORA_EXPERTS=per_expert"
        )
    return by_expert[0]
