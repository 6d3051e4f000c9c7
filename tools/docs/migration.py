"""docs/evidence/coming-from.md: what the settings of other programs are called here. No torch.

The table side by side is written here; `test_docs_pages` holds each name in it against what the
program answers when somebody types that name.
"""

from __future__ import annotations

from sft_play.config.schema import settings
from sft_play.config.unknown import ADVICE, SAME_SETTING
from tools.docs.tables import table

PROGRAMS = ("Axolotl", "LLaMA-Factory", "TRL and PEFT", "Unsloth")
# The setting here, then its name in each of PROGRAMS; "" where there is none or it is another thing
SIDE_BY_SIDE: tuple[tuple[str, ...], ...] = (
    ("model.name", "base_model", "model_name_or_path", "model_name_or_path", "model_name"),
    ("model.max_seq_len", "sequence_len", "cutoff_len", "max_length", "max_seq_length"),
    ("tuning.mode", "adapter", "finetuning_type", "use_peft", "full_finetuning"),
    ("tuning.mode: qlora", "load_in_4bit", "quantization_bit", "load_in_4bit", "load_in_4bit"),
    ("tuning.lora.r", "lora_r", "lora_rank", "lora_r", "r"),
    ("tuning.lora.alpha", "lora_alpha", "lora_alpha", "lora_alpha", "lora_alpha"),
    ("tuning.lora.dropout", "lora_dropout", "lora_dropout", "lora_dropout", "lora_dropout"),
    (
        "tuning.lora.target_modules",
        "lora_target_modules",
        "lora_target",
        "lora_target_modules",
        "target_modules",
    ),
    ("tuning.lora.modules_to_save", "lora_modules_to_save", "additional_target", "", ""),
    ("tuning.lora.use_rslora", "peft_use_rslora", "use_rslora", "use_rslora", "use_rslora"),
    ("tuning.lora.use_dora", "peft_use_dora", "use_dora", "use_dora", "use_dora"),
    ("data.train_path", "datasets", "dataset", "dataset_name", "train_dataset"),
    ("data.val_size", "val_set_size", "val_size", "", ""),
    ("data.columns", "", "", "dataset_text_field", "dataset_text_field"),
    ("data.train_on", "train_on_inputs", "mask_history", "assistant_only_loss", ""),
    ("train.packing", "sample_packing", "neat_packing", "packing", "packing"),
    (
        "train.batch_size",
        "micro_batch_size",
        "per_device_train_batch_size",
        "per_device_train_batch_size",
        "per_device_train_batch_size",
    ),
    (
        "train.grad_accum",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
    ),
    ("train.epochs", "num_epochs", "num_train_epochs", "num_train_epochs", "num_train_epochs"),
    ("train.max_steps", "max_steps", "max_steps", "max_steps", "max_steps"),
    ("train.learning_rate", "learning_rate", "learning_rate", "learning_rate", "learning_rate"),
    (
        "train.lr_scheduler_type",
        "lr_scheduler",
        "lr_scheduler_type",
        "lr_scheduler_type",
        "lr_scheduler_type",
    ),
    ("train.warmup_steps", "warmup_steps", "warmup_steps", "warmup_steps", "warmup_steps"),
    ("train.optim", "optimizer", "optim", "optim", "optim"),
    ("train.max_grad_norm", "max_grad_norm", "max_grad_norm", "max_grad_norm", "max_grad_norm"),
    (
        "train.gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
        "use_gradient_checkpointing",
    ),
    ("train.seed", "seed", "seed", "seed", "random_state"),
    ("train.output_dir", "output_dir", "output_dir", "output_dir", "output_dir"),
    (
        "train.resume_from",
        "resume_from_checkpoint",
        "resume_from_checkpoint",
        "resume_from_checkpoint",
        "resume_from_checkpoint",
    ),
    ("train.strategy: fsdp", "fsdp", "fsdp", "fsdp", ""),
    ("make train-deepspeed", "deepspeed", "deepspeed", "deepspeed", ""),
)


def markdown() -> str:
    """Return the table side by side, then every name that is known, with what to write."""
    rows = [[f"`{name}`" if name else "" for name in names] for names in SIDE_BY_SIDE]
    known = {name: f"`{setting}`" for name, setting in SAME_SETTING.items()} | ADVICE
    every = [(f"`{name}`", answer) for name, answer in sorted(known.items())]
    return (
        f"## Side by side\n\n{table(('Here', *PROGRAMS), rows)}\n"
        f"## Every name that is known\n\n{table(('A name elsewhere', 'Here'), every)}"
    )


def settings_named() -> set[str]:
    """Return the settings of the table side by side, without their values."""
    named = {here.partition(":")[0] for here, *_ in SIDE_BY_SIDE}
    return {name for name in named if name in settings()}
