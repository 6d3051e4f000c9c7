"""One run of a program that is not ours, in a process of its own: python -m benchmarks.speed.peer JOB.json

Each builder is what a user of that program would write. Their common ground: the same samples, LoRA, AdamW and optimizer steps.
"""

import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.samples import Samples
from benchmarks.speed.workloads import ARMS, LORA_ALPHA, LORA_RANK, SEED, WARM_UP, WORKS, Arm, Work
from sft_play.runs.files import write_json

TARGETS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]  # all-linear, where names are asked for
REFERENCE = "reference"


@dataclass(frozen=True)
class Job:
    """What the parent process asks for."""

    arm_name: str  # or reference
    work_name: str
    model: Path
    samples: Path
    adapters: Path
    out: Path
    steps: int  # optimizer steps in all
    rows: int  # of a micro-batch
    checkpointing: bool
    started: float  # time.time() when the process was started
    on_cpu: bool

    @classmethod
    def read(cls, path: Path) -> "Job":
        facts = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            **facts | {name: Path(facts[name]) for name in ("model", "samples", "adapters", "out")}
        )

    @property
    def work(self) -> Work:
        return WORKS[self.work_name]

    @property
    def is_reference(self) -> bool:
        return self.arm_name == REFERENCE

    @property
    def arm(self) -> Arm:
        return Arm(REFERENCE, "hf", "", is_best=True) if self.is_reference else ARMS[self.arm_name]

    @property
    def precision(self) -> str:
        """float32, tf32 or bfloat16."""
        if self.is_reference:
            return self.work.reference
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def dtype(self) -> Any:
        import torch

        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


def dataset(job: Job) -> Any:
    """Return rows of input_ids, attention_mask and labels in the order of the steps, those of a step longest first for arms at their best."""
    from datasets import Dataset

    samples, size = Samples.read(job.samples), job.work.rows_per_step
    order = list(range(len(samples.lengths)))
    if job.arm.is_best:
        order = [
            row
            for start in range(0, len(order), size)
            for row in sorted(order[start : start + size], key=lambda row: -samples.lengths[row])
        ]
    rows = [samples.row(index) for index in order]
    columns = {
        "input_ids": [ids.tolist() for ids, _ in rows],
        "labels": [[int(i) if t else -100 for i, t in zip(*row, strict=True)] for row in rows],
    }
    if not job.arm.packs:
        columns["attention_mask"] = [[1] * len(ids) for ids, _ in rows]
    return Dataset.from_dict(columns)


def sequences_per_step(job: Job) -> int:
    """Return the packed sequences that hold about as many tokens as a step of the other arms."""
    samples = Samples.read(job.samples)
    return max(1, round(job.work.rows_per_step * samples.lengths.mean() / job.work.max_seq_len))


def settings(job: Job) -> dict[str, Any]:
    """Return the arguments that transformers, TRL and Unsloth share."""
    rows_per_step = sequences_per_step(job) if job.arm.packs else job.work.rows_per_step
    return {
        "output_dir": str(job.out.parent / "run"),
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": rows_per_step // job.rows,
        "max_steps": job.steps,
        "learning_rate": job.work.learning_rate,
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
        "train_sampling_strategy": "random"
        if job.arm.packs
        else "sequential",  # packing sorts: in its order, long rows would come first
        # Unsloth's notebooks leave collating to the training process
        "dataloader_num_workers": 2
        if job.arm.is_best and job.arm.program != "unsloth" and not job.on_cpu
        else 0,
    }


def lora() -> Any:
    """Return the adapters of every arm."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
    )


def base_model(job: Job) -> Any:
    """Return the base weights as transformers loads them, in 4 bits for qlora."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if job.work.mode == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=job.dtype,
        )
    device = torch.device("cpu") if job.on_cpu else torch.device("cuda", 0)
    return AutoModelForCausalLM.from_pretrained(
        job.model, dtype=job.dtype, attn_implementation="sdpa", device_map={"": device}, **options
    )


def hf(job: Job) -> Any:
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
    model = base_model(job)
    if job.work.mode == "qlora" and not job.arm.is_best:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=job.checkpointing)
    if job.work.mode != "full":
        model = get_peft_model(model, lora())
    arguments = TrainingArguments(
        **settings(job),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=job.arm.uses_liger,
    )
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(job.model))
    return Trainer(model=model, args=arguments, train_dataset=dataset(job), data_collator=collator)


def trl(job: Job) -> Any:
    """Return TRL's SFTTrainer; it adds the adapters and collates by itself."""
    from transformers import AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(SEED)
    arguments = SFTConfig(**settings(job), max_length=job.work.max_seq_len, packing=job.arm.packs)
    peft_config = None if job.work.mode == "full" else lora()
    return SFTTrainer(
        base_model(job),
        arguments,
        train_dataset=dataset(job),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=peft_config,
    )


def unsloth(job: Job) -> Any:
    """Return Unsloth's SFTTrainer on its own model."""
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    recompute = "unsloth" if job.checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(job.model),
        max_seq_length=job.work.max_seq_len,
        dtype=job.dtype,
        load_in_4bit=job.work.mode == "qlora",
        full_finetuning=job.work.mode == "full",
        use_gradient_checkpointing=recompute,
    )
    if job.work.mode != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules=TARGETS,
            bias="none",
            use_gradient_checkpointing=recompute,
            random_state=SEED,
        )
    arguments = SFTConfig(
        **settings(job) | {"tf32": None}, max_length=job.work.max_seq_len, packing=job.arm.packs
    )
    collator = {} if job.arm.packs else {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset(job),
        processing_class=tokenizer,
        **collator,
    )


def run(job: Job) -> dict[str, Any]:
    """Train, and return what was measured."""
    if job.arm.program == "unsloth":
        import unsloth as _  # noqa: F401  patches what is imported behind it

    from benchmarks.speed import watch

    trainer = {"hf": hf, "trl": trl, "unsloth": unsloth}[job.arm.program](job)
    if job.work.mode != "full":
        watch.start_equal(trainer.model, job.adapters)
    stopwatch = watch.watched(trainer, first=min(WARM_UP, job.steps - 1), last=job.steps)
    trainer.train()
    return {"status": "done", **watch.report(trainer, stopwatch, job.started)}


def main() -> None:
    """Run the job; its report, an error's too, goes to the file that the job names."""
    job = Job.read(Path(sys.argv[1]))
    try:
        facts = run(job)
    except Exception as error:  # noqa: BLE001  whatever a program dies of is its result, and is told with its trace
        from benchmarks.speed.watch import is_out_of_memory

        traceback.print_exc()
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        facts = {
            "status": "out of memory" if is_out_of_memory(error) else "failed",
            "error": told,
            "seconds_spent": time.time() - job.started,
        }
    write_json(job.out, facts)


if __name__ == "__main__":
    main()
