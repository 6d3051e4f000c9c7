"""The sections `model` and `tuning`: which base model, and how it is trained."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from sft_play.config.sections.base import (
    Auto,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

# Names of modules in Llama and most others, in GPT-2, in GPT-NeoX, in BLOOM and Falcon
EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings"})
HEADS = frozenset({"lm_head", "embed_out"})  # most others; GPT-NeoX
NAMED_TEMPLATE = "name:"  # prefix of a chat_template that names one of the model's


def _map_of_devices(value: Any) -> Any:
    """Return a device map with numbers for GPUs: `cuda:1` and "1" are 1, one device is for all."""
    if isinstance(value, dict):
        return {name: _device_number(device) for name, device in value.items()}
    number = _device_number(value)
    return {"": number} if isinstance(number, int) or number == "cpu" else value


def _device_number(device: Any) -> Any:
    found = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", device) if isinstance(device, str) else None
    if found:
        return int(found[1])
    return 0 if device == "cuda" else device


MapRule = Literal["auto", "balanced", "balanced_low_0", "sequential"]
# by module name; "" is the full model
ModuleDevices = dict[str, NonNegativeInt | Literal["cpu"]]
DeviceMap = Annotated[MapRule | ModuleDevices, BeforeValidator(_map_of_devices)]


def _distinct_words(tokens: list[str]) -> list[str]:
    """Return tokens. Raises: ValueError for one without a visible character, and for equal ones."""
    if not all(map(str.strip, tokens)) or len(set(tokens)) < len(tokens):
        raise ValueError
    return tokens


class RopeScalingSection(Section):
    """A stretched rope, for rows that are longer than those the base was trained on.

    The names are those of rope_parameters in transformers.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] | None = Field(
        None,
        description="How rotary positions are stretched beyond the base's limit: yarn and llama3 "
        "keep near tokens unchanged, linear scales all, dynamic only longer rows; null changes "
        "nothing.",
    )
    factor: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="How many times the original number of tokens the stretched rope covers, such "
        "as 4; required with a rope_type.",
    )
    original_max_position_embeddings: PositiveInt | None = Field(
        None,
        description="Tokens that the base was trained on, for yarn and llama3; null is the value "
        "of its config.json.",
    )
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: scale of the rotated values; null follows from the factor."
    )
    beta_fast: PositiveFloat | None = Field(
        None,
        description="yarn: frequencies with more rotations than this within the original length "
        "stay unchanged; null is 32.",
    )
    beta_slow: PositiveFloat | None = Field(
        None,
        description="yarn: frequencies with fewer rotations than this are stretched completely; "
        "null is 1.",
    )
    low_freq_factor: PositiveFloat | None = Field(
        None,
        description="llama3: frequencies with fewer rotations than this within the original "
        "length are stretched completely; null is 1.",
    )
    high_freq_factor: PositiveFloat | None = Field(
        None,
        description="llama3: frequencies with more rotations than this stay unchanged; null is 4.",
    )


class ModelSection(Section):
    """The base model and how it reads text."""

    name: str = Field(
        "data/tiny_llama",
        min_length=1,
        description="Base model: a local folder, or a hub id such as Qwen/Qwen2.5-7B-Instruct.",
    )
    adapter: str | None = Field(
        None,
        description="Adapter to continue training with other rows: a run, or a folder with "
        "adapter_config.json. The base and the adapter's shape follow from it.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; null is the hub's default branch."
    )
    max_seq_len: PositiveInt | Auto = Field(
        "auto",
        description="Longest training sequence in tokens; data.too_long decides about longer "
        "rows. auto covers 99.5 % of the training rows, up to the model's limit.",
    )
    rope_scaling: RopeScalingSection = RopeScalingSection()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of the unquantized base weights; auto is the compute type for lora and "
        "qlora, float32 for full.",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="Attention of transformers; auto is sdpa if the architecture has it, else "
        "eager. Fused kernels replace auto and sdpa. Unsloth uses its own.",
    )
    device_map: DeviceMap | None = Field(
        None,
        json_schema_extra={
            "structured": True,
            "write": "auto, balanced, balanced_low_0, sequential, or a mapping of modules to GPUs, "
            "such as {model.embed_tokens: 0, model.layers: 0, model.norm: 1, lm_head: 1}",
        },
        description="One model on all GPUs of one process, which compute one after the other. "
        "auto, balanced: parts of similar size; balanced_low_0: no layer on GPU 0; sequential: "
        "GPU 0 first. null is one GPU.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template instead of the model's: a Jinja file, name:rag for the "
        "model's template of that name, or default for the built-in one, which models without a "
        "template get too.",
    )
    add_tokens: Annotated[list[str], AfterValidator(_distinct_words)] | None = Field(
        None,
        min_length=1,
        json_schema_extra={
            "write": 'a list of tokens, each once and none of them blank, such as ["<tool>", '
            '"</tool>"]'
        },
        description="Tokens that are added to the tokenizer, with rows in embedding and output "
        "head. New rows start as the mean of all rows and are trained in every mode.",
    )
    template_kwargs: dict[str, Any] = Field(
        {},
        json_schema_extra={
            "structured": True,
            "write": "a mapping of the template's variables, such as {enable_thinking: false}",
        },
        description="Variables of the chat template, such as {enable_thinking: false}. Training, "
        "evaluation, inference and every saved folder use them.",
    )
    template_date: str = Field(
        "2024-07-26",
        description="The date for chat templates that write today's date (strftime_now), in "
        "training and in every saved folder. So a run that resumes tomorrow sees the same prompts.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code from the model's repository; a hub model then needs a commit "
        "in model.revision.",
    )
    allow_pickled_weights: bool = Field(
        False,
        description="Load base weights that are pickles (.bin, .pt), which can run any code; "
        "false loads only safetensors.",
    )

    @property
    def has_template_file(self) -> bool:
        """Return whether the chat template is a file of the user."""
        setting = self.chat_template
        return setting not in (None, "default") and not setting.startswith(NAMED_TEMPLATE)


