"""One run of another program: python -m benchmarks.peer JOB.json

Each builder is what a user of that program would write. All share the rows, LoRA, AdamW and the
number of optimizer steps.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sft_kernels
from benchmarks.results import Result, read_as, write_as
from benchmarks.samples import Inputs, Samples
from benchmarks.workloads import ARMS, LORA_ALPHA, LORA_RANK, SEED, Arm, Workload, find_workload

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedModel, Trainer

LANGUAGE_LINEARS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
UNSLOTH_EXPERTS = {"gate_proj", "up_proj", "down_proj"}  # its names for fused expert matrices
REFERENCE = "reference"


@dataclass(frozen=True)
class Job:
    """What the parent process asks for."""

    arm_name: str  # or reference
    workload_name: str
    inputs: Inputs
    out: Path
    steps: int  # optimizer steps in total
    rows: int  # of a micro-batch
    checkpointing: bool
    on_cpu: bool
    started: float  # time.time()
    ranks: int = 1  # processes that train together

    @property
    def workload(self) -> Workload:
        return find_workload(self.workload_name)

    @property
    def is_reference(self) -> bool:
        return self.arm_name == REFERENCE

    @property
    def arm(self) -> Arm:
        if self.is_reference:
            return Arm(REFERENCE, "hf", "", is_best=True)
        return ARMS[self.arm_name]

    @property
    def precision(self) -> str:
        """float32, tf32 or bfloat16."""
        if self.is_reference:
            return self.workload.reference
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


def make_dataset(job: Job) -> Dataset:
    """Return rows of input_ids, labels and attention_mask in the order of the steps.

    Tuned arms get the rows of a step longest first. Arms that pack get no mask.
    """
    from datasets import Dataset

    if job.workload.with_images:
        return Dataset.from_list(read_image_rows(job))
    samples = Samples.read(job.inputs.samples)
    order = list(range(len(samples.lengths)))
    if job.arm.is_best:
        order.sort(key=lambda row: (row // job.workload.rows_per_step, -samples.lengths[row]))
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for index in order:
        ids, labelled = samples.row(index)
        columns["input_ids"].append(ids.tolist())
        columns["labels"].append(np.where(labelled, ids, -100).tolist())
        if not job.arm.packs:
            columns.setdefault("attention_mask", []).append([1] * len(ids))
    return Dataset.from_dict(columns)


def read_image_rows(job: Job) -> list[dict[str, Any]]:
    """Return the messages with their images opened: inside for Unsloth, next to for TRL."""
    from PIL import Image

    rows = []
    for line in job.inputs.rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        part = row["messages"][0]["content"][0]
        image = Image.open(job.inputs.folder / part.pop("image"))
        if job.arm.program == "unsloth-images":
            part["image"] = image
        else:
            row["images"] = [image]
        rows.append(row)
    return rows


def sft_settings(job: Job) -> dict[str, Any]:
    """Return the arguments of TRL's SFTConfig, which Unsloth uses, too."""
    if not job.workload.with_images:
        packing = {"max_length": job.workload.max_seq_len, "packing": job.arm.packs}
        return trainer_settings(job) | packing
    return trainer_settings(job) | {
        "max_length": None,
        "dataloader_num_workers": 0 if job.on_cpu else 4,
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "dataset_text_field": "",
    }


def sequences_per_step(job: Job) -> int:
    """Return how many packed sequences have about as many tokens as a step of the other arms."""
    samples = Samples.read(job.inputs.samples)
    tokens = job.workload.rows_per_step * samples.lengths.mean()
    return max(1, round(tokens / job.workload.max_seq_len))


def trainer_settings(job: Job) -> dict[str, Any]:
    """Return the arguments that transformers, TRL and Unsloth share."""
    rows_per_step = sequences_per_step(job) if job.arm.packs else job.workload.rows_per_step
    # packing sorts: without shuffling, long rows would come first
    order = "random" if job.arm.packs else "sequential"
    # Unsloth's notebooks collate in the training process
    has_workers = job.arm.is_best and job.arm.program != "unsloth" and not job.on_cpu
    return {
        "output_dir": str(job.out.parent / "run"),
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": rows_per_step // (job.rows * job.ranks),
        "max_steps": job.steps,
        "learning_rate": job.workload.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": job.precision == "bfloat16",
        "tf32": None if job.on_cpu else job.precision == "tf32",
        "gradient_checkpointing": job.checkpointing,
        "logging_steps": 1 if job.is_reference else job.workload.warm_up,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
        "use_cpu": job.on_cpu,
        "train_sampling_strategy": order,
        "dataloader_num_workers": 2 if has_workers else 0,
    }


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last part of the name of every linear layer except the LM head."""
    import torch

    names = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            names.add(name.rpartition(".")[2])
    return sorted(names)


def expert_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names, within a layer, of parameters that are the matrices of all experts."""
    names = set()
    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith("_proj") and parameter.dim() == 3:
            names.add(name.partition("layers.")[2].partition(".")[2])
    return sorted(names)


def lora_config(job: Job, model: PreTrainedModel) -> LoraConfig:
    """Return the adapters of every arm: on linear layers and experts, not on routers.

    A vision encoder gets none.
    """
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_modules=LANGUAGE_LINEARS if job.workload.with_images else linear_names(model),
        target_parameters=expert_parameters(model) or None,
        bias="none",
    )


def load_base(job: Job) -> PreTrainedModel:
    """Return the base model as transformers loads it, in 4 bits for qlora."""
    import torch
    import transformers

    options: dict[str, Any] = {}
    if job.workload.mode == "qlora":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=job.dtype,
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if job.on_cpu else torch.device("cuda", local_rank)
    auto_class = transformers.AutoModelForCausalLM
    if job.workload.with_images:
        auto_class = transformers.AutoModelForImageTextToText
    return auto_class.from_pretrained(
        job.inputs.model, dtype=job.dtype, device_map={"": device}, **options
    )


