"""What lies under model.name, and why it may be no base to train. Reads no weights, loads no torch.

transformers would say so after the rows are tokenised, in words of its own, or not at all.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan import base_folder, transformers_types
from sft_play.plan.base_folder import CAUSAL
from sft_play.plan.model_shape import ModelConfigJson, find_file, known_config, load_model_config
from sft_play.plan.stored_as import refuse_untrainable, stored_as

ENCODER_DECODERS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ")
MASKED = "MODEL_FOR_MASKED_LM"
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OF_ENDINGS = {
    "ForMaskedLM": "an encoder, which fills gaps in a text",
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a classifier",
    "RewardModel": "a reward model",
}


def require_base(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse what cannot be trained, before anything is read of rows or weights.

    A well-known model of the hub that is not in the cache passes.

    Raises: EnvironmentFault for what lies there, ConfigError for a setting that does not go with
    it; both say what to type.
    """
    model = config.model
    path = Path(model.name)
    if path.is_file():
        raise EnvironmentFault(
            f"model.name={model.name} is a file, not a folder or a name of the hub; a GGUF file is "
            "packed for llama.cpp: set MODEL_NAME to the 16-bit model that it was made from"
        )
    if path.is_dir():
        base_folder.refuse_other_folder(path, model.name)
    elif find_file(model.name, "config.json", model.revision, environ) is None:
        other = find_file(model.name, base_folder.ADAPTER, model.revision, environ)
        if other is not None:
            base_folder.refuse_other_folder(other.parent, model.name)
        if known_config(model.name) is not None:
            return
        if model.name.lower().endswith("-gguf"):
            packed = base_folder.packed_for_llama_cpp(model.name)
            raise EnvironmentFault(f"model.name={model.name} is, by its name, GGUF files{packed}")
    declared = load_model_config(model.name, model.revision, environ)
    _refuse_class(config, declared)
    found = find_file(model.name, "config.json", model.revision, environ)
    headers = base_folder.read_weight_headers(found.parent, model.name) if found else []
    refuse_untrainable(config, stored_as(declared, headers))


def _refuse_class(config: Config, declared: ModelConfigJson) -> None:
    """Refuse a model whose class does not predict the next token of a text."""
    model_type = declared.get("model_type")
    own_code = declared.get("auto_map") or {}
    if own_code and config.model.trust_remote_code:
        return
    if not isinstance(model_type, str) or not transformers_types.is_known(model_type):
        if own_code:
            raise ConfigError(
                f"model.name={config.model.name}: its model_type {model_type} is Python code "
                f"beside its weights ({next(iter(own_code.values()))}); read it, then set "
                "MODEL_TRUST_REMOTE_CODE=true"
            )
        if model_type and transformers_types.tables():
            raise EnvironmentFault(f"model.name={config.model.name}: {_unknown(declared)}")
        return
    what = _why_not_causal(declared)
    if what is not None:
        raise EnvironmentFault(f"model.name={config.model.name} is {what}; {CAUSAL}")


def _unknown(declared: ModelConfigJson) -> str:
    made_with = declared.get("transformers_version")
    by = f" (version {made_with} wrote it)" if made_with else ""
    return (
        f"its config.json{by} says model_type={declared['model_type']}, which transformers "
        f"{version('transformers')} does not know; set MODEL_NAME to a model of another type"
    )


def _why_not_causal(declared: ModelConfigJson) -> str | None:
    """Say what a model of a known type is, None for one that predicts the next token."""
    model_type = declared["model_type"]
    name = (declared.get("architectures") or [""])[0]
    shown = f"({name or model_type})"
    parts = (declared, declared.get("text_config") or {})
    if any(part.get("is_encoder_decoder") for part in parts):
        return f"an encoder-decoder {shown}"
    for ending, words in OF_ENDINGS.items():
        if name.endswith(ending):
            return f"{words} {shown}"
    classes = transformers_types.classes
    generating = transformers_types.GENERATING
    if name in classes(*ENCODER_DECODERS) - classes(*generating):
        return f"an encoder-decoder {shown}"
    # XLM may be either, by its weights: training asks
    is_masked = classes(MASKED, model_type=model_type) and model_type != "xlm"
    if is_masked and not declared.get("is_decoder"):
        return f"an encoder {shown}, whose tokens see those that follow"
    if name in classes(*generating):
        return None
    is_named_so = not name or name.endswith(GENERATORS)  # some uploads have names of their own
    if classes(*generating, model_type=model_type) and is_named_so:
        return None
    return f"a model without a class that writes text after a prompt {shown}"
