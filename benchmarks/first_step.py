"""Seconds from a command to its first step, and from its last step to its end, beside others'.

python -m benchmarks.first_step --model /tmp/8b/model --rows data/gsm8k/train.jsonl
python -m benchmarks.first_step --model data/tiny_llama --arms ours trainer --device cpu

The same model, rows and LoRA. Each arm runs twice: first, and second on the same machine. Ours
scores the held-out rows before and after, and opens what it saved; the others train and save. Its
cache is first-step-cache in the folder of temporary files: without that a first run is one. The arm
ours-proving removes the proofs of kernels from it before each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import ROOT

CACHE = Path(tempfile.gettempdir()) / "first-step-cache"
PROVING = "ours-proving"
STEP = "step {}/"  # how an arm begins the line of a step
PEERS = {
    "trainer": """
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map=device)
model = get_peft_model(model, LoraConfig(
    task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
""",
    "unsloth": """
model, _ = FastLanguageModel.from_pretrained(name, max_seq_length=2048, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, target_modules=[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
""",
}
IMPORTS = {"unsloth": "from unsloth import FastLanguageModel\n"}
PROGRAM = """
import json, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling,
                          Trainer, TrainerCallback, TrainingArguments)
name, rows, out, steps, device = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
texts = [json.loads(line) for line in open(rows)]
samples = [tokenizer(" ".join(map(str, row.values())), truncation=True, max_length=2048)
           for row in texts]
{model}
class Says(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print(f"step {{state.global_step}}/{{steps}}", flush=True)
settings = TrainingArguments(
    out, per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=int(steps),
    learning_rate=2e-4, bf16=device == "cuda", use_cpu=device == "cpu", report_to="none",
    disable_tqdm=True, save_strategy="no")
trainer = Trainer(model, settings, train_dataset=samples, callbacks=[Says()],
                  data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer.train()
trainer.save_model(out)
"""


class Seconds(NamedTuple):
    """What one run took."""

    to_first: float  # step's end, from the command
    from_last: float  # step's end, to the end of the process
    total: float


def command(arm: str, args: argparse.Namespace, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words of an arm's command, and its variables."""
    if arm in PEERS:
        program = IMPORTS.get(arm, "") + PROGRAM.format(model=PEERS[arm])
        words = [str(args.model), str(args.rows), str(out), str(args.steps), args.device]
        return [sys.executable, "-c", program, *words], {}
    variables = {
        "MODEL_NAME": args.model,
        "MODEL_MAX_SEQ_LEN": 2048,
        "DATA_TRAIN_PATH": args.rows,
        "DATA_CACHE_DIR": CACHE,
        "TUNING_MODE": "lora",
        "TUNING_LORA_R": 16,
        "TRAIN_OUTPUT_DIR": out,
        "TRAIN_MAX_STEPS": args.steps,
        "TRAIN_EFFECTIVE_BATCH_SIZE": 32,
        "TRAIN_LOGGING_STEPS": 1,
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "DEVICE": args.device,
    }
    words = [sys.executable, "-m", "sft_play", "train", "--config", "configs/base.yaml"]
    return words, {name: str(value) for name, value in variables.items()}


def measure(arm: str, args: argparse.Namespace) -> Seconds:
    """Run an arm once. Raises: SystemExit with its last lines where it fails."""
    if arm == PROVING:
        shutil.rmtree(CACHE / "proofs", ignore_errors=True)
    with tempfile.TemporaryDirectory() as out:
        words, variables = command(arm, args, Path(out))
        began = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        first = last = began
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(STEP.format(1)):
                first = time.monotonic()
            if line.startswith(STEP.format(args.steps)):
                last = time.monotonic()
        if process.wait():
            raise SystemExit(f"{arm} ended with {process.returncode}:\n{''.join(lines[-20:])}")
        ended = time.monotonic()
    return Seconds(first - began, ended - last, ended - began)


def main() -> None:
    """Run the arms, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, default=ROOT / "data/gsm8k/train.jsonl")
    arms = ["ours", *PEERS]
    parser.add_argument("--arms", nargs="+", default=arms, choices=[*arms, PROVING])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    print(f"| {args.model} | run | first step | last step to end | total |\n|---|---|--:|--:|--:|")
    for arm in args.arms:
        for run in ("first", "second"):
            took = measure(arm, args)
            figures = " | ".join(f"{seconds:.1f}" for seconds in took)
            print(f"| {arm} | {run} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