class LoraSection(Section):
    """The adapters of lora and qlora."""

    r: PositiveInt = Field(
        16,
        description="Rank of the adapter matrices; each target adds r x (inputs + outputs) "
        "trainable parameters.",
    )
    alpha: PositiveFloat = Field(
        32, description="Scale of the adapter: its output is multiplied by alpha / r."
    )
    dropout: Fraction = Field(0.0, description="Dropout probability on the adapter's input.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Names of the linear layers that get adapters, and of experts' parameters "
        "(gate_up_proj, down_proj); all-linear is all except the output head and routers.",
    )
    experts: Literal["auto", "per_expert", "shared", "none"] = Field(
        "auto",
        description="Adapters of experts: one per expert (per_expert), one for all experts of a "
        "layer (shared), or none. auto is the first of these that fits, if target_modules is "
        "all-linear or names experts.",
    )
    use_rslora: bool = Field(
        False, description="Scale by alpha / sqrt(r) instead of alpha / r (rank-stabilized LoRA)."
    )
    use_dora: bool = Field(
        False,
        description="DoRA: also train the magnitude of each output's weights, separately from "
        "their direction. PEFT computes these linears, slower and with more memory than the fused "
        "kernels.",
    )
    init_lora_weights: Literal["default", "gaussian", "orthogonal"] = Field(
        "default",
        description="How adapters are initialized: default and gaussian have a random A and a "
        "zero B; orthogonal has a random A and B, and an even r. pissa and olora change the base "
        "and are not supported.",
    )
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="LoRA+: learning rate of the B matrices (and of DoRA's magnitudes) as a "
        "multiple of train.learning_rate, often 16; null is one rate for all.",
    )
    layers_to_transform: list[NonNegativeInt] | None = Field(
        None,
        min_length=1,
        json_schema_extra={"write": "a list of layer numbers, the first is 0, such as [0, 1]"},
        description="Decoder layers that get adapters, by number from 0; null is all.",
    )
    modules_to_save: list[str] | None = Field(
        None,
        min_length=1,
        description="Modules that are trained in full, in addition to the adapters, and saved "
        "with them: embed_tokens, lm_head, norm. In float32, 16 bytes per weight with Adam; not "
        "under ZeRO-3.",
    )
    trainable_tokens: list[str] | None = Field(
        None,
        min_length=1,
        description="Tokens whose rows of embedding and output head are trained, for added tokens "
        "that the base never learned, such as <|im_start|>; not under ZeRO-3.",
    )


class TuningSection(Section):
    """What is trained, and with which library."""

    mode: Literal["lora", "qlora", "full"] = Field(
        "lora",
        description="lora trains adapters, qlora trains adapters over a 4-bit base, full trains "
        "every weight.",
    )
    backend: Literal["bnb", "unsloth"] = Field(
        "bnb",
        description="bnb is transformers + PEFT + bitsandbytes and runs anywhere; unsloth needs a "
        "GPU and requirements-unsloth.txt.",
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field(
        "nf4", description="4-bit data type of a qlora base under backend bnb."
    )
    bnb_4bit_use_double_quant: bool = Field(
        True,
        description="Also quantize the quantization constants of a qlora base under backend bnb "
        "(0.37 bits per weight less).",
    )
    base_dtype: Literal["auto", "float8"] = Field(
        "auto",
        description="float8: the frozen linear weights of a lora base in 8 bits (e4m3, one scale "
        "per row), multiplied in 8 bits; a GPU needs capability 8.9. auto keeps model.dtype.",
    )
    encoders: Literal["frozen", "lora", "full", "drop"] = Field(
        "frozen",
        description="Encoders for images or sound: frozen are not trained, lora adds adapters to "
        "their linear layers, full trains them in mode full, drop frees their memory. Saved "
        "models contain them anyway.",
    )
    encoders_learning_rate: PositiveFloat | None = Field(
        None,
        description="Learning rate of trained image and sound encoders; null is "
        "train.learning_rate.",
    )
    allow_untrained_tokens: bool = Field(
        False,
        description="Train adapters although the rows use added tokens whose embedding was never "
        "trained; adapters do not train it.",
    )
    lora: LoraSection = LoraSection()

    @property
    def trains_encoders(self) -> bool:
        """Whether encoders are trained, or adapters in them."""
        return self.encoders in ("lora", "full")

    @property
    def has_float8_base(self) -> bool:
        """Whether the frozen linear weights are in float8."""
        return self.base_dtype == "float8"
