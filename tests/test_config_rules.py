"""Every rule between settings, broken and kept."""

from pathlib import Path

import pytest

from sft_play.config.loader import load_merged
from sft_play.config.rules import RULES
from sft_play.errors import ConfigError

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")
NO_16_BITS = ["train.bf16=false", "train.fp16=false"]

# Each setting of tuning.lora that only some runs can have, set
OPTIONS = [
    "tuning.lora.experts=none",
    "tuning.lora.init_lora_weights=gaussian",
    "tuning.lora.layers_to_transform=0",
    "tuning.lora.loraplus_lr_ratio=16",
    "tuning.lora.modules_to_save=norm",
    "tuning.lora.trainable_tokens=<s>",
    "tuning.lora.use_dora=true",
]
ROPE = "model.rope_scaling.rope_type={}"
BEST = "train.load_best_model_at_end=true"
FACTOR = "model.rope_scaling.factor=2"
ENCODERS = "tuning.encoders=lora"
FLOAT8 = "tuning.base_dtype=float8"
NOT_OVER_FLOAT8 = [
    "tuning.mode=full",
    "tuning.mode=qlora",
    "tuning.backend=unsloth",
    "tuning.lora.use_dora=true",
    "tuning.lora.init_lora_weights=orthogonal",
]
NOT_DELIVERED = [
    "tuning.mode=qlora",
    "tuning.base_dtype=float8",
    "tuning.backend=unsloth",
    "tuning.lora.use_dora=true",
    "tuning.lora.dropout=0.1",
]
# Each setting of a rope, a type that has it, and one that has not
ROPE_OPTIONS = [
    ("model.rope_scaling.attention_factor=1.2", "yarn", "llama3"),
    ("model.rope_scaling.beta_fast=16", "yarn", "linear"),
    ("model.rope_scaling.beta_slow=2", "yarn", "dynamic"),
    ("model.rope_scaling.high_freq_factor=4", "llama3", "yarn"),
    ("model.rope_scaling.low_freq_factor=2", "llama3", "linear"),
    ("model.rope_scaling.original_max_position_embeddings=512", "llama3", "dynamic"),
]
# settings that break the rule, settings next to it that do not; in the order of RULES
CASES = [
    (["tuning.backend=unsloth", *NO_16_BITS], ["tuning.backend=bnb", *NO_16_BITS]),
    (
        ["train.warmup_steps=20", "train.max_steps=10"],
        ["train.warmup_steps=10", "train.max_steps=10"],
    ),
    (["train.warmup_steps=1.5"], ["train.warmup_steps=0.5"]),
    (["train.optim=muon", "tuning.mode=lora"], ["train.optim=muon", "tuning.mode=full"]),
    (
        ["tuning.backend=unsloth", "train.optim=lion_8bit"],
        ["tuning.backend=unsloth", "train.optim=paged_adamw_8bit"],
    ),
    (["model.dtype=float16", "tuning.mode=full"], ["model.dtype=float16", "tuning.mode=lora"]),
    (["tuning.lora.target_modules=[]"], ["tuning.lora.target_modules=[]", "tuning.mode=full"]),
    (
        ["model.attn_implementation=flash_attention_2", *NO_16_BITS],
        ["model.attn_implementation=flash_attention_2", "train.bf16=false"],
    ),
    (
        ["model.attn_implementation=flash_attention_2", "tuning.backend=unsloth"],
        ["model.attn_implementation=flash_attention_2", "tuning.backend=bnb"],
    ),
    (
        ["train.generation_max_new_tokens=64", "model.max_seq_len=64"],
        ["train.generation_max_new_tokens=64", "model.max_seq_len=65"],
    ),
    (
        ["train.load_best_model_at_end=true"],
        ["train.load_best_model_at_end=true", "train.eval_strategy=epoch"],
    ),
    (
        [BEST, "train.eval_strategy=steps", "train.save_strategy=steps", "train.eval_steps=150"],
        [BEST, "train.eval_strategy=steps", "train.save_strategy=steps", "train.eval_steps=400"],
    ),
    *((["tuning.mode=full", option], ["tuning.mode=qlora", option]) for option in OPTIONS),
    *(
        (["tuning.backend=unsloth", option], ["tuning.backend=bnb", option])
        for option in OPTIONS
        if "loraplus" not in option
    ),
    (
        ["tuning.backend=unsloth", "train.neftune_noise_alpha=5"],
        ["tuning.backend=bnb", "train.neftune_noise_alpha=5"],
    ),
    ([ROPE.format("yarn")], [ROPE.format("yarn"), FACTOR]),
    *(
        ([ROPE.format(other), FACTOR, option], [ROPE.format(own), FACTOR, option])
        for option, own, other in ROPE_OPTIONS
    ),
    (
        ["tuning.backend=unsloth", ROPE.format("linear"), FACTOR],
        ["tuning.backend=bnb", ROPE.format("linear"), FACTOR],
    ),
    (
        ["tuning.lora.init_lora_weights=orthogonal", "tuning.lora.r=3"],
        ["tuning.lora.init_lora_weights=orthogonal", "tuning.lora.r=4"],
    ),
    (
        ["tuning.lora.init_lora_weights=orthogonal", "tuning.mode=qlora"],
        ["tuning.lora.init_lora_weights=gaussian", "tuning.mode=qlora"],
    ),
    *(([FLOAT8, setting], [FLOAT8, "tuning.mode=lora"]) for setting in NOT_OVER_FLOAT8),
    *(
        (["train.deliver_as=int4", setting], ["train.deliver_as=fp8", "tuning.mode=lora"])
        for setting in NOT_DELIVERED
    ),
    (["tuning.encoders=full"], ["tuning.encoders=full", "tuning.mode=full"]),
    (["tuning.encoders=lora", "tuning.mode=full"], ["tuning.encoders=lora", "tuning.mode=qlora"]),
    (["tuning.encoders=lora", "tuning.backend=unsloth"], ["tuning.encoders=lora"]),
    (["tuning.encoders_learning_rate=1e-5"], ["tuning.encoders_learning_rate=1e-5", ENCODERS]),
    (
        ["tuning.lora.modules_to_save=up_proj", "tuning.lora.target_modules=q_proj,up_proj"],
        ["tuning.lora.modules_to_save=up_proj", "tuning.lora.target_modules=q_proj"],
    ),
    (
        ["tuning.lora.target_modules=q_proj,embed_tokens"],
        ["tuning.lora.modules_to_save=embed_tokens"],
    ),
    (
        ["tuning.lora.trainable_tokens=<s>", "tuning.lora.modules_to_save=embed_tokens"],
        ["tuning.lora.trainable_tokens=<s>", "tuning.lora.modules_to_save=norm"],
    ),
    (
        ["model.add_tokens=<s>", "tuning.backend=unsloth"],
        ["model.add_tokens=<s>", "tuning.mode=full"],
    ),
    (["model.adapter=a", "tuning.mode=full"], ["model.adapter=a", "tuning.mode=qlora"]),
    (["model.adapter=a", "tuning.backend=unsloth"], ["model.adapter=a", "tuning.backend=bnb"]),
]


