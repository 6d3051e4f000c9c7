"""Which options of PEFT's LoraConfig an adapter from elsewhere may have. Loads no torch.

PEFT loads the adapter for eval, infer and chat, so its options mean what they mean in PEFT.
Training adds adapters by the run's settings, so it accepts the options that a setting
describes. docs/models.md has this table.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Initializations that leave the base as it is
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# Those that change the base in a way that PEFT repeats exactly when it loads the adapter
REPEATED_INITS = ("pissa", "olora")


# Options that a setting describes: an adapter with other values than PEFT's is loaded and trained
OF_SETTINGS = """
r lora_alpha lora_dropout use_rslora use_dora target_modules layers_to_transform modules_to_save
fan_in_fan_out
""".split()
# Options that PEFT loads and no setting describes: such an adapter is loaded, and not trained
OF_PEFT = """
bias lora_bias exclude_modules layers_pattern rank_pattern alpha_pattern trainable_token_indices
target_parameters velora_config
""".split()
# Options that change how the base computes: such an adapter is refused
OF_OTHER_MODELS = """
layer_replication megatron_config alora_invocation_tokens use_qalora monteclora_config use_bdlora
arrow_config kasa_config
""".split()
# Facts about the adapter, and arguments of its initialization
IGNORED = frozenset(
    """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    init_lora_weights megatron_core loftq_config eva_config corda_config lora_ga_config
    qalora_group_size runtime_config ensure_weight_tying parent_library
    """.split()
)
USUAL_VALUES = (None, False, "", "none", 0, 0.0, {}, [])
PROMPTS = re.compile("PROMPT|PREFIX|P_TUNING|ADAPTION")  # types that cannot be merged
PATTERNS = """
target_modules exclude_modules modules_to_save layers_pattern rank_pattern alpha_pattern
target_parameters
""".split()


def why_not_usable(config: Mapping[str, Any], is_training: bool) -> str | None:
    """Return the first option with which an adapter cannot be loaded, why, and what to type.

    If `is_training`, it is to be trained, too.
    """
    reason = next(_refused(config, is_training), None)
    if reason is None:
        return None
    if PROMPTS.search(str(config.get("peft_type"))):
        return f"{reason}. It can only be used with PEFT itself."
    instead = "RUN=<folder of the merged model>"
    if is_training:
        instead = "MODEL_NAME=<folder of the merged model> without MODEL_ADAPTER"
    return f"{reason}. Merge it into its base with PEFT (merge_and_unload) and type {instead}."


def _refused(config: Mapping[str, Any], is_training: bool) -> Iterator[str]:
    if config.get("peft_type", "LORA") != "LORA":
        yield f"peft_type={config['peft_type']}: SFT-Play loads LoRA adapters only"
    init = config.get("init_lora_weights")
    if (init in REPEATED_INITS and is_training) or init not in (*PLAIN_INITS, *REPEATED_INITS):
        yield f"init_lora_weights={init}: it changed the base when the adapter was made"
    for name in PATTERNS:
        for pattern in _texts(config.get(name)):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{name}={pattern!r} is not a regular expression ({error})"
    for name, value in config.items():
        if name in IGNORED or name in OF_SETTINGS or value in USUAL_VALUES:
            continue
        reason = "this option is not known here"
        if name in OF_OTHER_MODELS:
            reason = "it changes how the base computes"
        if name in OF_PEFT:
            reason = "no setting describes it"
        if is_training or name not in OF_PEFT:
            yield f"{name}={repr(value)[:100]}: {reason}"
    targets = config.get("target_modules")
    if is_training and isinstance(targets, str) and targets != "all-linear":
        yield f"target_modules={targets[:100]!r}: no setting describes a pattern"


def _texts(value: Any) -> list[str]:
    """Return the texts of a value that is one, a list of them, or a mapping by them."""
    values = [value] if isinstance(value, str) else value or []
    return [text for text in values if isinstance(text, str)]