def build_hf(job: Job) -> Trainer:
    """Return transformers' Trainer on a PEFT model, with Liger's kernels if the arm uses them."""
    import transformers
    from peft import get_peft_model, prepare_model_for_kbit_training

    transformers.set_seed(SEED)
    model = load_base(job)
    if job.workload.mode == "qlora" and not job.arm.is_best:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=job.checkpointing)
    if job.workload.mode != "full":
        model = get_peft_model(model, lora_config(job, model))
    if job.arm.uses_kernels:
        print(sft_kernels.fuse(model))
    arguments = transformers.TrainingArguments(
        **trainer_settings(job),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=job.arm.uses_liger,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.inputs.model)
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=make_dataset(job), data_collator=collator
    )


def build_trl(job: Job) -> Trainer:
    """Return TRL's SFTTrainer. It adds the adapters and collates by itself."""
    from peft import get_peft_model
    from transformers import AutoProcessor, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(SEED)
    arguments = SFTConfig(**sft_settings(job), use_liger_kernel=job.arm.uses_liger)
    model = load_base(job)
    peft_config = None if job.workload.mode == "full" else lora_config(job, model)
    if job.arm.uses_kernels:
        if peft_config is not None:
            model, peft_config = get_peft_model(model, peft_config), None
        print(sft_kernels.fuse(model))
    return SFTTrainer(
        model,
        arguments,
        train_dataset=make_dataset(job),
        processing_class=AutoProcessor.from_pretrained(job.inputs.model),  # or the tokenizer
        peft_config=peft_config,
    )


def build_unsloth(job: Job) -> Trainer:
    """Return Unsloth's SFTTrainer on its own model."""
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    recompute = "unsloth" if job.checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(job.inputs.model),
        max_seq_length=job.workload.max_seq_len,
        dtype=job.dtype,
        load_in_4bit=job.workload.mode == "qlora",
        full_finetuning=job.workload.mode == "full",
        use_gradient_checkpointing=recompute,
    )
    if job.workload.mode != "full":
        experts = UNSLOTH_EXPERTS if expert_parameters(model) else ()
        model = FastLanguageModel.get_peft_model(
            model,
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules=sorted({*linear_names(model), *experts}),
            bias="none",
            use_gradient_checkpointing=recompute,
            random_state=SEED,
        )
    arguments = SFTConfig(**sft_settings(job) | {"tf32": None})
    collator = {} if job.arm.packs else {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=make_dataset(job),
        processing_class=tokenizer,
        **collator,
    )


def build_unsloth_images(job: Job) -> Trainer:
    """Return SFTTrainer with Unsloth's vision model and its collator."""
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastVisionModel
    from unsloth.trainer import UnslothVisionDataCollator

    recompute = "unsloth" if job.checkpointing else False
    model, processor = FastVisionModel.from_pretrained(
        str(job.inputs.model), load_in_4bit=False, use_gradient_checkpointing=recompute
    )
    adapters = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "lora_dropout": 0}
    model = FastVisionModel.get_peft_model(model, finetune_vision_layers=False, **adapters)
    FastVisionModel.for_training(model)
    return SFTTrainer(
        model=model,
        args=SFTConfig(**sft_settings(job) | {"tf32": None}),
        train_dataset=read_image_rows(job),
        processing_class=processor,
        data_collator=UnslothVisionDataCollator(model, processor),
    )


BUILDERS = {
    "hf": build_hf,
    "trl": build_trl,
    "unsloth": build_unsloth,
    "unsloth-images": build_unsloth_images,
}


def run(job: Job) -> Result:
    """Train, and return what was measured."""
    workload = job.workload
    if job.arm.program.startswith("unsloth"):
        import unsloth as _  # noqa: F401  it patches what is imported after it

    from benchmarks import stopwatch as watch

    trainer = BUILDERS[job.arm.program](job)
    if workload.mode != "full" and not workload.with_images:
        watch.share_start(trainer.model, job.inputs.adapters)
    first = min(workload.warm_up, job.steps - 1)
    stopwatch = watch.attach_stopwatch(trainer, first=first, last=job.steps)
    trainer.train()
    found = watch.measure(trainer, stopwatch, job.started)
    if workload.saves and not job.is_reference:
        trainer.save_model()
    figures = found["figures"]
    if workload.with_images:
        rows = (job.steps - first) * workload.rows_per_step
        figures["rows_per_second"] = rows / figures["seconds"]
    if workload.answers:  # packed steps may have other rows
        figures["tokens_per_row"] = Samples.read(job.inputs.samples).lengths.mean()
        figures["rows_per_second"] = found["tokens_per_second"] / figures["tokens_per_row"]
    return Result(workload.name, job.arm_name, **found)


def failed_run(job: Job, error: Exception) -> Result:
    """Return the result of a run that ended with an error."""
    from benchmarks.stopwatch import is_out_of_memory

    status = "out of memory" if is_out_of_memory(error) else "failed"
    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Result(job.workload_name, job.arm_name, status=status, cause=cause)


def main() -> None:
    """Run the job. Its result, also an error, goes to the file that the job names."""
    job = read_as(Job, Path(sys.argv[1]))
    try:
        result = run(job)
    except Exception as error:  # noqa: BLE001  whatever ends the program is its result
        traceback.print_exc()
        result = failed_run(job, error)
    has_failed = result.status != "done"
    if os.environ.get("RANK", "0") == "0" or has_failed:
        write_as(job.out, result)
    if has_failed and job.ranks > 1:
        sys.exit(1)  # which ends the other ranks


if __name__ == "__main__":
    main()