@pytest.mark.parametrize(
    ("rule", "broken"), list(zip(RULES, [broken for broken, _ in CASES], strict=True))
)
def test_a_broken_rule_shows_values_origins_and_advice(rule, broken):
    with pytest.raises(ConfigError) as error:
        load_merged(EMPTY, None, broken)
    (line,) = str(error.value).splitlines()
    assert line.endswith(f": {rule.advice}")
    for name in rule.names:
        assert f"{name}=" in line
    assert f"(--set {rule.names[0]})" in line


@pytest.mark.parametrize("kept", [kept for _, kept in CASES])
def test_the_case_beside_it_is_allowed(kept):
    loaded = load_merged(EMPTY, None, kept)
    assert {loaded.origin[entry.partition("=")[0]] for entry in kept} == {
        f"--set {entry.partition('=')[0]}" for entry in kept
    }


def test_unsloth_has_no_paged_optimizers_for_every_weight():
    paged = ["tuning.mode=full", "train.optim=paged_adamw_8bit", "tuning.backend={}"]
    load_merged(EMPTY, None, [word.format("bnb") for word in paged])
    with pytest.raises(ConfigError, match="every weight without paging; set TRAIN_OPTIM="):
        load_merged(EMPTY, None, [word.format("unsloth") for word in paged])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.metrics=rouge1,blue"], "bleu?"),
        (["train.metrics=missing.py:score"], "missing.py"),
        (["train.metrics=setup.json:x"], "setup.json:x"),
        (["train.metrics=json_schema:none.json"], "none.json"),
        (["train.metrics=rouge1,rouge1"], "rouge1"),
        (
            ["train.metric_for_best_model=accuracy", "train.metrics=exact_match"],
            "eval_loss, eval_rougeL, eval_exact_match;",
        ),
        (
            ["train.metric_for_best_model=eval_rougeL", "train.predict_with_generate=false"],
            " eval_loss;",
        ),
    ],
)
def test_a_score_that_is_never_produced_is_refused(words, said):
    with pytest.raises(ConfigError) as error:
        load_merged(EMPTY, None, words)
    assert said in str(error.value)


def test_a_function_of_the_users_is_found_in_its_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def near(answer, expected):\n    return 1.0\n")
    words = [f"train.metrics={file}:near", "train.metric_for_best_model=near"]
    assert load_merged(EMPTY, None, words).config.train.metrics == [f"{file}:near"]
    with pytest.raises(ConfigError, match="has no function far; it has near"):
        load_merged(EMPTY, None, [f"train.metrics={file}:far"])
