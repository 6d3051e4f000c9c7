"""Merge a run's adapter into its base model, and save the result as a plain model folder."""

import torch

from sft_play.data.render import stop_ids
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import CheckpointError, ConfigError
from sft_play.inference.load import config_of_weights, load_adapter, quiet_libraries
from sft_play.models.export import read_stops, saved_stops, write_stops
from sft_play.models.load import load_base
from sft_play.process import Process
from sft_play.runs import stamp
from sft_play.runs.files import share, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_card import card_text


def merge_run(folder: RunFolder) -> str:
    """Merge a run's adapter into its unquantised base, on the CPU; return the line to print.

    The result is merged/ in the run folder. Each weight is summed in float32 and stored in the
    base's dtype, so that the folder is as large as the base. A qlora adapter is merged into the
    unquantised weights too: merging into 4-bit weights would round the update away.

    Raises: ConfigError for a run that trained every weight; CheckpointError for an incomplete
    adapter.
    """
    config = folder.read_config()
    if config.tuning.mode == "full":
        raise ConfigError(
            f"{folder.path} trained every weight: {folder.weights('full')} is a plain model already"
        )
    weights = folder.weights(config.tuning.mode)
    if not weights.is_dir():
        raise CheckpointError(
            f"{folder.path} has no {weights.name}/ to merge; choose a finished run with RUN=, "
            "make runs lists them"
        )
    run_stamp = stamp.refuse_mismatch(weights, stamp.wanted(config))
    target = folder.path / "merged"
    lora = config.tuning.model_copy(update={"mode": "lora"})
    unquantised = config.model_copy(update={"tuning": lora})
    with quiet_libraries():
        base = load_base(unquantised, Process.alone(torch.device("cpu")), dtype="auto")
        adapted = load_adapter(base, weights)
        merged = adapted.merge_and_unload()  # in float32, the dtype of the adapter
        merged.save_pretrained(target)
    tokenizer = load_tokenizer(config_of_weights(config, weights))
    stops = list(read_stops(weights)) or sorted(stop_ids(tokenizer))
    write_stops(target, stops, tokenizer, merged)
    card = card_text(config, folder.read_report(), saved_stops(stops, tokenizer), target)
    write_text(target / "README.md", card)
    share(target)
    stamp.write(target, {**run_stamp, "merged": True})
    return f"merged {target}"
