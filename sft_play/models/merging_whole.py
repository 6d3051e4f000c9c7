"""Merge an adapter into a base that is whole in memory.

For bases whose files hold other tensors than the model has, such as experts in MXFP4.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from sft_play.models.base_parts import keep_untrained, write_config
from sft_play.models.expert_adapters import load_adapter
from sft_play.models.load import load_base
from sft_play.models.merging import Merge
from sft_play.models.rounding import quantised_names, rounded
from sft_play.process import Process


@torch.no_grad()
def merge_whole(merge: Merge, target: Path) -> PreTrainedModel:
    """Write the merged model to `target` and return it."""
    plain = {"mode": "lora", "base_dtype": "auto"}
    lora = merge.config.tuning.model_copy(update=plain)
    # weights are summed here, and attention computes nothing
    model = merge.config.model.model_copy(update={"attn_implementation": "auto"})
    unquantised = merge.config.model_copy(update={"tuning": lora, "model": model})
    base = load_base(unquantised, Process.alone(torch.device("cpu")), dtype="auto")
    if merge.quantization is not None:
        for name in quantised_names(base, merge.quantization):
            weight = base.get_parameter(name)
            packed = rounded(weight.data.to(merge.base_dtype), merge.quantization)
            weight.data = packed.to(weight.dtype)
    merged = load_adapter(base, merge.adapter).merge_and_unload(safe_merge=True)
    if merge.dtype is not None:
        merged = merged.to(merge.dtype)
    merged.save_pretrained(target)
    write_config(merge.config, merged, target, merge.dtype, unties=False)
    keep_untrained(merge.config, merged, target)
    return merged
