"""Which tensors of a checkpoint a model may leave unused; any other is an error."""

import re
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from sft_play.errors import EnvironmentFault

MAY_BE_UNUSED = {
    r"(^|\.)(mtp|nextn|mtp_[a-z]+|eagle[a-z_]*)\.": "layers that predict further tokens",
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$": "buffers that the class computes",
    r"(^|\.)position_ids$": "a buffer that the class computes",
    r"\.(attn|attention|self_attention)\.(bias|masked_bias)$": "masks of GPT-2 and GPT-NeoX",
    r"^(v_head|value_head)\.": "the value head of a model trained by PPO",
    r"\.[kvq]_scale$": "scales of a quantised key-value cache",
}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def refuse_unaccounted(
    name: str, model: PreTrainedModel, loading_info: Mapping[str, Iterable[str]]
) -> None:
    """Raise EnvironmentFault for parameters that no file holds, and for tensors without a use.

    transformers would fill the first with random numbers, and leave out the others.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: {len(missing)} tensors are not in its weight files, "
            f"{missing[0]} first; get the model again"
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    unused = sorted(key for key in loading_info["unexpected_keys"] if not _has_reason(key, layers))
    if unused:
        raise EnvironmentFault(
            f"model.name={name}: {len(unused)} tensors of its weight files belong to no parameter "
            f"of {type(model).__name__}, {unused[0]} first; get the model again, or set MODEL_NAME "
            "to the one that its config.json describes"
        )


def _has_reason(key: str, layers: int | None) -> bool:
    """Return whether a tensor may be unused; DeepSeek's MTP layers are those behind the last."""
    found = LAYER.search(key)
    if found and layers is not None and int(found[1]) >= layers:
        return True
    return any(re.search(pattern, key) for pattern in MAY_BE_UNUSED)
