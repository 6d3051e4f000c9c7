"""Every setting: name, type, unit, and what `auto` or null means. Pure: no I/O, no environment, no torch.

Help, docs/configuration.md and error messages are made from the sentences here; a setting without one fails a test.
"""

import math
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _strategy_name(value: Any) -> Any:
    """YAML and old scripts say false, off or none for "no"; transformers says "no"."""
    return "no" if value is False or value in ("off", "none", "false") else value


EventStrategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_strategy_name)]


class Section(BaseModel):
    """A section of the config: unknown keys are errors, values are checked and cannot be changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelSection(Section):
    name: str = Field(
        "data/tiny_llama",
        min_length=1,
        description="Base model: a local folder, or a hub id such as Qwen/Qwen2.5-7B-Instruct.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; null is the hub's default branch."
    )
    max_seq_len: PositiveInt = Field(
        2048,
        description="Longest training row in tokens; longer rows are handled as data.too_long says.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of the unquantised base weights; auto is the compute type for lora and qlora, float32 for full.",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention kernel; auto is sdpa where the architecture has it."
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template in place of the tokenizer's own: a Jinja file, or default for the built-in one in plain words; "
        "null is the tokenizer's, and the built-in one where it has none.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that the model's repository brings along."
    )


class LoraSection(Section):
    r: PositiveInt = Field(
        16,
        description="Rank of the adapter matrices; trainable parameters are r x (inputs + outputs) of each target.",
    )
    alpha: PositiveFloat = Field(
        32, description="Scale of the adapter: its output is multiplied by alpha / r."
    )
    dropout: Fraction = Field(0.0, description="Dropout probability on the adapter's input.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Names of the linear layers that get adapters; all-linear is every one but the output head.",
    )
    use_rslora: bool = Field(
        False, description="Scale by alpha / sqrt(r) instead of alpha / r (rank-stabilised LoRA)."
    )


class TuningSection(Section):
    mode: Literal["lora", "qlora", "full"] = Field(
        "lora",
        description="lora trains adapters, qlora trains adapters over a 4-bit base, full trains every weight.",
    )
    backend: Literal["bnb", "unsloth"] = Field(
        "bnb",
        description="bnb is transformers + PEFT + bitsandbytes and runs anywhere; unsloth needs a GPU and requirements-unsloth.txt.",
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field(
        "nf4", description="4-bit data type of a qlora base."
    )
    bnb_4bit_use_double_quant: bool = Field(
        True,
        description="Quantise the quantisation constants of a qlora base too (0.37 bit a weight less).",
    )
    allow_untrained_tokens: bool = Field(
        False,
        description="Train adapters although the rows hold added tokens whose embedding the base model never trained; it stays as it is.",
    )
    lora: LoraSection = LoraSection()


class TrainSection(Section):
    run_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        json_schema_extra={
            "write": "1 to 128 letters, digits, dots, dashes or underscores that begin with a letter or digit"
        },
        description="Name of the run's folder; null is the config's name and the time. RUN= sets it too.",
    )
    output_dir: str = Field(
        "outputs", min_length=1, description="Folder that holds the run folders."
    )
    batch_size: PositiveInt | Auto = Field(
        "auto",
        description="Rows of one micro-batch on each device; auto is chosen from a memory estimate.",
    )
    grad_accum: PositiveInt | Auto = Field(
        "auto",
        description="Micro-batches per optimizer step; auto reaches train.effective_batch_size.",
    )
    effective_batch_size: PositiveInt = Field(
        32,
        description="Rows of one optimizer step over all devices, kept while batch_size or grad_accum is auto.",
    )
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate.")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = Field("cosine", description="Course of the learning rate after the warm-up.")
    warmup_steps: NonNegativeFloat = Field(
        0.03, description="Warm-up in optimizer steps; a value under 1 is a fraction of the run."
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decoupled weight decay of AdamW; norms and biases are left out."
    )
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="Gradients are clipped to this global L2 norm; 0 does not clip."
    )
    optim: Literal[
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "sgd",
    ] = Field(
        "adamw_torch_fused",
        description="Optimizer; the 8-bit and paged ones are bitsandbytes' and need a GPU.",
    )
    adam_beta1: Fraction = Field(0.9, description="Decay of Adam's first moment.")
    adam_beta2: Fraction = Field(0.999, description="Decay of Adam's second moment.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Term added to Adam's denominator.")
    epochs: PositiveFloat = Field(
        1.0, description="Passes over the training rows; train.max_steps overrides it."
    )
    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps of the run; null is as many as train.epochs takes."
    )
    seed: NonNegativeInt = Field(
        42,
        description="Seed of adapter initialisation, dropout and, with data_seed null, the row order.",
    )
    data_seed: NonNegativeInt | None = Field(
        None, description="Seed of the row order and of a held-out split; null is train.seed."
    )
    bf16: bool | Auto = Field(
        "auto",
        description="Compute in bfloat16; auto is where the GPU supports it (capability 8.0), never on a CPU.",
    )
    fp16: bool | Auto = Field(
        "auto",
        description="Compute in float16 with loss scaling; auto is on GPUs without bfloat16. bf16 wins where both are true.",
    )
    packing: bool | Auto = Field(
        "auto",
        description="Train several rows in one sequence, apart from each other: it changes the speed alone. auto is on for models known to keep them apart.",
    )
    gradient_checkpointing: bool | Auto = Field(
        "auto",
        description="Recompute activations in the backward pass; auto does so for as few layers as the memory estimate needs, true for all.",
    )
    fast_path: bool | Auto = Field(
        "auto",
        description="Compute with fused kernels, the same in less time and memory: auto is wherever model, mode and device allow; false is plain PEFT.",
    )
    probe: bool | Auto = Field(
        "auto",
        description="Measure a step's memory before training and choose the batch by it; auto: bnb on a GPU. On a CPU, true measures and changes nothing.",
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
        None,
        description="Seconds a collective may take; null is NCCL_TIMEOUT where set, else 1800.",
    )
    dataloader_num_workers: NonNegativeInt = Field(
        0, description="Processes that collate batches ahead; 0 collates in the training process."
    )
    dataloader_pin_memory: bool | Auto = Field(
        "auto",
        description="Pin batches in page-locked memory for copies to the GPU; auto is on with a GPU.",
    )
    predict_with_generate: bool = Field(
        True, description="Let evaluations generate answers and score ROUGE-L, beside the loss."
    )
    generation_num_beams: PositiveInt = Field(
        1, description="Beams of the evaluation's generation; 1 is greedy."
    )
    generation_max_new_tokens: PositiveInt = Field(
        64, description="Longest generated answer of an evaluation, in tokens."
    )
    generation_max_rows: PositiveInt | None = Field(
        128, description="Rows that an evaluation generates for, the first of the set; null is all."
    )
    eval_strategy: EventStrategy = Field(
        "no",
        description="When to evaluate during training; before and after it happens in any case.",
    )
    eval_steps: PositiveInt = Field(
        200, description="Optimizer steps between evaluations under eval_strategy: steps."
    )
    eval_batch_size: PositiveInt | Auto = Field(
        "auto",
        description="Rows of an evaluation batch on each device; auto is train.batch_size. Scores do not depend on it.",
    )
    eval_do_concat_batches: bool = Field(
        False,
        description="Hold an evaluation's answers as one list rather than score them batch by batch; scores are equal.",
    )
    eval_accumulation_steps: PositiveInt | None = Field(
        None,
        description="Evaluation batches whose generated ids stay on the device before they move to the CPU; null moves each at once.",
    )
    logging_steps: PositiveInt = Field(10, description="Optimizer steps between two logged losses.")
    save_strategy: EventStrategy = Field(
        "epoch", description="When to write a checkpoint that a run can resume from."
    )
    save_steps: PositiveInt = Field(
        200, description="Optimizer steps between checkpoints under save_strategy: steps."
    )
    save_total_limit: PositiveInt | None = Field(
        2, description="Checkpoints that are kept, the newest; null keeps all."
    )
    resume_from: str | None = Field(
        None,
        description="Run or checkpoint folder to go on from: step, optimizer and random state; null starts anew.",
    )
    allow_backend_change: bool = Field(
        False,
        description="Resume although the checkpoint's stamp names another backend or quantisation.",
    )

    @property
    def order_seed(self) -> int:
        """Seed of the row order and of held-out rows."""
        return self.seed if self.data_seed is None else self.data_seed

    def passes(self, samples: int) -> int:
        """Return the epochs that a resolved run begins."""
        steps = math.ceil(samples / self.effective_batch_size)
        return math.ceil(self.epochs if self.max_steps is None else self.max_steps / steps)


class SourceSection(Section):
    """One of several sources of rows, where its path alone does not say it all."""

    path: str = Field(
        min_length=1, description="A data file, a folder of them, or a hub data set id."
    )
    weight: PositiveFloat | None = Field(
        None, description="Share of this source in an epoch, relative to the others' weights."
    )
    split: str = Field("train", min_length=1, description="Split of a hub data set.")
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set.")
    columns: dict[str, str] = Field({}, description="As data.columns, for this source alone.")


def _source_list(value: Any) -> Any:
    """A mapping of paths to weights is a list of sources, short."""
    return (
        [{"path": path, "weight": weight} for path, weight in value.items()]
        if isinstance(value, dict)
        else value
    )


Sources = Annotated[str | list[str | SourceSection], BeforeValidator(_source_list)]
WRITE_SOURCES = {
    "structured": True,  # the value may be a mapping, or a list of them
    "write": "a path, a list such as [a.jsonl, b.parquet], weights such as {a.jsonl: 3, b.jsonl: 1}, or a list of {path, weight, split, subset, columns}",
}


class DataSection(Section):
    train_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Training rows: a JSONL, JSON, CSV or Parquet file, a folder of them, a hub data set id, or several; under weights small ones "
        "repeat and none is cut short. null is the set that ships.",
    )
    val_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Rows to evaluate on while training; null holds out data.val_size of the training rows.",
    )
    test_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Rows for the scores before and after training; null is the validation rows.",
    )
    columns: dict[str, str] = Field(
        {},
        json_schema_extra={
            "structured": True,
            "write": "a mapping of fields to the file's columns, such as {question: problem, answer: solution}",
        },
        description="Which column holds which field of a shape, for files whose names are their own; {} recognises the shape by its keys.",
    )
    on_bad_row: Literal["fail", "quarantine"] = Field(
        "fail",
        description="What becomes of rows that cannot be read or whose answer cannot be found: fail stops the run, quarantine sets them aside in it.",
    )
    on_overlap: Literal["fail", "drop", "allow"] = Field(
        "fail",
        description="What becomes of training rows that are evaluated on, too: fail stops the run, drop trains without them, allow trains on them.",
    )
    train_on: Literal["all", "last"] = Field(
        "all",
        description="Answers of a conversation that carry loss: all of them, or the last alone.",
    )
    val_size: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.05,
        description="Fraction of the training rows that is held out where no val_path is given, at most 500 rows.",
    )
    too_long: Literal["drop", "truncate_left", "split"] = Field(
        "drop",
        description="What becomes of rows over model.max_seq_len tokens: drop leaves them out, truncate_left keeps their end, split makes several of them.",
    )
    max_lost: Fraction = Field(
        0.05,
        description="Largest fraction of trained tokens that data.too_long may lose; more stops the run with class 11.",
    )
    system_prompt: str | None = Field(
        None, description="System message put before conversations; null adds none."
    )
    system_prompt_mode: Literal["add", "replace"] = Field(
        "add",
        description="Which conversations get data.system_prompt: add those that bring no system message, replace all of them.",
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of the tokenised rows; null is .data in train.output_dir.",
    )


class Config(Section):
    """A whole config: what one run was asked for, or, in a run folder, what it does."""

    model: ModelSection = ModelSection()
    tuning: TuningSection = TuningSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()


def settings(section: type[Section] = Config, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return every leaf setting as `{"train.batch_size": FieldInfo}`, in the order of the schema."""
    leaves: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            leaves.update(settings(field.annotation, path))
        else:
            leaves[".".join(path)] = field
    return leaves


def env_name(path: str) -> str:
    """Return the variable that sets a setting: `tuning.lora.r` -> `TUNING_LORA_R`."""
    return path.replace(".", "_").upper()


def is_structured(path: str) -> bool:
    """Return whether a setting's value may be a mapping, or hold some."""
    return bool((settings()[path].json_schema_extra or {}).get("structured"))


def kinds(annotation: Any) -> set[Any]:
    """Return the types that a setting admits, members of a union one by one; a Literal counts as itself."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(kinds(argument) for argument in typing.get_args(annotation)))
    if origin is Annotated:
        return kinds(typing.get_args(annotation)[0])
    return {origin if origin is list else annotation}
