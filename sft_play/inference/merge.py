"""Adapter + base = a plain model folder."""

import torch
from peft import PeftModel

from sft_play.errors import ConfigError
from sft_play.models.load import Placement, load_base, load_tokenizer
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder


def merge_run(folder: RunFolder) -> str:
    """Merge a run's adapter into its unquantised base, on the CPU, and save it as merged/ in the run.

    A qlora adapter is merged into the base's own weights, not the 4-bit ones: merging into 4 bits would round the update away.
    Raises: ConfigError for a run that trained every weight; CheckpointError for an incomplete adapter.
    """
    config = folder.read_config()
    if config.tuning.mode == "full":
        raise ConfigError(f"{folder.path} trained every weight: {folder.weights('full')} is a plain model already")
    weights, target = folder.weights(config.tuning.mode), folder.path / "merged"
    made_of = stamp.refuse_mismatch(weights, stamp.wanted(config))
    unquantised = config.model_copy(update={"tuning": config.tuning.model_copy(update={"mode": "lora"})})
    base = load_base(unquantised, Placement(torch.device("cpu"), torch.bfloat16, zero_stage=0))
    model = PeftModel.from_pretrained(base, weights).merge_and_unload()
    model.save_pretrained(target)
    load_tokenizer(config.model_copy(update={"model": config.model.model_copy(update={"name": str(weights)})})).save_pretrained(target)
    stamp.write(target, {**made_of, "merged": True})
    return f"merged {target}"
