"""Rules between settings, as a table of (when, message). Pure: a Config in, sentences out."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from sft_play.config import schedules
from sft_play.config.backends import LORA_OPTIONS, UNSLOTH, backend_of
from sft_play.config.metrics import find_metric_problems, produced
from sft_play.config.schema import Config, LoraSection, SourceSection
from sft_play.config.sections.model import EMBEDDINGS, HEADS

# Settings of model.rope_scaling, and the types that have them
ROPE_OPTIONS = {
    "original_max_position_embeddings": ("yarn", "llama3"),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), ("yarn",)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
}


@dataclass(frozen=True)
class Rule:
    """A combination of settings that cannot run."""

    names: tuple[str, ...]  # settings that the message shows with value and origin
    when: Callable[[Config], bool]
    advice: str


def _computes_in_float32(config: Config) -> bool:
    return config.train.bf16 is False and config.train.fp16 is False


def _is_set(config: Config, option: str) -> bool:
    """Return whether an option of tuning.lora has another value than its default."""
    return getattr(config.tuning.lora, option) != LoraSection.model_fields[option].default


def _needs_evaluations(config: Config) -> bool:
    """Return whether something follows from scores that training would not produce."""
    train = config.train
    follows = train.load_best_model_at_end or train.early_stopping_patience is not None
    return follows and train.eval_strategy == "no"


def _saves_apart(config: Config) -> bool:
    """Return whether the best weights may be scored at a step that has no checkpoint."""
    train = config.train
    if not train.load_best_model_at_end or train.eval_strategy == "no":
        return False
    differ = train.save_strategy != train.eval_strategy
    return differ or (train.save_strategy == "steps" and train.eval_steps % train.save_steps != 0)


def _metric_problems(config: Config, described: Callable[[str], str]) -> list[str]:
    """Return a sentence for every metric that is never produced."""
    train = config.train
    problems = [
        f"{described('train.metrics')}: {why}" for why in find_metric_problems(train.metrics)
    ]
    names = produced(train.metrics, train.predict_with_generate)
    sources = config.data.val_path if isinstance(config.data.val_path, list) else []
    if len(sources) > 1:  # a loss for each of them
        named = (source.name for source in sources if isinstance(source, SourceSection))
        names += [f"eval_{name}_loss" for name in named if name]
    wanted = train.metric_for_best_model
    if not {wanted, f"eval_{wanted}"} & set(names):
        problems.append(
            f"{described('train.metric_for_best_model')}: evaluations produce {', '.join(names)}; "
            "write one of them"
        )
    return problems


def _rule_of_mode(option: str) -> Rule:
    return Rule(
        ("tuning.mode", f"tuning.lora.{option}"),
        lambda c: c.tuning.mode == "full" and _is_set(c, option),
        "mode full trains every weight and has no adapters; set TUNING_MODE=lora, or delete the "
        "setting",
    )


def _rule_of_backend(option: str) -> Rule:
    return Rule(
        ("tuning.backend", f"tuning.lora.{option}"),
        lambda c: _is_set(c, option) and option not in backend_of(c).lora_options,
        "this backend is not given the setting; set TUNING_BACKEND=bnb, or delete it",
    )


def _rule_of_rope(option: str, rope_types: tuple[str, ...]) -> Rule:
    return Rule(
        ("model.rope_scaling.rope_type", f"model.rope_scaling.{option}"),
        lambda c: (
            getattr(c.model.rope_scaling, option) is not None
            and c.model.rope_scaling.rope_type not in rope_types
        ),
        f"{option} is for rope_type {' and '.join(rope_types)}; leave one of them out",
    )


def _names_of_both(config: Config) -> set[str]:
    """Return the modules that are to be trained whole and by adapters."""
    lora = config.tuning.lora
    return _last_words(lora.modules_to_save) & _last_words(lora.target_modules)


def _last_words(names: list[str] | str | None) -> set[str]:
    """Return the last words of module names; all-linear names none."""
    return {name.rpartition(".")[2] for name in names} if isinstance(names, list) else set()


def _trains_matrix_and_rows(config: Config) -> bool:
    """Return whether embedding or head are trained, and rows of them as well."""
    lora = config.tuning.lora
    named = _last_words(lora.modules_to_save) | _last_words(lora.target_modules)
    return bool(config.trained_tokens) and bool(named & (EMBEDDINGS | HEADS))


ENCODER_RULES = (
    Rule(
        ("tuning.encoders", "tuning.mode"),
        lambda c: c.tuning.encoders == "full" and c.tuning.mode != "full",
        "every weight of an encoder is trained in mode full; set TUNING_ENCODERS=lora, or "
        "TUNING_MODE=full",
    ),
    Rule(
        ("tuning.encoders", "tuning.mode"),
        lambda c: c.tuning.encoders == "lora" and c.tuning.mode == "full",
        "mode full has no adapters; set TUNING_ENCODERS=full, or TUNING_MODE=lora",
    ),
    Rule(
        ("tuning.encoders", "tuning.backend"),
        lambda c: c.tuning.trains_encoders and c.tuning.backend == "unsloth",
        "this backend is given text; set TUNING_BACKEND=bnb",
    ),
    Rule(
        ("tuning.encoders_learning_rate", "tuning.encoders"),
        lambda c: c.tuning.encoders_learning_rate is not None and not c.tuning.trains_encoders,
        "no encoder is trained; set TUNING_ENCODERS=lora, or full in mode full",
    ),
)
FLOAT8_RULES = (
    Rule(
        ("tuning.base_dtype", "tuning.mode"),
        lambda c: c.tuning.has_float8_base and c.tuning.mode == "full",
        "float8 weights are frozen, and mode full trains them; set TUNING_MODE=lora, or "
        "TUNING_BASE_DTYPE=auto",
    ),
    Rule(
        ("tuning.base_dtype", "tuning.mode"),
        lambda c: c.tuning.has_float8_base and c.tuning.mode == "qlora",
        "a base is in 8 bits or in 4; set TUNING_MODE=lora for 8, or TUNING_BASE_DTYPE=auto for 4",
    ),
    Rule(
        ("tuning.base_dtype", "tuning.backend"),
        lambda c: c.tuning.has_float8_base and c.tuning.backend == "unsloth",
        "Unsloth trains adapters over 16 and 4 bits; set TUNING_BACKEND=bnb, or "
        "TUNING_BASE_DTYPE=auto",
    ),
    Rule(
        ("tuning.base_dtype", "tuning.lora.use_dora"),
        lambda c: c.tuning.has_float8_base and c.tuning.lora.use_dora,
        "PEFT measures the rows of 16-bit weights for DoRA; set TUNING_LORA_USE_DORA=false, or "
        "TUNING_BASE_DTYPE=auto",
    ),
    Rule(
        ("tuning.base_dtype", "tuning.lora.init_lora_weights"),
        lambda c: c.tuning.has_float8_base and c.tuning.lora.init_lora_weights == "orthogonal",
        "PEFT makes orthogonal adapters only for 16-bit weights; set "
        "TUNING_LORA_INIT_LORA_WEIGHTS=default, or TUNING_BASE_DTYPE=auto",
    ),
)
# What train.deliver_as does not go with
NOT_DELIVERED: dict[str, tuple[Callable[[Config], bool], str]] = {
    "tuning.mode": (
        lambda c: c.tuning.mode == "qlora",
        "the weights that are written are those of a base in 16 bits; set TUNING_MODE=lora",
    ),
    "tuning.base_dtype": (
        lambda c: c.tuning.has_float8_base,
        "the weights that are written are those of a base in 16 bits; set TUNING_BASE_DTYPE=auto",
    ),
    "tuning.backend": (
        lambda c: c.tuning.backend == "unsloth",
        "Unsloth multiplies by plain weights; set TUNING_BACKEND=bnb",
    ),
    "tuning.lora.use_dora": (
        lambda c: c.tuning.lora.use_dora,
        "DoRA scales the rows of a merged weight; set TUNING_LORA_USE_DORA=false",
    ),
    "tuning.lora.dropout": (
        lambda c: c.tuning.mode != "full" and c.tuning.lora.dropout > 0,
        "an adapter that is rounded with its weight has no input to drop; set "
        "TUNING_LORA_DROPOUT=0",
    ),
}


def _rule_of_delivery(name: str) -> Rule:
    holds, advice = NOT_DELIVERED[name]
    names = ("train.deliver_as", name)
    return Rule(names, lambda c: c.train.deliver_as is not None and holds(c), advice)


RULES = (
    Rule(
        ("train.bf16", "train.fp16"),
        lambda c: _computes_in_float32(c) and not backend_of(c).computes_in_float32,
        "Unsloth computes in 16 bits; set one of them to auto",
    ),
    Rule(
        ("train.warmup_steps", "train.max_steps"),
        lambda c: c.train.max_steps is not None and c.train.warmup_steps > c.train.max_steps,
        "the run would end inside its warm-up; TRAIN_WARMUP_STEPS=0.1 is a tenth of the run",
    ),
    Rule(
        ("train.warmup_steps",),
        lambda c: c.train.warmup_steps > 1 and c.train.warmup_steps != int(c.train.warmup_steps),
        "write whole steps, or a fraction of the run under 1",
    ),
    Rule(
        ("tuning.mode", "train.optim"),
        lambda c: c.train.optim == "muon" and c.tuning.mode != "full",
        "Muon is for the matrices of a model, and adapters are factors of one; set "
        "TRAIN_OPTIM=adamw_torch_fused, or TUNING_MODE=full",
    ),
    Rule(
        ("tuning.backend", "tuning.mode", "train.optim"),
        lambda c: (
            backend_of(c).has_own_kernels
            and (
                c.train.optim in schedules.UNUSUAL
                or (c.tuning.mode == "full" and c.train.optim.startswith("paged"))
            )
        ),
        "Unsloth trains with AdamW and SGD, every weight without paging; set "
        "TRAIN_OPTIM=adamw_8bit, or TUNING_BACKEND=bnb",
    ),
    Rule(
        ("model.dtype", "tuning.mode"),
        lambda c: c.model.dtype == "float16" and c.tuning.mode == "full",
        "float16 weights cannot be trained (loss scaling needs float32 weights); use float32 or "
        "bfloat16",
    ),
    Rule(
        ("tuning.lora.target_modules",),
        lambda c: c.tuning.mode != "full" and not c.tuning.lora.target_modules,
        "an adapter without targets trains nothing; use all-linear or a list such as "
        "[q_proj, v_proj]",
    ),
    Rule(
        ("model.attn_implementation", "train.bf16", "train.fp16"),
        lambda c: c.model.attn_implementation == "flash_attention_2" and _computes_in_float32(c),
        "FlashAttention computes in 16 bits; set one of them to auto, or model.attn_implementation "
        "to sdpa",
    ),
    Rule(
        ("model.attn_implementation", "tuning.backend"),
        lambda c: c.model.attn_implementation != "auto" and backend_of(c).has_own_kernels,
        "Unsloth has its own attention; set TUNING_BACKEND=bnb, or MODEL_ATTN_IMPLEMENTATION=auto",
    ),
    Rule(
        ("train.generation_max_new_tokens", "model.max_seq_len"),
        lambda c: (
            c.train.predict_with_generate
            and c.train.generation_max_new_tokens != "auto"
            and c.model.max_seq_len != "auto"
            and c.train.generation_max_new_tokens >= c.model.max_seq_len
        ),
        "no room is left for a prompt; lower train.generation_max_new_tokens or raise "
        "model.max_seq_len",
    ),
    Rule(
        ("train.load_best_model_at_end", "train.early_stopping_patience", "train.eval_strategy"),
        _needs_evaluations,
        "nothing is evaluated during training; set TRAIN_EVAL_STRATEGY=steps, or epoch",
    ),
    Rule(
        (
            "train.load_best_model_at_end",
            "train.eval_strategy",
            "train.save_strategy",
            "train.eval_steps",
            "train.save_steps",
        ),
        _saves_apart,
        "what is scored must be saved, too: set TRAIN_SAVE_STRATEGY to TRAIN_EVAL_STRATEGY, and "
        "under steps TRAIN_EVAL_STEPS to TRAIN_SAVE_STEPS or a multiple",
    ),
    *map(_rule_of_mode, sorted(LORA_OPTIONS)),
    *map(_rule_of_backend, sorted(LORA_OPTIONS - UNSLOTH.lora_options)),
    Rule(
        ("tuning.backend", "train.neftune_noise_alpha"),
        lambda c: c.train.neftune_noise_alpha is not None and not backend_of(c).has_embedding_noise,
        "this backend trains without noise on the embeddings; set TUNING_BACKEND=bnb, or "
        "TRAIN_NEFTUNE_NOISE_ALPHA=null",
    ),
    Rule(
        ("model.rope_scaling.rope_type", "model.rope_scaling.factor"),
        lambda c: (c.model.rope_scaling.rope_type is None) != (c.model.rope_scaling.factor is None),
        "a stretched rope has both, such as MODEL_ROPE_SCALING_ROPE_TYPE=yarn "
        "MODEL_ROPE_SCALING_FACTOR=4; without them it is the base's",
    ),
    *itertools.starmap(_rule_of_rope, sorted(ROPE_OPTIONS.items())),
    Rule(
        ("tuning.backend", "model.rope_scaling.rope_type"),
        lambda c: c.model.rope_scaling.rope_type and not backend_of(c).stretches_as_told,
        "Unsloth stretches a rope by itself if model.max_seq_len asks for it; set "
        "MODEL_ROPE_SCALING_ROPE_TYPE=null, or TUNING_BACKEND=bnb",
    ),
    Rule(
        ("tuning.lora.init_lora_weights", "tuning.lora.r"),
        lambda c: c.tuning.lora.init_lora_weights == "orthogonal" and c.tuning.lora.r % 2 == 1,
        "orthogonal adapters share the rank between A and B; set an even TUNING_LORA_R",
    ),
    Rule(
        ("tuning.lora.init_lora_weights", "tuning.mode"),
        lambda c: c.tuning.lora.init_lora_weights == "orthogonal" and c.tuning.mode == "qlora",
        "PEFT makes orthogonal adapters only for 16-bit weights; set "
        "TUNING_LORA_INIT_LORA_WEIGHTS=default, or TUNING_MODE=lora",
    ),
    *FLOAT8_RULES,
    *map(_rule_of_delivery, NOT_DELIVERED),
    *ENCODER_RULES,
    Rule(
        ("tuning.lora.modules_to_save", "tuning.lora.target_modules"),
        lambda c: bool(_names_of_both(c)),
        "a module is trained whole or by adapters; name it in one of them",
    ),
    Rule(
        ("tuning.lora.target_modules",),
        lambda c: (
            c.tuning.mode != "full" and bool(_last_words(c.tuning.lora.target_modules) & EMBEDDINGS)
        ),
        "adapters are for linear layers, and an embedding is not one. "
        "TUNING_LORA_MODULES_TO_SAVE=embed_tokens trains it completely, "
        "TUNING_LORA_TRAINABLE_TOKENS trains the rows of some tokens",
    ),
    Rule(
        (
            "tuning.lora.trainable_tokens",
            "model.add_tokens",
            "tuning.lora.modules_to_save",
            "tuning.lora.target_modules",
        ),
        _trains_matrix_and_rows,
        "a matrix that is trained trains all its rows; leave tuning.lora.trainable_tokens out, or, "
        "with model.add_tokens, embedding and head out of the others",
    ),
    Rule(
        ("model.add_tokens", "tuning.backend"),
        lambda c: bool(c.model.add_tokens) and backend_of(c).has_own_kernels,
        "Unsloth loads the base as it is stored; set TUNING_BACKEND=bnb",
    ),
    Rule(
        ("model.adapter", "tuning.mode"),
        lambda c: bool(c.model.adapter) and c.tuning.mode == "full",
        "every weight is trained, together with an adapter; set TUNING_MODE=lora, or merge it "
        "(make merge) and set MODEL_NAME to the merged model",
    ),
    Rule(
        ("model.adapter", "tuning.backend"),
        lambda c: bool(c.model.adapter) and backend_of(c).has_own_kernels,
        "Unsloth makes its adapters again; set TUNING_BACKEND=bnb",
    ),
)


def broken(config: Config, described: Callable[[str], str]) -> list[str]:
    """Return a sentence for every rule that the config breaks.

    `described` shows a setting with its value and origin.
    """
    found = [
        f"{', '.join(map(described, rule.names))}: {rule.advice}"
        for rule in RULES
        if rule.when(config)
    ]
    of_schedule = schedules.find_option_problems(config.train, described)
    return [*found, *of_schedule, *_metric_problems(config, described)]


def without_effect_on_strategy(
    config: Config, is_set: Callable[[str], bool], described: Callable[[str], str]
) -> list[str]:
    """Return a sentence for each number of steps that the user set and no strategy reads.

    `is_set` says whether the user chose a setting.
    """
    found = []
    for event in ("save", "eval"):
        steps, strategy = f"train.{event}_steps", f"train.{event}_strategy"
        if is_set(steps) and getattr(config.train, f"{event}_strategy") != "steps":
            found.append(
                f"{described(steps)} has no effect: {described(strategy)}; set "
                f"TRAIN_{event.upper()}_STRATEGY=steps"
            )
    return found
