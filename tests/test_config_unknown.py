"""Names that are no settings: those of other programs, of other sections, and misspelt ones."""

import pytest

from sft_play.config.schema import sections, settings
from sft_play.config.unknown import ADVICE, SAME_SETTING, suggest

# A key as another program's file or a user has it, and a part of the answer
ANSWERS = {
    # transformers' TrainingArguments and TRL's SFTConfig
    "train.per_device_train_batch_size": "here it is train.batch_size",
    "per_device_train_batch_size": "here it is train.batch_size",
    "per_device_eval_batch_size": "here it is train.eval_batch_size",
    "gradient_accumulation_steps": "here it is train.grad_accum",
    "num_train_epochs": "here it is train.epochs",
    "learning_rate": "here it is train.learning_rate",
    "model.learning_rate": "here it is train.learning_rate",
    "tuning.learning_rate": "here it is train.learning_rate",
    "lr_scheduler_type": "here it is train.lr_scheduler_type",
    "warmup_ratio": "here it is train.warmup_steps",
    "output_dir": "here it is train.output_dir",
    "max_length": "here it is model.max_seq_len",
    "max_seq_length": "here it is model.max_seq_len",
    "model_name_or_path": "here it is model.name",
    "torch_dtype": "here it is model.dtype",
    "resume_from_checkpoint": "here it is train.resume_from",
    "evaluation_strategy": "here it is train.eval_strategy",
    "packing": "here it is train.packing",
    "padding_free": "here it is train.packing",
    "use_liger_kernel": "here it is train.fast_path",
    "neftune_noise_alpha": "here it is train.neftune_noise_alpha",
    "assistant_only_loss": "answers alone carry loss here",
    "dataset_text_field": "data.columns: {text:",
    "deepspeed": "DEEPSPEED_CONFIG=",
    "fsdp": "train.strategy: fsdp",
    "torch_compile": "train.fast_path",
    "group_by_length": "train.packing",
    # PEFT's LoraConfig
    "lora_r": "here it is tuning.lora.r",
    "tuning.r": "here it is tuning.lora.r",
    "tuning.lora_alpha": "here it is tuning.lora.alpha",
    "tuning.lora.lora_dropout": "here it is tuning.lora.dropout",
    "use_dora": "here it is tuning.lora.use_dora",
    "tuning.use_dora": "here it is tuning.lora.use_dora",
    "target_modules": "here it is tuning.lora.target_modules",
    "modules_to_save": "here it is tuning.lora.modules_to_save",
    "layers_to_transform": "here it is tuning.lora.layers_to_transform",
    "loraplus_lr_ratio": "here it is tuning.lora.loraplus_lr_ratio",
    "tuning.lora.bias": "biases of adapted layers stay frozen",
    # bitsandbytes and Unsloth
    "load_in_4bit": "tuning.mode: qlora",
    "model.load_in_4bit": "tuning.mode: qlora",
    "load_in_8bit": "tuning.mode: qlora",
    "full_finetuning": "tuning.mode: full",
    "use_gradient_checkpointing": "here it is train.gradient_checkpointing",
    "random_state": "here it is train.seed",
    # Axolotl
    "base_model": "here it is model.name",
    "sequence_len": "here it is model.max_seq_len",
    "sample_packing": "here it is train.packing",
    "flash_attention": "model.attn_implementation: flash_attention_2",
    "micro_batch_size": "here it is train.batch_size",
    "num_epochs": "here it is train.epochs",
    "lr_scheduler": "here it is train.lr_scheduler_type",
    "optimizer": "here it is train.optim",
    "datasets": "here it is data.train_path",
    "val_set_size": "here it is data.val_size",
    "adapter": "tuning.mode: lora, qlora or full",
    "lora_target_linear": "tuning.lora.target_modules: all-linear",
    "train_on_inputs": "answers alone carry loss here",
    # LLaMA-Factory
    "cutoff_len": "here it is model.max_seq_len",
    "finetuning_type": "tuning.mode: lora, qlora or full",
    "lora_target": "here it is tuning.lora.target_modules",
    "quantization_bit": "tuning.mode: qlora",
    "template": "model.chat_template",
    "neat_packing": "here it is train.packing",
    "pissa_init": "there is no PiSSA",
    # sections and data
    "data.path": "here it is data.train_path",
    "data.name": "here it is data.train_path",
    "data.validation": "here it is data.val_path",
    "lora": "here it is tuning.lora",
    "training": "here it is train",
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


def answer(key: str) -> str | None:
    suggestion = suggest(key, settings(), sections())
    return None if suggestion is None else suggestion.clause()


@pytest.mark.parametrize("key", ANSWERS)
def test_a_name_of_another_program_is_answered_with_what_to_write_here(key: str) -> None:
    expected = ANSWERS[key]
    got = answer(key)
    if expected is None:
        assert got is None
    else:
        assert got is not None
        assert expected in got


def test_every_translation_leads_to_a_setting_or_a_section() -> None:
    real = {*settings(), *sections()}
    assert {name for name in SAME_SETTING.values() if name not in real} == set()


def test_a_name_has_one_translation() -> None:
    assert SAME_SETTING.keys() & ADVICE.keys() == set()


def test_a_real_setting_wins_over_a_translation() -> None:
    found = suggest("rank", ["train.rank", "tuning.lora.r"])
    assert found is not None
    assert found.name == "train.rank"
