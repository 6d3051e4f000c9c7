"""One run of a program that is not ours: python -m benchmarks.speed.peer JOB.json

Each builder is what a user of that program would write. All share the samples, LoRA, AdamW and the
number of optimizer steps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.files import read_as, write_as
from benchmarks.speed.results import ArmRun
from benchmarks.speed.samples import Samples
from benchmarks.speed.workloads import (
    ARMS,
    LORA_ALPHA,
    LORA_RANK,
    SEED,
    WARM_UP,
    Arm,
    Workload,
    find_workload,
)

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedModel, Trainer

UNSLOTHS_EXPERTS = {"gate_proj", "up_proj", "down_proj"}  # its names for fused matrices of experts
REFERENCE = "reference"


@dataclass(frozen=True)
class Job:
    """What the parent process asks for."""

    arm_name: str  # or reference
    workload_name: str
    model: Path
    samples: Path
    adapters: Path
    out: Path
    steps: int  # optimizer steps in all
    rows: int  # of a micro-batch
    checkpointing: bool
    started: float  # time.time() when the process was started
    on_cpu: bool
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

    Arms at their best get the rows of a step longest first. Packing arms get no mask.
    """
    from datasets import Dataset

    samples = Samples.read(job.samples)
    size = job.workload.rows_per_step
    order = list(range(len(samples.lengths)))
    if job.arm.is_best:
        order.sort(key=lambda row: (row // size, -samples.lengths[row]))
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    if not job.arm.packs:
        columns["attention_mask"] = []
    for index in order:
        row = samples.row(index)
        columns["input_ids"].append(row.ids.tolist())
        columns["labels"].append(np.where(row.trained, row.ids, -100).tolist())
        if not job.arm.packs:
            columns["attention_mask"].append([1] * len(row.ids))
    return Dataset.from_dict(columns)


def sequences_per_step(job: Job) -> int:
    """Return the packed sequences that hold about as many tokens as a step of the other arms."""
    samples = Samples.read(job.samples)
    return max(
        1, round(job.workload.rows_per_step * samples.lengths.mean() / job.workload.max_seq_len)
    )


def trainer_settings(job: Job) -> dict[str, Any]:
    """Return the arguments that transformers, TRL and Unsloth share."""
    rows_per_step = job.workload.rows_per_step
    order = "sequential"
    if job.arm.packs:
        rows_per_step = sequences_per_step(job)
        order = "random"  # packing sorts: in its order, long rows would come first
    workers = 0
    # Unsloth's notebooks leave collating to the training process
    if job.arm.is_best and job.arm.program != "unsloth" and not job.on_cpu:
        workers = 2
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
        "logging_steps": 1 if job.is_reference else WARM_UP,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
        "use_cpu": job.on_cpu,
        "train_sampling_strategy": order,
        "dataloader_num_workers": workers,
    }


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last words of the names of all linear layers but the output head."""
    import torch

    names = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            names.add(name.rpartition(".")[2])
    return sorted(names)


def expert_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names, within a layer, of the matrices of all experts in one parameter."""
    names = set()
    for name, parameter in model.named_parameters():
        if ".experts." in name and name.endswith("_proj") and parameter.dim() == 3:
            names.add(name.partition("layers.")[2].partition(".")[2])
    return sorted(names)


def lora_config(model: PreTrainedModel) -> LoraConfig:
    """Return the adapters of every arm: on the linear layers and the experts, not on routers."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_modules=linear_names(model),
        target_parameters=expert_parameters(model) or None,
        bias="none",
    )


def load_base(job: Job) -> PreTrainedModel:
    """Return the base weights as transformers loads them, in 4 bits for qlora."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if job.workload.mode == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=job.dtype,
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if job.on_cpu else torch.device("cuda", local_rank)
    return AutoModelForCausalLM.from_pretrained(
        job.model, dtype=job.dtype, device_map={"": device}, **options
    )


def build_hf(job: Job) -> Trainer:
    """Return transformers' Trainer on a PEFT model, with Liger's kernels where the arm says so."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(SEED)
    model = load_base(job)
    if job.workload.mode == "qlora" and not job.arm.is_best:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=job.checkpointing)
    if job.workload.mode != "full":
        model = get_peft_model(model, lora_config(model))
    arguments = TrainingArguments(
        **trainer_settings(job),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=job.arm.uses_liger,
    )
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(job.model))
    return Trainer(
        model=model, args=arguments, train_dataset=make_dataset(job), data_collator=collator
    )


def build_trl(job: Job) -> Trainer:
    """Return TRL's SFTTrainer; it adds the adapters and collates by itself."""
    from transformers import AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(SEED)
    arguments = SFTConfig(
        **trainer_settings(job), max_length=job.workload.max_seq_len, packing=job.arm.packs
    )
    model = load_base(job)
    peft_config = None if job.workload.mode == "full" else lora_config(model)
    return SFTTrainer(
        model,
        arguments,
        train_dataset=make_dataset(job),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=peft_config,
    )


def build_unsloth(job: Job) -> Trainer:
    """Return Unsloth's SFTTrainer on its own model."""
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    recompute = "unsloth" if job.checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(job.model),
        max_seq_length=job.workload.max_seq_len,
        dtype=job.dtype,
        load_in_4bit=job.workload.mode == "qlora",
        full_finetuning=job.workload.mode == "full",
        use_gradient_checkpointing=recompute,
    )
    if job.workload.mode != "full":
        names = set(linear_names(model))
        if expert_parameters(model):
            names |= UNSLOTHS_EXPERTS
        model = FastLanguageModel.get_peft_model(
            model,
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules=sorted(names),
            bias="none",
            use_gradient_checkpointing=recompute,
            random_state=SEED,
        )
    arguments = SFTConfig(
        **trainer_settings(job) | {"tf32": None},
        max_length=job.workload.max_seq_len,
        packing=job.arm.packs,
    )
    collator = {} if job.arm.packs else {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=make_dataset(job),
        processing_class=tokenizer,
        **collator,
    )


BUILDERS = {"hf": build_hf, "trl": build_trl, "unsloth": build_unsloth}


def run(job: Job) -> ArmRun:
    """Train, and return what was measured."""
    if job.arm.program == "unsloth":
        import unsloth as _  # noqa: F401  it patches what is imported after it

    from benchmarks.speed import watch

    trainer = BUILDERS[job.arm.program](job)
    if job.workload.mode != "full":
        watch.share_start(trainer.model, job.adapters)
    first = min(WARM_UP, job.steps - 1)
    stopwatch = watch.attach_stopwatch(trainer, first=first, last=job.steps)
    trainer.train()
    return ArmRun("done", job.started, measured=watch.measure(trainer, stopwatch, job.started))


def failed_run(job: Job, error: Exception) -> ArmRun:
    """Return the run that ended with an error."""
    from benchmarks.speed.watch import is_out_of_memory

    text = " ".join(str(error).split())[:300]
    return ArmRun(
        status="out of memory" if is_out_of_memory(error) else "failed",
        started=job.started,
        error=f"{type(error).__name__}: {text}",
        seconds_spent=time.time() - job.started,
    )


def main() -> None:
    """Run the job; its report, also of an error, goes to the file that the job names."""
    job = read_as(Job, Path(sys.argv[1]))
    try:
        report = run(job)
    except Exception as error:  # noqa: BLE001  whatever a program dies of is its result
        traceback.print_exc()
        report = failed_run(job, error)
    if os.environ.get("RANK", "0") == "0" or report.measured is None:
        write_as(job.out, report)
    if report.measured is None and job.ranks > 1:
        sys.exit(1)  # which ends the other ranks


if __name__ == "__main__":
    main()
