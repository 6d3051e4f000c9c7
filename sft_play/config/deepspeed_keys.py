"""The keys that DeepSpeed 0.19.8 reads, from its source. Data only.

DeepSpeed itself ignores unknown keys at the top level.
"""

# runtime/config.py and what it calls; sequence_parallel_size is read by its constructor
TOP_LEVEL_KEYS = frozenset(
    """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet communication_data_type
    comms_logger compile csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt
    disable_allgather disable_python_gc dump_state expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
    prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)

# runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS and _REMOVED_ZERO_CONFIG_KEYS
REMOVED = frozenset(
    """
    amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients
    zero_optimization.mics_hierarchical_params_gather zero_optimization.mics_shard_size
    zero_optimization.zeropp_loco_param
    """.split()
)

# runtime/zero/config.py, DeepSpeedZeroConfig: its fields and their aliases
ZERO_KEYS = frozenset(
    """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm
    contiguous_gradients cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint
    enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings max_live_parameters
    max_reuse_distance memory_efficient_linear model_persistence_threshold
    module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
    parameter_alignment param_persistence_threshold pipeline_loading_checkpoint prefetch_bucket_size
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory
    stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
    """.split()
)

# runtime/zero/offload_config.py
OFFLOAD_OPTIMIZER_KEYS = frozenset(
    """
    buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read
    pipeline_write ratio super_offload
    """.split()
)
OFFLOAD_PARAM_KEYS = frozenset(
    "buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split()
)

# runtime/precision_config.py
BF16_KEYS = frozenset(
    """
    bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled
    immediate_grad_update
    """.split()
)
FP16_KEYS = frozenset(
    """
    auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis
    initial_scale_power loss_scale loss_scale_window min_loss_scale
    """.split()
)

# runtime/constants.py
DATA_TYPES_KEYS = frozenset(
    "buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype".split()
)

# Where DeepSpeed wants true or false
SWITCHES = frozenset(
    """
    disable_allgather dump_state memory_breakdown prescale_gradients wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16.auto_cast
    fp16.consecutive_hysteresis
    zero_optimization.allgather_partitions zero_optimization.contiguous_gradients
    zero_optimization.elastic_checkpoint zero_optimization.ignore_unused_parameters
    zero_optimization.load_from_fp32_weights zero_optimization.overlap_comm
    zero_optimization.reduce_scatter zero_optimization.round_robin_gradients
    zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_weights
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_param.pin_memory
    """.split()
)
# Where it wants a whole number, and the smallest that it takes
FROM_ONE = """
    steps_per_print zero_optimization.reduce_bucket_size train_batch_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps
""".split()
FROM_ZERO = """
    fp16.hysteresis fp16.initial_scale_power fp16.loss_scale_window
    zero_optimization.allgather_bucket_size zero_optimization.max_live_parameters
    zero_optimization.max_reuse_distance zero_optimization.model_persistence_threshold
    zero_optimization.param_persistence_threshold zero_optimization.prefetch_bucket_size
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_model_persistence_threshold
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.sub_group_size
    zero_optimization.zero_hpz_partition_size
""".split()
WHOLE_NUMBERS = {**dict.fromkeys(FROM_ONE, 1), **dict.fromkeys(FROM_ZERO, 0)}

# Where null is DeepSpeed's own default
NULLABLE = frozenset({"steps_per_print", "zero_optimization.overlap_comm"})

# The objects whose keys are checked, outer ones first.
SECTIONS = {
    "": TOP_LEVEL_KEYS,
    "zero_optimization": ZERO_KEYS,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER_KEYS,
    "zero_optimization.offload_param": OFFLOAD_PARAM_KEYS,
    "bf16": BF16_KEYS,
    "bfloat16": BF16_KEYS,
    "data_types": DATA_TYPES_KEYS,
    "fp16": FP16_KEYS,
}

_OWN_ORDER = "the order of rows is the run's; delete it"
_OTHER_PARALLELISM = "runs here split data, not {}, so batch sizes would not add up; delete it"
# DeepSpeed's features that would silently change what the config or the plan says: what to do.
REFUSED = {
    "optimizer": "the optimizer is the config's: delete it and set train.optim, "
    "train.learning_rate and train.weight_decay",
    "scheduler": "the schedule is the config's: delete it and set train.lr_scheduler_type and "
    "train.warmup_steps",
    "torch_autocast": "the precision is the config's: delete it and set train.bf16 or train.fp16",
    "dataloader_drop_last": _OWN_ORDER,
    "data_efficiency": _OWN_ORDER,
    "tensor_parallel": _OTHER_PARALLELISM.format("layers"),
    "sequence_parallel_size": "delete it and set train.context_parallel, which shares rows",
    "expert_parallel": _OTHER_PARALLELISM.format("experts"),
    "pipeline": _OTHER_PARALLELISM.format("layers"),
    "autotuning": "the plan chooses the batch (make plan); delete it",
}

# Keys whose "auto" is DeepSpeed's own word for a default; it stays.
OWN_AUTO = frozenset({"data_types.keep_in_fp32_modules"})
