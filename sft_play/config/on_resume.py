"""What each setting means to a run that continues from a checkpoint. Pure.

A setting that is not given is taken from the run that is resumed, whatever its class.
"""

from enum import StrEnum

from sft_play.config.schema import settings


class OnResume(StrEnum):
    """Whether a resumed run may have another value of a setting."""

    MUST_MATCH = "must match"  # it is part of what is trained: another value is refused
    CONTENT = "its content must match"  # a path; the digest of its rows decides
    PLANNED = "planned again"  # for this machine; the steps train the same rows
    FREE = "free"  # logging, evaluation, output, speed
    OF_LAUNCH = "of one launch"  # never taken over


CONTENT = ("data.train_path", "data.val_path", "data.test_path")
OF_LAUNCH = """
    train.run_name train.resume_from train.stop_after train.extend train.elastic
    train.allow_backend_change
""".split()
# The precision that follows from bf16 and fp16 must match: the stamp has it
PLANNED = """
    train.batch_size train.grad_accum train.gradient_checkpointing train.activation_offloading
    train.eval_batch_size train.generation_max_new_tokens train.packing train.bf16 train.fp16
    train.ddp_timeout train.dataloader_pin_memory train.probe train.strategy train.fsdp_offload
    train.weight_offloading train.context_parallel train.share_prefixes
""".split()
FREE = """
    model.attn_implementation model.device_map model.trust_remote_code model.allow_pickled_weights
    tuning.allow_untrained_tokens train.output_dir train.report_to train.reopen_saved
    train.fast_path train.profile_steps train.ddp_find_unused_parameters
    train.ddp_broadcast_buffers train.ddp_bucket_cap_mb train.rendezvous_timeout train.hang_timeout
    train.dataloader_num_workers train.predict_with_generate train.generation_num_beams
    train.generation_max_rows train.generation_batch_size train.metrics
    train.metric_for_best_model train.load_best_model_at_end train.early_stopping_patience
    train.eval_token_share train.eval_strategy train.eval_steps train.eval_do_concat_batches
    train.eval_accumulation_steps train.logging_steps train.on_nonfinite train.max_skipped_steps
    train.on_untrained train.save_strategy train.save_steps train.save_total_limit data.cache_dir
    data.max_lost data.image_folder data.image_urls
""".split()
# Listed, too, so that a new setting has no class until someone has thought of one
MUST_MATCH = """
    model.name model.adapter model.revision model.max_seq_len model.rope_scaling.rope_type
    model.rope_scaling.factor model.rope_scaling.original_max_position_embeddings
    model.rope_scaling.attention_factor model.rope_scaling.beta_fast model.rope_scaling.beta_slow
    model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor model.dtype
    model.add_tokens model.chat_template model.template_kwargs model.template_date tuning.mode
    tuning.backend
    tuning.base_dtype tuning.bnb_4bit_quant_type tuning.bnb_4bit_use_double_quant tuning.lora.r
    tuning.lora.alpha tuning.lora.dropout tuning.lora.target_modules tuning.lora.experts
    tuning.lora.use_rslora tuning.lora.use_dora tuning.lora.init_lora_weights
    tuning.lora.loraplus_lr_ratio tuning.lora.layers_to_transform tuning.lora.modules_to_save
    tuning.lora.trainable_tokens tuning.encoders tuning.encoders_learning_rate
    train.effective_batch_size train.learning_rate data.order
    train.lr_scheduler_type train.lr_scheduler_kwargs train.warmup_steps train.weight_decay
    train.max_grad_norm train.optim
    train.adam_beta1 train.adam_beta2 train.adam_epsilon train.neftune_noise_alpha
    train.router_aux_loss_coef train.deliver_as train.epochs train.max_steps train.seed
    train.data_seed data.columns data.format data.on_bad_row data.on_overlap data.train_on
    data.reasoning data.special_tokens_in_text data.val_size data.split_by data.too_long
    data.system_prompt data.system_prompt_mode data.image_min_pixels data.image_max_pixels
""".split()
CLASSES = {
    **dict.fromkeys(MUST_MATCH, OnResume.MUST_MATCH),
    **dict.fromkeys(CONTENT, OnResume.CONTENT),
    **dict.fromkeys(PLANNED, OnResume.PLANNED),
    **dict.fromkeys(FREE, OnResume.FREE),
    **dict.fromkeys(OF_LAUNCH, OnResume.OF_LAUNCH),
}


def settings_of_class(kind: OnResume) -> list[str]:
    """Return the settings of a class, in the order of the schema."""
    return [path for path in settings() if CLASSES.get(path) is kind]
