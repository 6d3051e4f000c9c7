"""TRL's SFTTrainer with fused kernels: three lines more, and the same losses.

    python examples/trl_with_kernels.py --model Qwen/Qwen3-0.6B --steps 20

Without a GPU, TRL's own loss needs TRITON_INTERPRET=1, and takes seconds a step.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import sft_kernels


def main() -> None:
    """Train adapters on sums, and print what is fused and the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="data/tiny_llama")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--without", action="store_true", help="train without the kernels")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    if not args.without:
        print(sft_kernels.fuse(model))
    rows = [{"prompt": f"{one} + 1 =", "completion": f" {one + 1}"} for one in range(64)]
    settings = SFTConfig(
        output_dir="outputs/trl_with_kernels",
        max_steps=args.steps,
        per_device_train_batch_size=args.rows,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=device == "cuda",
        use_cpu=device == "cpu",
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.train()
    for number, logged in enumerate(trainer.state.log_history[:-1], start=1):
        print(f"step {number} loss {logged['loss']:.4f}")


if __name__ == "__main__":
    main()
