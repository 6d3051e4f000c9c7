"""Load trained weights with transformers and PEFT alone, in a process without this project's code."""

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path


@dataclass(frozen=True)
class Saved:
    """Weights of a run: `adapter` over `base`, or a whole model where it is None."""

    base: Path
    adapter: Path | None


def start_loader() -> ProcessPoolExecutor:
    """Return a pool of one fresh process, which keeps what it has imported."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def logits_of_saved(saved: Saved, ids: list[int]) -> list[list[float]]:
    """Return the logits (T, V) of a text, in float32, from saved weights. Runs in the loader."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert not any(name.partition(".")[0] == "sft_play" for name in sys.modules)
    model = AutoModelForCausalLM.from_pretrained(saved.base, dtype=torch.float32)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the cap out, without a word
    if saved.adapter is not None:
        model = PeftModel.from_pretrained(model, saved.adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist()
