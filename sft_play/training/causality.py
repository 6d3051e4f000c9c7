"""The causality check: run the model to see whether a token's prediction depends on later tokens.

An encoder, or a model that reads its prompt in both directions, would learn to copy what it is to
predict: its training loss falls to nothing, and its answers are noise.
"""

import torch

from sft_play.errors import ConfigError
from sft_play.models.experts import expert_weights
from sft_play.models.fast.setup import base_model_of
from sft_play.models.float8.linear import has_float8

TOKENS = 24
# Of the change of the last token's own logits. Earlier ones are the same sums of the same numbers:
# 55 of 56 model types give the same bits. BERT with random weights moves them by 2e-3.
MAX_MOVED = 1e-4
MAX_COARSE = 0.05  # experts multiply the tokens that are sent to them together, in 16 bits


@torch.no_grad()
def check_causality(model: torch.nn.Module, vocabulary: int, device: torch.device) -> None:
    """Raise ConfigError if changing the last token of a text moves the logits of earlier ones.

    In evaluation and in training mode, which some models mask differently. Every rank must call it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, TOKENS), generator=generator)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % vocabulary
    is_coarse = bool(expert_weights(model)) or has_float8(model)
    limit = MAX_COARSE if is_coarse else MAX_MOVED
    was_training = {module: module.training for module in model.modules()}
    try:
        for mode in (False, True):
            model.train(mode)
            one, other = (_logits(model, text.to(device)) for text in (ids, changed))
            change = (one - other).abs().amax(-1)  # (T,)
            moved, own = change[:-1].max().item(), change[-1].item()
            if moved > limit * own:  # NaN is left to the first evaluation
                base = base_model_of(getattr(model, "module", model))
                raise ConfigError(
                    f"model.name={base.name_or_path}: {type(base).__name__} sees tokens that come "
                    f"later: changing the last one moves earlier logits by {moved:.2g}, and its "
                    f"own by {own:.2g}; set MODEL_NAME to a causal language model"
                )
    finally:
        for module, mode in was_training.items():
            module.training = mode


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (T, V) of ids (1, T), with the same dropout at every call."""
    gpus = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(0)
        return model(input_ids=ids, use_cache=False).logits[0].float()
