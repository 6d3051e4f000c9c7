"""Rows of one image and 300 tokens: LoRA by this project, by TRL and by Unsloth, in one sitting.

Models have random weights of the real shape. The images are noise of 768 by 768 pixels.

python -m benchmarks.images --shapes Qwen/Qwen3-VL-8B-Instruct google/gemma-3-12b-it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.inputs import CORPUS, TINY, model_settings
from benchmarks.machine import GIB, ROOT
from sft_play.runs import metrics

PIXELS = 768  # of a side
WORDS = 285  # of a row: some 300 tokens of the tiny tokenizer
ROWS_PER_STEP = 16
WARM_STEPS = 4
QUALITY = 90  # of the JPEG files
SPEED = "tokens_per_second"
RECOMPUTING = "-recomputing"  # its layers, as it does by default
ARMS = ("ours", "trl", "trl-recomputing", "unsloth", "unsloth-recomputing")
QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
GEMMA = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_id": "<image_soft_token>",
}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_SIZES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, **HALVES}
# Of a model type: fields of its config with the tokens they name, what its template writes for an
# image, names that its tokenizer has, and the files of its processor
TYPES = {
    "qwen3_vl": (
        QWEN,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {},
        {
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "processor_class": "Qwen3VLProcessor",
                "size": {"longest_edge": 16777216, "shortest_edge": 65536},
                **QWEN_SIZES,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen3VLVideoProcessor",
                "processor_class": "Qwen3VLProcessor",
                "size": {"longest_edge": 25165824, "shortest_edge": 4096},
                **QWEN_SIZES,
            },
        },
    ),
    "gemma3": (
        GEMMA,
        "<start_of_image>",
        dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA.values(), strict=True)),
        {
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "size": {"height": 896, "width": 896},
                "resample": 2,
                **HALVES,
            },
            "processor_config.json": {"processor_class": "Gemma3Processor"},
        },
    ),
}
TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}{%% if message['role'] == 'assistant' %%}<|end|>{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)


def write_model(shape: str, folder: Path) -> None:
    """Save a model with random bfloat16 weights, its tokenizer and its processor's files."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from sft_play.models.architecture import auto_class_of

    settings = model_settings(shape, as_published=True)
    fields, written, names, files = TYPES[settings["model_type"]]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(fields.values())})
    tokenizer._set_model_specific_special_tokens(names)
    tokenizer.chat_template = TEMPLATE % written
    settings["text_config"] |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    settings |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in fields.items()}
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto_class_of(config).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    tokenizer.save_pretrained(folder)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2), encoding="utf-8")


