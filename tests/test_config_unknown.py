"""Names that are no settings: those of other programs, of other sections, and misspelt ones."""

import pytest

from sft_play.config.schema import sections, settings
from sft_play.config.unknown import ADVICE, SAME_SETTING, suggest

# A key as another program's file or a user has it, and a part of the answer
ANSWERS = {
    # transformers' TrainingArguments and TRL's SFTConfig
    "train.per_device_train_batch_size": "here it is train.batch_size",
    "gradient_accumulation_steps": "here it is train.grad_accum",
    "tuning.learning_rate": "here it is train.learning_rate",
    "warmup_ratio": "here it is train.warmup_steps",
    "max_seq_length": "here it is model.max_seq_len",
    "assistant_only_loss": "only answers carry loss here",
    "dataset_text_field": "data.columns: {text:",
    "deepspeed": "DEEPSPEED_CONFIG=",
    "fsdp": "train.strategy: fsdp",
    # PEFT's LoraConfig
    "tuning.r": "here it is tuning.lora.r",
    "tuning.lora.lora_dropout": "here it is tuning.lora.dropout",
    "use_dora": "here it is tuning.lora.use_dora",
    "tuning.lora.bias": "biases of adapted layers stay frozen",
    # bitsandbytes and Unsloth
    "model.load_in_4bit": "tuning.mode: qlora",
    "full_finetuning": "tuning.mode: full",
    # Axolotl
    "base_model": "here it is model.name",
    "flash_attention": "model.attn_implementation: flash_attention_2",
    "datasets": "here it is data.train_path",
    # LLaMA-Factory
    "cutoff_len": "here it is model.max_seq_len",
    "finetuning_type": "tuning.mode: lora, qlora or full",
    "pissa_init": "there is no PiSSA",
    # sections and data
    "data.path": "here it is data.train_path",
    "lora": "here it is tuning.lora",
    # of an earlier version
    "train.cuda_graphs": "larger micro-batches are as fast; delete it",
    # misspelt
    "train.lerning_rate": "did you mean train.learning_rate? (a guess",
    "tuning.lora.rr": None,
    # nothing is known of them: names that are only a little alike are not offered
    "name": None,
    "path": None,
    "train.foo": None,
    "train.sparse_batch": None,
    "data.train_on_all_the_rows": None,
    "model.dropout": None,
    "quality": None,
}


@pytest.mark.parametrize(("key", "expected"), ANSWERS.items())
def test_a_name_of_another_program_is_answered_with_what_to_write_here(key, expected):
    suggestion = suggest(key, settings(), sections())
    if expected is None:
        assert suggestion is None
    else:
        assert expected in suggestion.clause()


def test_every_translation_leads_to_a_setting_or_a_section():
    real = {*settings(), *sections()}
    assert {name for name in SAME_SETTING.values() if name not in real} == set()
    assert SAME_SETTING.keys() & ADVICE.keys() == set(), "each name has one translation"


def test_a_real_setting_wins_over_a_translation():
    found = suggest("rank", ["train.rank", "tuning.lora.r"])
    assert found.name == "train.rank"
