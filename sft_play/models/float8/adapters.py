"""PEFT's LoRA linear over a float8 weight: merging into it would lose the adapter."""

from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear

from sft_play.models.float8.linear import is_float8


class Float8LoraLinear(PeftLinear):
    """PEFT's LoRA linear, which refuses to merge."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: e4m3 would round most of an adapter away. Raises: ValueError."""
        raise ValueError(
            "an adapter cannot be merged into float8 weights, which would round it away; "
            "`make merge` merges it into 16-bit ones"
        )


def refuse_merging(model: PeftModel) -> None:
    """Make PEFT's linears over float8 weights refuse to merge."""
    for module in model.modules():
        if type(module) is PeftLinear and is_float8(module):
            module.__class__ = Float8LoraLinear
