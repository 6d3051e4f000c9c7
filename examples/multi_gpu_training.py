"""LoRA or QLoRA on several GPUs, with all that a script for several processes has to mind.

torchrun --nproc_per_node=2 examples/multi_gpu_training.py --config medium
accelerate launch examples/multi_gpu_training.py --config medium
python examples/multi_gpu_training.py --config medium        # one process

The main process loads the rows and gives them to the others; it prints, and saves the adapter and
results.json. Every process writes a log of its own, debug_gpu_N.log.
"""

import json
import logging
from pathlib import Path

from accelerate import Accelerator
from example_setup import Setup, read_setup
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, Trainer

from sft_play.distributed import (
    broadcast_dataset,
    choose_device_map,
    choose_dtype,
    print_main,
    print_memory_after_training,
    print_memory_before_training,
)


def main() -> None:
    """Train, and save what came of it."""
    setup = read_setup(__doc__, "multi_gpu_output")
    arguments = setup.training_arguments()  # first: they start the process group
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision)  # as the trainer's
    log = log_of_process(setup.output_dir, accelerator)
    dataset = broadcast_dataset(setup.dataset() if accelerator.is_main_process else None)
    log.info("rows=%d", len(dataset))

    model = load_model(setup)
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    print_arithmetic(trainer, accelerator.num_processes)

    before = print_memory_before_training()
    metrics = trainer.train().metrics
    print_memory_after_training(before, metrics)
    for entry in trainer.state.log_history:
        log.info("%s", entry)

    trainer.save_model(str(setup.output_dir))  # every process calls it, the main one writes
    if accelerator.is_main_process:
        setup.tokenizer().save_pretrained(setup.output_dir)
        write_results(setup.output_dir, metrics, accelerator.num_processes)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def log_of_process(output_dir: Path, accelerator: Accelerator) -> logging.Logger:
    """Return the log of this process, debug_gpu_N.log."""
    output_dir.mkdir(parents=True, exist_ok=True)
    index = accelerator.process_index  # over all machines, whose disk may be one
    log = logging.getLogger("example")
    log.setLevel(logging.INFO)
    log.addHandler(logging.FileHandler(output_dir / f"debug_gpu_{index}.log", mode="w"))
    log.info("process %d of %d on %s", index, accelerator.num_processes, accelerator.device)
    return log


def load_model(setup: Setup) -> PreTrainedModel:
    """Return the model with adapters: in 4 bits where the preset says qlora."""
    quantization = None
    if setup.config.tuning.mode == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=choose_dtype(),
        )
    model = AutoModelForCausalLM.from_pretrained(
        setup.model_name,
        dtype=choose_dtype(),
        device_map=choose_device_map(),
        quantization_config=quantization,
    )
    if quantization is not None:
        # DDP fails on reentrant checkpointing where it looks for unused parameters
        reentrant = {"use_reentrant": False}
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=reentrant)
    lora = setup.config.tuning.lora
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )


def print_arithmetic(trainer: Trainer, processes: int) -> None:
    """Print the effective batch size, which grows with the number of processes."""
    per_device = trainer.args.per_device_train_batch_size
    accumulation = trainer.args.gradient_accumulation_steps
    print_main(
        f"Effective batch size: {per_device} x {processes} x {accumulation} = "
        f"{per_device * processes * accumulation} samples per update"
    )


def write_results(output_dir: Path, metrics: dict[str, float], processes: int) -> None:
    """Write results.json."""
    results = {"num_processes": processes, **metrics}
    text = json.dumps(results, indent=2, sort_keys=True) + "\n"
    (output_dir / "results.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
