"""One adapter for all experts of a layer: W_e + s B A for each expert e.

PEFT has adapters of experts in one layout, with the factors of each expert: lora_A (E r, in), the
ranks of an expert one after another, and lora_B (out, r E), the experts of a rank one after
another. So a shared adapter is published with the same factors for every expert.

Legend: E experts, r rank, `in` and `out` features.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from sft_play.errors import ConfigError
from sft_play.models.experts import ExpertWeight


class SharedParamWrapper(ParamWrapper):
    """PEFT's wrapper of an experts' parameter, with lora_A (r, in) and lora_B (out, r)."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        sizes = super()._get_in_out_features(module)
        self.experts = self.num_experts
        self.num_experts = 1
        return sizes

    def get_delta_weight(self, adapter_name: str, *args: Any, **options: Any) -> Tensor:
        """Return what is added to the matrix of each expert, as the parameter has it."""
        delta = super().get_delta_weight(adapter_name, *args, **options)  # (out, in)
        return delta if self._did_swap_in_out_features else delta.T

    def for_every_expert(self, factor: str, shared: Tensor) -> Tensor:
        """Return lora_A or lora_B, or what has its shape, as PEFT's layout has it; on the host."""
        if factor == "lora_A":
            return shared.cpu().repeat(self.experts, 1)
        return shared.cpu().repeat_interleave(self.experts, dim=1)

    def for_all_experts(self, factor: str, published: Tensor) -> Tensor:
        """Return the one factor of which `for_every_expert` made PEFT's layout.

        Raises: ConfigError if the experts' factors differ.
        """
        experts = self.experts
        if factor == "lora_A":
            by_expert = published.unflatten(0, (experts, -1))
        else:
            by_expert = published.unflatten(1, (-1, experts)).movedim(-1, 0)
        if not torch.equal(by_expert, by_expert[:1].expand_as(by_expert)):
            raise ConfigError(
                f"tuning.lora.experts=shared: the adapter has another {factor} of "
                f"{self.parameter_name} for each expert; set TUNING_LORA_EXPERTS=per_expert"
            )
        return by_expert[0]


def wrap_shared(model: PeftModel, adapter: str, weight: ExpertWeight) -> None:
    """Wrap a parameter of experts, which may be wrapped already, with one adapter for all."""
    tuner = model.base_model
    config = model.peft_config[adapter]
    parent_name, _, child_name = weight.module_name.rpartition(".")
    parent = tuner.model.get_submodule(parent_name)
    child = getattr(parent, child_name)
    wrapper = SharedParamWrapper(
        child, adapter, weight.parameter_name, config, r=config.r, lora_alpha=config.lora_alpha
    )
    tuner._replace_module(parent, child_name, wrapper, child)
