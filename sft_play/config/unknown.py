"""What to write in place of a name that is no setting. Pure.

Known names are given as facts: the same name in another section, or what another program calls it
(transformers' TrainingArguments, PEFT's LoraConfig, TRL, Axolotl, LLaMA-Factory, Unsloth). A name
that is only spelled alike is offered as a guess, and only if it is very much alike.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple


def names_by_meaning(others: dict[str, str]) -> dict[str, str]:
    """Return what each of the names stands for; `others` has them with blanks between."""
    return {name: meant for meant, names in others.items() for name in names.split()}


# Names that settings had until November 2026. eval_time_budget was the share of the time that
# eval_token_share is of the tokens.
EARLIER_NAMES = {
    "towers": "tuning.encoders",
    "towers_learning_rate": "tuning.encoders_learning_rate",
    "eval_time_budget": "train.eval_token_share",
}
# A name is the last word of a dotted one, or all of it if the last word says too little.
# The setting here that takes the same value
SAME_SETTING = EARLIER_NAMES | names_by_meaning(
    {
        # model
        "model.name": """
        base_model base_model_name_or_path model_id model_name model_name_or_path model_path
        pretrained_model_name_or_path
        """,
        "model.revision": "base_model_revision model_revision",
        "model.rope_scaling.rope_type": "model.rope_scaling.type",
        "model.max_seq_len": """
        block_size context_length cutoff_len max_length max_seq_length max_sequence_length seq_len
        seq_length sequence_len sequence_length
        """,
        "model.dtype": "torch_dtype",
        "model.chat_template": "chat_template_path",
        "model.template_kwargs": "chat_template_kwargs",
        "model.device_map": "hf_device_map",
        "model.adapter": "adapter_name_or_path lora_model_dir adapter_path",
        # adapters
        "tuning.lora.alpha": "lora_alpha",
        "tuning.lora.dropout": "lora_dropout",
        "tuning.lora.r": "lora_r lora_rank rank",
        "tuning.lora.target_modules": "lora_target lora_target_modules",
        "tuning.lora.use_rslora": "peft_use_rslora rslora",
        "tuning.lora.use_dora": "peft_use_dora dora",
        "tuning.lora.loraplus_lr_ratio": "lora_plus_lr_ratio loraplus_ratio",
        "tuning.lora.layers_to_transform": "peft_layers_to_transform lora_layers_to_transform",
        "tuning.lora.modules_to_save": "additional_target lora_modules_to_save",
        "tuning.bnb_4bit_use_double_quant": (
            "bnb_4bit_use_nested_quant double_quantization use_bnb_nested_quant use_nested_quant"
        ),
        "tuning.bnb_4bit_quant_type": "quantization_type",
        # batch, optimizer, schedule
        "train.batch_size": """
        micro_batch_size per_device_batch_size per_device_train_batch_size train_batch_size
        train_micro_batch_size_per_gpu
        """,
        "train.grad_accum": """
        accumulate_grad_batches grad_accumulation grad_accumulation_steps gradient_accumulation
        gradient_accumulation_steps
        """,
        "model.add_tokens": """
        add_special_tokens additional_special_tokens new_special_tokens tokens
        """,
        "train.effective_batch_size": "global_batch_size total_batch_size",
        "train.learning_rate": "lr peak_lr",
        "train.lr_scheduler_type": "lr_scheduler scheduler scheduler_type",
        "train.lr_scheduler_kwargs": "scheduler_kwargs lr_scheduler_args",
        "train.warmup_steps": "warmup warmup_ratio num_warmup_steps",
        "train.optim": "optimizer optimizer_type",
        "train.max_grad_norm": "gradient_clipping grad_clip max_norm",
        "train.neftune_noise_alpha": "noisy_embedding_alpha neftune_alpha",
        "train.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
        "train.max_steps": "max_train_steps num_steps num_training_steps",
        "train.seed": "random_seed random_state",
        # speed and memory
        "train.gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing",
        "train.activation_offloading": "enable_activation_offloading offload_activations",
        "train.context_parallel": "context_parallel_size cp_size sequence_parallel_degree",
        "train.bf16": "bfloat16 use_bf16",
        "train.fp16": "float16 use_fp16",
        "train.packing": "neat_packing pack_sequences padding_free sample_packing",
        "train.fast_path": "enable_liger_kernel use_liger use_liger_kernel",
        "train.dataloader_num_workers": "num_workers",
        "train.fsdp_offload": "cpu_offload fsdp_cpu_offload fsdp_offload_params offload_params",
        # evaluation, checkpoints, folders
        "train.eval_batch_size": "per_device_eval_batch_size",
        "train.eval_strategy": "evaluation_strategy",
        "train.generation_max_new_tokens": "max_new_tokens",
        "train.generation_num_beams": "num_beams",
        "train.output_dir": "output_path output_directory save_dir",
        "train.run_name": "experiment_name",
        "train.resume_from": "resume_from_checkpoint",
        # data
        "data.train_path": """
        data_path dataset dataset_id dataset_name dataset_path datasets data.dataset data.file
        data.files data.name data.path data.source data.sources data.train train_data
        train_dataset train_file train_files training_data
        """,
        "data.val_path": """
        data.eval data.eval_path data.val data.valid data.validation dev_file eval_data
        eval_dataset eval_file val_data val_file validation_dataset validation_file
        """,
        "data.test_path": "data.test test_data test_datasets test_file",
        "data.val_size": "eval_split_size test_size val_set_size",
        "data.columns": "column_mapping",
        "data.cache_dir": "dataset_prepared_path",
        "data.image_folder": "image_dir image_root media_dir",
        "data.system_prompt": "data.system default_system system_message",
        # sections
        "data": "data_args data_arguments",
        "model": "model_args model_arguments",
        "tuning.lora": "lora_config peft peft_config",
        "tuning": "finetuning",
        "train": "sft sft_config trainer training training_args training_arguments",
    }
)

# What to write if no single setting takes the same value
ADVICE = names_by_meaning(
    {
        # what is trained
        "write tuning.mode: lora, qlora or full": "adapter finetuning_type method peft_type",
        "write tuning.mode: full": "full_finetuning",
        "write tuning.mode: lora for a 16-bit base": "load_in_16bit",
        "write tuning.mode: qlora for a 4-bit base": """
        load_in_4bit quantization quantization_bit quantization_config quantize qlora use_qlora
        """,
        "write tuning.base_dtype: float8 for an 8-bit base, tuning.mode: qlora for a 4-bit one": (
            "load_in_8bit"
        ),
        "it is the compute type of train.bf16 and train.fp16": "bnb_4bit_compute_dtype",
        "it is chosen with train.strategy; nothing to set": "bnb_4bit_quant_storage",
        "this program only does supervised fine-tuning; delete the line": "stage",
        "this program only trains causal language models; delete the line": "task_type",
        "write tuning.mode: lora": "use_lora",
        "write the tokens, not their ids, in tuning.lora.trainable_tokens": (
            "trainable_token_indices"
        ),
        "write tuning.mode: lora, or full without adapters": "use_peft",
        "it follows from model.add_tokens; nothing to set": "resize_vocab",
        "write tuning.backend: unsloth": "use_unsloth unsloth",
        "biases of adapted layers stay frozen": "bias",
        "there is no PiSSA, which changes the base weights; tuning.lora.init_lora_weights has "
        "default, gaussian and orthogonal": "pissa_init",
        "write tuning.lora.target_modules: all-linear": "lora_target_linear",
        "it follows from the model; nothing to set": "lora_fan_in_fan_out",
        # schedule
        "write train.lr_scheduler_type: cosine_with_min_lr and train.lr_scheduler_kwargs: "
        "{min_lr_rate: 0.1}": "cosine_min_lr_ratio min_lr min_lr_rate min_lr_ratio",
        # attention and kernels
        "write model.attn_implementation: flash_attention_2; the fused kernels "
        "(train.fast_path) need no flash-attn": """
        attn_impl flash_attn flash_attention flash_attn_2 use_flash_attention
        use_flash_attention_2 use_flash_attn
        """,
        "write model.attn_implementation: sdpa": "sdp_attention xformers_attention",
        "write model.attn_implementation: eager": "eager_attention",
        "write train.deliver_as: fp8, int4 or nvfp4": "qat quantization_aware_training",
        "there is no torch.compile here; train.fast_path has fused kernels": "torch_compile",
        "it is on wherever the GPU has it; nothing to set": "tf32",
        "train.gradient_checkpointing: true or auto is all there is": (
            "gradient_checkpointing_kwargs"
        ),
        "write train.bf16: true or train.fp16: true": "mixed_precision precision",
        "rows are padded to the longest of their micro-batch; train.packing": "pad_to_sequence_len",
        "train.packing avoids padding altogether": "group_by_length",
        "evaluations are not packed": "eval_sample_packing",
        "write train.batch_size: auto": "auto_find_batch_size",
        # machines
        "name the JSON with DEEPSPEED_CONFIG=, as in make train-deepspeed DEEPSPEED_CONFIG=...": (
            "deepspeed deepspeed_config ds_config"
        ),
        "write train.strategy: fsdp, which chooses the rest itself": "fsdp fsdp_config",
        "write NUM_GPUS= on the command line": "num_gpus",
        "the launcher sets it; delete the line": "local_rank",
        "write NUM_GPUS= and NNODES= on the command line": "world_size",
        # what a run writes
        "type make push RUN=<run> REPO=owner/name once it is done": "hub_model_id push_to_hub",
        "write train.early_stopping_patience, in evaluations": "early_stopping",
        "every run writes TensorBoard files (make tensorboard)": (
            "logging_dir tensorboard plot_loss"
        ),
        "`make train` prints the loss before and after": "compute_metrics",
        "every run has its own folder; train.run_name names it": "overwrite_output_dir",
        "write train.report_to: wandb; wandb reads its variables, such as WANDB_PROJECT": (
            "wandb_entity wandb_project wandb_run_id wandb"
        ),
        "weights are always saved as safetensors; delete the line": "save_safetensors",
        "choose with the target: make train, make eval": "do_train do_eval",
        "choose with the target: make train, make infer": "do_predict",
        "write train.eval_strategy: epoch, or steps with train.eval_steps": "evals_per_epoch",
        "write train.save_strategy: epoch, or steps with train.save_steps": "saves_per_epoch",
        # rows
        "only answers carry loss here; data.train_on chooses which": """
        assistant_only_loss completion_only_loss roles_to_train train_on_inputs train_on_prompt
        train_on_responses_only
        """,
        "write data.train_on: last": "mask_history",
        "write the folder in data.train_path": "dataset_dir data_dir",
        "give all of them in data.train_path, with weights such as {a.jsonl: 3, b.jsonl: 1}": (
            "dataset_mixer interleave_probs mix_strategy"
        ),
        "the format of rows is recognized by their keys; data.columns names other columns": (
            "data.format data.type dataset_format dataset_type"
        ),
        "write data.columns: {text: <the column>}": "dataset_text_field text_column text_field",
        "the model's chat template is used; model.chat_template names a Jinja file in its "
        "place": "template conversation_template prompt_template",
        "save them with the model's tokenizer": "special_tokens",
        "the tokenizer is that of model.name": "tokenizer tokenizer_name tokenizer_type",
        "it is read from the model's config.json; delete the line": "model_type",
        "write data.too_long: drop, truncate_left or split": "truncation",
        "the number of processes that tokenize follows from the machine; nothing to set": (
            "dataset_num_proc dataset_processes preprocessing_num_workers"
        ),
        "write data.train_path: [{path: a.jsonl, rows: 1000}]": "max_samples max_train_samples",
    }
)


# Settings of earlier versions that changed only the speed
REMOVED = {
    "cuda_graphs": "CUDA graphs were removed, because larger micro-batches are as fast; delete it "
    "and leave train.batch_size at auto"
}
# Words that mean something else in another section: they count only in their section
AMBIGUOUS = "adapter backend columns dropout mode name path split weight".split()
ALIKE = 0.8  # of difflib's ratio: a letter or two of a word


class Suggestion(NamedTuple):
    """What to write; one of `name` and `advice` is given."""

    name: str | None = None  # of a setting or a section
    advice: str | None = None  # a clause that says what to write
    is_guess: bool = False

    def clause(self, shown_name: str | None = None) -> str:
        """Return the end of the message; `shown_name` is how its origin spells the setting."""
        if self.advice is not None:
            return self.advice
        shown = shown_name or self.name
        if self.is_guess:
            return f"did you mean {shown}? (a guess from the spelling)"
        return f"here it is {shown}"


def suggest(path: str, known: Iterable[str], sections: Iterable[str] = ()) -> Suggestion | None:
    """Return what to write in place of a dotted name, None if nothing is known of it.

    In order: the same last word in another section, another program's name, the closest spelling of
    the complete name, the closest spelling of its last word.
    """
    names = [*known, *sections]
    lowered = path.lower()
    same_word = _with_same_last_word(lowered, names)
    if same_word is not None:
        return Suggestion(same_word)
    foreign = _foreign(lowered, names)
    if foreign is not None:
        return foreign
    close = _spelled_alike(lowered, names)
    return None if close is None else Suggestion(close, is_guess=True)


def _with_same_last_word(path: str, names: list[str]) -> str | None:
    section, _, word = path.rpartition(".")
    found = [name for name in names if name.rpartition(".")[2] == word]
    if word in AMBIGUOUS:
        top = section.partition(".")[0]
        found = [name for name in found if top and name.startswith(f"{top}.")]
    return found[0] if found else None


def _foreign(path: str, names: list[str]) -> Suggestion | None:
    for key in (path, path.rpartition(".")[2]):
        name = SAME_SETTING.get(key)
        if name in names:
            return Suggestion(name)
        advice = ADVICE.get(key, REMOVED.get(key))
        if advice is not None:
            return Suggestion(advice=advice)
    return None


def _spelled_alike(path: str, names: list[str]) -> str | None:
    close = difflib.get_close_matches(path, names, n=1, cutoff=ALIKE)
    word = path.rpartition(".")[2]
    # only a shared section makes complete names alike
    if close and difflib.get_close_matches(word, [close[0].rpartition(".")[2]], cutoff=ALIKE):
        return close[0]
    if word in AMBIGUOUS:
        return None
    by_last_word: dict[str, str] = {}
    for name in names:
        by_last_word.setdefault(name.rpartition(".")[2], name)
    close = difflib.get_close_matches(word, by_last_word, n=1, cutoff=ALIKE)
    return by_last_word[close[0]] if close else None
