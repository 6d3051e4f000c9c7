"""The section `train`: the optimizer, the batch, memory and speed, evaluation, checkpoints."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sft_play.config import metrics
from sft_play.config.schedules import OPTIMIZERS, SCHEDULES
from sft_play.config.sections.base import (
    Auto,
    Epochs,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rows,
    Section,
    Seed,
)


def _strategy_name(value: Any) -> Any:
    """Return "no" for what YAML and old scripts write in its place: false, off or none."""
    return "no" if value is False or value in ("off", "none", "false") else value


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Trackers = Annotated[list[Tracker], BeforeValidator(metrics.list_names)]
Metrics = Annotated[list[str], BeforeValidator(metrics.list_names)]
Delivered = Literal["fp8", "int4", "nvfp4"]  # formats of compressed-tensors
EventStrategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_strategy_name)]


class TrainSection(Section):
    """How a run trains, evaluates and saves."""

    run_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        json_schema_extra={
            "write": "1 to 128 letters, digits, dots, dashes or underscores that begin with a "
            "letter or digit"
        },
        description="Name of the run's folder; RUN= overrides it. null is config and time.",
    )
    output_dir: str = Field("outputs", min_length=1, description="Folder of the run folders.")
    batch_size: Rows | Auto = Field(
        "auto",
        description="Rows of one micro-batch on each device, or sequences if rows are packed. "
        "auto follows from the planned memory, the counted rows and train.probe.",
    )
    grad_accum: Rows | Auto = Field(
        "auto",
        description="Micro-batches per step before packing; auto: for train.effective_batch_size.",
    )
    effective_batch_size: Rows = Field(
        32,
        description="Rows of one optimizer step over all devices, if batch_size or grad_accum is "
        "auto; if both are set, it is batch_size x grad_accum x processes. All samples of a "
        "conversation belong to the same step.",
    )
    learning_rate: PositiveFloat | Auto = Field(
        "auto",
        description="Peak learning rate; auto follows from tuning.mode and the size of the model.",
    )
    lr_scheduler_type: Literal[*SCHEDULES] = Field(
        "cosine", description="Learning rate schedule after the warm-up, with transformers' names."
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        {},
        json_schema_extra={"structured": True, "write": "options such as {min_lr_rate: 0.1}"},
        description="Options of the schedule, with transformers' names (docs/adapters.md).",
    )
    warmup_steps: NonNegativeFloat = Field(
        0.03,
        description="Warm-up in optimizer steps; a value under 1 is a fraction of the run. The "
        "first of W steps has 1/W of the learning rate.",
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Weight decay, decoupled for AdamW; norms and biases are excluded."
    )
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="Gradients are clipped to this global L2 norm; 0 does not clip."
    )
    optim: Literal[*OPTIMIZERS] = Field(
        "adamw_torch_fused",
        description="Optimizer. The 8-bit and paged ones and lion are those of bitsandbytes; "
        "paging needs a GPU. muon is for mode full (docs/adapters.md).",
    )
    adam_beta1: Fraction = Field(0.9, description="Decay of the first moment of Adam and Lion.")
    adam_beta2: Fraction = Field(0.999, description="Decay of the second moment of Adam and Lion.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Term added to Adam's denominator.")
    neftune_noise_alpha: PositiveFloat | None = Field(
        None,
        description="NEFTune: add uniform noise of at most alpha / sqrt(tokens of the row x hidden "
        "features) to the embeddings in training; 5 is usual, null is none.",
    )
    router_aux_loss_coef: NonNegativeFloat | Auto = Field(
        "auto",
        description="Coefficient of the load-balancing loss of MoE models, logged as "
        "router_aux_loss; 0 is none. auto is the value of the model's config if its "
        "output_router_logits is true, else none.",
    )
    epochs: Epochs | Auto = Field(
        "auto",
        description="Passes over the training rows; train.max_steps overrides it. auto is 3, more "
        "for few rows, down to 1 for many.",
    )
    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps of the run; null follows from train.epochs."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="If the loss or gradient of a step is NaN or infinite: stop the run, or skip "
        "the step. It never reaches weights, optimizer state or checkpoints.",
    )
    max_skipped_steps: PositiveInt = Field(
        10, description="Steps that on_nonfinite: skip may skip before it stops the run."
    )
    on_untrained: Literal["stop", "warn"] = Field(
        "stop",
        description="If an adapter has received no gradient in the first 10 steps: stop the run "
        "and name it, or warn. Other weights always warn.",
    )
    seed: Seed = Field(
        42,
        description="Seed of dropout and of the adapters' initial values, equal on one GPU and "
        "under every strategy, and of what data_seed seeds if that is null.",
    )
    data_seed: Seed | None = Field(
        None,
        description="Seed of the row order, of held-out rows and of weighted sources; null is "
        "train.seed.",
    )
    bf16: bool | Auto = Field(
        "auto",
        description="Compute in bfloat16; auto is on if every GPU supports it (capability 8.0) "
        "and fp16 is not true, and off on a CPU. If fp16 is auto too, the DeepSpeed JSON decides "
        "if it names a precision.",
    )
    fp16: bool | Auto = Field(
        "auto",
        description="Compute in float16 with loss scaling; auto is on for GPUs without bfloat16. "
        "If both are true, bf16 is used.",
    )
    packing: bool | Auto = Field(
        "auto",
        description="Put several rows into one sequence, isolated from each other; only the speed "
        "changes. auto: on, but for a few architectures; each run checks the isolation.",
    )
    share_prefixes: bool | Auto = Field(
        "auto",
        description="Compute a beginning that samples of a row share once; only the speed changes.",
    )
    gradient_checkpointing: bool | Auto = Field(
        "auto",
        description="Recompute activations in the backward pass; true does so for all layers, "
        "auto for as few as the memory needs (backend unsloth: all or none).",
    )
    activation_offloading: bool | Auto = Field(
        "auto",
        description="Keep the inputs of recomputed layers in host memory until the backward pass, "
        "for long rows on a GPU. auto: if it does not fit otherwise; not for unsloth.",
    )
    weight_offloading: bool | Auto = Field(
        "auto",
        description="Keep frozen weights of layers in host memory, and copy each layer to the GPU "
        "before it computes (one GPU or ddp). true: all layers; auto: if it does not fit "
        "otherwise.",
    )
    context_parallel: Literal["auto", 1, 2, 4, 8] = Field(
        "auto",
        description="GPUs that share each row, for rows that do not fit on one: each computes a "
        "part of the row's tokens, and in attention all tokens of a part of the heads. auto: as "
        "few as needed.",
    )
    deliver_as: Delivered | None = Field(
        None,
        description="Train lora or full for files of 8 or 4 bits: layers compute with the weights "
        "that make export writes in this format, and scores are those of the files "
        "(docs/export.md).",
    )
    fast_path: bool | Auto = Field(
        "auto",
        description="Compute with fused kernels: the same result in less time and memory. auto is "
        "on if model, mode and device allow it; false is plain transformers and PEFT.",
    )
    profile_steps: int = Field(
        0,
        ge=0,
        description="Record this many steps, from the 6th on, with torch.profiler: "
        "profile/trace.json.gz in the run folder opens in chrome://tracing and ui.perfetto.dev.",
    )
    probe: bool | Auto = Field(
        "auto",
        description="Measure the memory of a step before training and choose batch and "
        "recomputation by it; auto is on for bnb on a GPU. On a CPU, under FSDP and DeepSpeed and "
        "on resuming it only measures.",
    )
    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp", "ep"] = Field(
        "auto",
        description="How GPUs share a run (docs/several-gpus.md): each has everything (ddp), "
        "parts (fsdp; zero1, zero2, zero3 of DeepSpeed), or a part of the experts (ep). auto: "
        "ddp, or fsdp if ddp does not fit.",
    )
    fsdp_offload: bool = Field(
        False,
        description="Under fsdp keep each rank's part of the weights in host memory, with "
        "gradients and optimizer if all weights are trained. Slower; auto is fsdp then.",
    )
    ddp_find_unused_parameters: bool = Field(
        False, description="Let DDP look for parameters without a gradient in every step (slower)."
    )
    ddp_broadcast_buffers: bool = Field(
        False,
        description="Let DDP broadcast the model's buffers from rank 0 in every forward pass.",
    )
    ddp_bucket_cap_mb: PositiveInt | None = Field(
        None, description="Size of DDP's gradient buckets in MiB; null is torch's 25."
    )
    ddp_timeout: PositiveInt | None = Field(
        None, description="Seconds a collective may take; null is NCCL_TIMEOUT if set, else 1800."
    )
    rendezvous_timeout: PositiveInt = Field(
        900,
        description="Seconds that a machine waits for the others of its run (NNODES) before its "
        "ranks start.",
    )
    hang_timeout: PositiveInt | None = Field(
        600,
        description="Seconds without a sign of life of a rank, or without a micro-batch inside a "
        "step, after which a run ends; null waits forever.",
    )
    dataloader_num_workers: NonNegativeInt | Auto = Field(
        "auto",
        description="Processes per rank that collate batches ahead. auto is up to 8 for rows with "
        "images, and 0 for text.",
    )
    dataloader_pin_memory: bool | Auto = Field(
        "auto",
        description="Put batches in pinned memory for copies to the GPU; auto is on with a GPU.",
    )
    predict_with_generate: bool = Field(
        True, description="Let evaluations also generate answers and score them by ROUGE-L."
    )
    generation_num_beams: PositiveInt = Field(
        1, description="Beams of generation, in evaluations, infer and chat; 1 is greedy."
    )
    generation_max_new_tokens: PositiveInt | Auto = Field(
        "auto",
        description="Longest generated answer in tokens, in evaluations, infer and chat. auto is "
        "1.25 times the longest answer of the scored rows, from 64 to 1024, and 2048 in infer and "
        "chat.",
    )
    generation_max_rows: PositiveInt | None = Field(
        128,
        description="Number of rows of a set for which an evaluation generates answers, the first "
        "ones; null is all.",
    )
    generation_batch_size: PositiveInt | None = Field(
        None,
        description="Answers generated at once on each device; null is as many as fit in the free "
        "memory, at most 256, in training within the planned peak. Answers differ only by "
        "rounding in 16 bits.",
    )
    metrics: Metrics = Field(
        [],
        json_schema_extra={"write": f"{metrics.WRITE}, or a list of them"},
        description="Scores of generated answers in addition to ROUGE-L (docs/using-a-run.md): "
        "rouge1, rouge2, exact_match, bleu, chrf, json_valid, json_schema:FILE, or "
        "FILE.py:FUNCTION.",
    )
    eval_strategy: EventStrategy = Field(
        "no",
        description="When to evaluate during training, on the validation rows; the test rows are "
        "always scored before and after it.",
    )
    eval_steps: PositiveInt = Field(
        200, description="Optimizer steps between evaluations under eval_strategy: steps."
    )
    eval_token_share: PositiveFloat | None = Field(
        0.1,
        le=1,
        description="Largest share of the training's tokens that all evaluations use, and each of "
        "the scores before and after training; then a random sample of at least 32 rows and 8 "
        "answers is scored; null: all rows.",
    )
    metric_for_best_model: str = Field(
        "eval_loss",
        min_length=1,
        description="Score of the validation rows that selects the best checkpoint: eval_loss, "
        "eval_rougeL, eval_ and a name of train.metrics, or eval_<name>_loss of a named source.",
    )
    load_best_model_at_end: bool = Field(
        False,
        description="Save the weights of the best checkpoint instead of the last ones, also if "
        "the run diverges later.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Evaluations in a row without a better train.metric_for_best_model after "
        "which training ends; null never ends it.",
    )
    eval_batch_size: Rows | Auto = Field(
        "auto",
        description="Rows of an evaluation batch on each device; auto is as many as fit, at most "
        "a micro-batch. Scores do not depend on it.",
    )
    eval_do_concat_batches: bool = Field(
        False,
        description="Score all answers as one list, not batch by batch; the scores are equal.",
    )
    eval_accumulation_steps: PositiveInt | None = Field(
        None,
        description="Evaluation batches whose generated ids stay on the device before they move "
        "to the CPU; null moves each at once.",
    )
    logging_steps: PositiveInt | Auto = Field(
        "auto",
        description="Optimizer steps between two logged losses; auto: 10, and fewer if a run would "
        "have less than 20 logs.",
    )
    report_to: Trackers = Field(
        ["tensorboard"],
        json_schema_extra={
            "write": "tensorboard, wandb, mlflow, trackio or none, or a list of them"
        },
        description="Where losses, scores, speed and memory go, in addition to run.json and the "
        "log. TensorBoard's files are in tb/; the others read their own variables (WANDB_*, "
        "MLFLOW_*, TRACKIO_*).",
    )
    save_strategy: EventStrategy = Field(
        "epoch", description="When to write a checkpoint that a run can resume from."
    )
    save_steps: PositiveInt = Field(
        200, description="Optimizer steps between checkpoints under save_strategy: steps."
    )
    save_total_limit: PositiveInt | None = Field(
        2, description="Number of checkpoints to keep, the newest; null keeps all."
    )
    resume_from: str | None = Field(
        None,
        description="Run or checkpoint folder to resume: its settings, step, optimizer and random "
        "state; null starts a new run.",
    )
    stop_after: PositiveFloat | None = Field(
        None,
        description="Optimizer steps, or a fraction of the run under 1, after which it stops with "
        "a checkpoint and scores; train.resume_from continues the schedule. null: no stop.",
    )
    reopen_saved: bool | Auto = Field(
        "auto",
        description="Open saved weights with plain transformers in a fresh process, and compare "
        "their scores of a few rows with the run's; auto: if memory and a tenth of the training "
        "time allow it.",
    )
    extend: bool = Field(
        False,
        description="Continue from train.resume_from with other train.epochs or train.max_steps: "
        "the schedule is that of the longer run, from its last step on.",
    )
    elastic: bool = Field(
        False,
        description="Resume with another number of processes (ELASTIC=1): every row is trained "
        "once, as before; sums round differently, and dropout draws other numbers.",
    )
    allow_backend_change: bool = Field(
        False,
        description="Resume although the checkpoint's stamp names another backend or quantization.",
    )

    @property
    def order_seed(self) -> int:
        """Seed of the row order, of held-out rows and of the mix of sources."""
        return self.seed if self.data_seed is None else self.data_seed

    def stops_after(self, total_steps: int) -> int:
        """Return the step after which a run of so many steps stops."""
        if self.stop_after is None:
            return total_steps
        wanted = self.stop_after * total_steps if self.stop_after < 1 else self.stop_after
        return min(total_steps, math.ceil(wanted))

    @property
    def loader_processes(self) -> int:
        """The number of dataloader_num_workers; 0 if rows have not said it yet."""
        return 0 if self.dataloader_num_workers == "auto" else self.dataloader_num_workers

    def passes(self, rows: int) -> int:
        """Return the number of epochs that a resolved run on `rows` begins."""
        if self.max_steps is None:
            return math.ceil(self.epochs)
        steps_per_epoch = math.ceil(rows / self.effective_batch_size)
        return math.ceil(self.max_steps / steps_per_epoch)