def write_rows(folder: Path, rows: int) -> None:
    """Write images, and rows that ask about one each."""
    import numpy as np
    from PIL import Image

    rng = random.Random(0)
    words = [word for word in CORPUS.read_text(encoding="utf-8").split() if word.isalpha()]
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(rows):
            pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize((PIXELS, PIXELS))
            picture.save(folder / f"{number}.jpg", quality=QUALITY)
            asked = f"What is in picture {number}? {' '.join(rng.choices(words, k=WORDS // 3))}"
            answer = " ".join(rng.choices(words, k=2 * WORDS // 3))
            content = [{"type": "image", "image": f"{number}.jpg"}, {"type": "text", "text": asked}]
            turns = [("user", content), ("assistant", [{"type": "text", "text": answer}])]
            messages = [{"role": role, "content": said} for role, said in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def train_ours(folder: Path, steps: int) -> dict[str, object]:
    """Train with `make train`; return samples a second, GiB measured and planned, and losses."""
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": "run",
        "MODEL_NAME": folder / "model",
        "TUNING_MODE": "lora",
        "DATA_TRAIN_PATH": folder / "rows.jsonl",
        "TRAIN_OUTPUT_DIR": folder,
        "TRAIN_EFFECTIVE_BATCH_SIZE": ROWS_PER_STEP,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": 2e-4,
        "TRAIN_LOGGING_STEPS": 1,
        "TRAIN_EVAL_STRATEGY": "no",
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "PY": sys.executable,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    with (folder / "ours.log").open("wb") as log:
        code = subprocess.call(["make", "train-bnb", *words], cwd=ROOT, stdout=log, stderr=log)
    if code:
        return {"failed": (folder / "ours.log").read_text()[-1500:]}
    report = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    lines = metrics.read(folder / "run" / "metrics.jsonl").lines
    speeds = [line.values[SPEED] for line in lines if SPEED in line.values]
    losses = [line.values["loss"] for line in lines if "loss" in line.values]
    rows = report["data"]["train"]
    peaks = report["peak_bytes"]
    return {
        "samples_per_second": statistics.median(speeds[WARM_STEPS:])
        / (rows["tokens"] / rows["samples"]),
        "gib": peaks["measured"] / GIB,
        "planned_gib": peaks["predicted"] / GIB,
        "loss": [losses[0], losses[-1]],
    }


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows with their images opened, as Unsloth's collator takes them."""
    from PIL import Image

    rows = []
    for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for part in row["messages"][0]["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(folder / part["image"])
        rows.append(row)
    return rows


def unsloth_options(folder: Path, checkpoints: bool) -> dict[str, Any]:
    """Return Unsloth's model, its collator and the rows for it, as options of SFTTrainer."""
    from unsloth import FastVisionModel
    from unsloth.trainer import UnslothVisionDataCollator

    how = "unsloth" if checkpoints else False
    model, processor = FastVisionModel.from_pretrained(
        str(folder / "model"), load_in_4bit=False, use_gradient_checkpointing=how
    )
    model = FastVisionModel.get_peft_model(
        model, finetune_vision_layers=False, r=16, lora_alpha=32, lora_dropout=0
    )
    FastVisionModel.for_training(model)
    return {
        "model": model,
        "processing_class": processor,
        "train_dataset": read_rows(folder),
        "data_collator": UnslothVisionDataCollator(model, processor),
    }


def trl_options(folder: Path) -> dict[str, Any]:
    """Return transformers' model, LoRA of its language layers and the rows, for SFTTrainer."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype=torch.bfloat16, device_map={"": 0}
    )
    rows = [
        {"images": [row["messages"][0]["content"][0].pop("image")], "messages": row["messages"]}
        for row in read_rows(folder)
    ]
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    return {
        "model": model,
        "processing_class": AutoProcessor.from_pretrained(folder / "model"),
        "train_dataset": Dataset.from_list(rows),
        "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules=targets),
    }


def train_peer(arm: str, folder: Path, steps: int, batch: int) -> None:
    """Train with TRL, or Unsloth's model and collator under it; print the same facts as JSON."""
    checkpoints = arm.endswith(RECOMPUTING)
    # first: Unsloth is imported before what it patches
    options = unsloth_options(folder, checkpoints) if "unsloth" in arm else trl_options(folder)
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            torch.cuda.synchronize()
            stamps.append(time.perf_counter())

    arguments = SFTConfig(
        output_dir=str(folder / arm),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=ROWS_PER_STEP // batch,
        learning_rate=2e-4,
        logging_steps=1,
        bf16=True,
        gradient_checkpointing=checkpoints,
        max_length=None,
        dataloader_num_workers=4,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataset_text_field="",
    )
    trainer = SFTTrainer(args=arguments, callbacks=[Clock()], **options)
    trainer.train()
    took = [later - now for now, later in itertools.pairwise(stamps)][WARM_STEPS:]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    facts = {
        "samples_per_second": ROWS_PER_STEP / statistics.median(took),
        "gib": torch.cuda.max_memory_reserved() / GIB,
        "loss": [losses[0], losses[-1]],
    }
    print("FACTS " + json.dumps(facts))


def run_peer(arm: str, folder: Path, steps: int, batch: int, seconds: float) -> dict[str, object]:
    """Train a peer in a process of its own; return its facts, or the end of what it said."""
    words = ["--peer", arm, "--folder", str(folder), "--steps", str(steps), "--batch", str(batch)]
    command = [sys.executable, "-m", "benchmarks.images", *words]
    log = folder / f"{arm}.log"
    with log.open("wb") as file:
        try:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"not ready in {seconds:g} s"}
    said = log.read_text(errors="replace")
    for line in said.splitlines():
        if line.startswith("FACTS "):
            return json.loads(line.removeprefix("FACTS "))
    return {"failed": said[-1500:]}


def shown(facts: dict[str, object]) -> str:
    """Return facts as a line, with numbers of three digits."""
    return json.dumps(
        {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in facts.items()
        }
    )


def main() -> None:
    """Train each model by each arm; print a line of facts for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["Qwen/Qwen3-VL-8B-Instruct"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS[:-1]), choices=ARMS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="of a peer, in rows")
    parser.add_argument("--seconds", type=float, default=240, help="that a peer may take")
    parser.add_argument("--peer", choices=ARMS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="keep models and logs here")
    args = parser.parse_args()
    if args.peer:
        train_peer(args.peer, args.folder, args.steps, args.batch)
        return
    if args.write:
        write_model(args.write, args.folder / "model")
        return
    with tempfile.TemporaryDirectory() as name:
        for shape in args.shapes:
            folder = (args.folder or Path(name)) / shape.replace("/", "-")
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "model").is_dir():
                words = ["--write", shape, "--folder", str(folder)]
                command = [sys.executable, "-m", "benchmarks.images", *words]
                subprocess.run(command, cwd=ROOT, check=True, env=dict(os.environ))
                write_rows(folder, (args.steps + 4) * ROWS_PER_STEP)
            for arm in args.arms:
                if arm == "ours":
                    facts = train_ours(folder, args.steps)
                else:
                    facts = run_peer(arm, folder, args.steps, args.batch, args.seconds)
                print(shape, arm, shown(facts), flush=True)


if __name__ == "__main__":
    main()
