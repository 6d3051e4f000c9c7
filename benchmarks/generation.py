"""Seconds to answer prompts as an evaluation does, with adapters, on the first GPU or the CPU.

A folder that is not there is made first: a model of --shape with random weights. Needs no network.

python -m benchmarks.generation --model /tmp/8b
python -m benchmarks.generation --model /tmp/8b --batch auto,8 --mode qlora --out generation.json
python -m benchmarks.generation --model data/tiny_llama --prompts 16 --tokens 16
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.inputs import random_model
from benchmarks.machine import GIB, Machine
from sft_play.plan.launch import allocator_defaults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sft_play.config.schema import Config
    from sft_play.evaluation.generate import Generator
    from sft_play.process import Process

WARM_UP = 4  # prompts and tokens before the clock: kernels are chosen and compiled


def draw_prompts(vocabulary: int, count: int, longest: int) -> list[list[int]]:
    """Return random prompts of a quarter of `longest` tokens to all of it."""
    rng = random.Random(0)
    lengths = [rng.randint(max(1, longest // 4), longest) for _ in range(count)]
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, Config, Process]:
    """Return the model as a run evaluates it: with adapters and fused kernels."""
    import torch

    from sft_play.config.schema import Config
    from sft_play.models.load import load_model
    from sft_play.process import Process

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    process = Process.alone(device, torch.bfloat16 if has_gpu else torch.float32)
    settings = {
        "model": {"name": str(args.model), "max_seq_len": args.prompt_tokens + args.tokens},
        "tuning": {"mode": args.mode},
        "train": {"generation_max_new_tokens": args.tokens},
    }
    config = Config.model_validate(settings)
    model = load_model(config, process)
    model.eval()
    model.config.use_cache = True
    return model, config, process


def measure(
    model: PreTrainedModel, generator: Generator, prompts: list[list[int]], batch: str
) -> dict[str, Any]:
    """Return seconds, speed and peak memory of answering all prompts; `batch` is auto or rows."""
    import torch

    from sft_play.evaluation.generate import batches_of, room_for

    process = generator.process
    is_gpu = process.device.type == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    room = room_for(model, process)
    limit = generator.train.generation_max_new_tokens

    def rows_at(tokens: int) -> int:
        return room.prompts(tokens, limit) if batch == "auto" else int(batch)

    batches = batches_of([len(prompt) for prompt in prompts], rows_at)
    tokens = 0
    for numbers in batches:
        parts = generator.generate_or_halve(model, [prompts[number] for number in numbers])
        for _, ids in parts:
            tokens += ids.numel()
            generator.decode(ids)
    seconds = time.perf_counter() - started
    return {
        "batch": batch,
        "largest_batch": max(map(len, batches)),
        "prompts": len(prompts),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds),
        "peak_gib": round(torch.cuda.max_memory_reserved() / GIB, 1) if is_gpu else None,
    }


def main() -> None:
    """Measure each size of batch, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder of a model")
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--mode", default="lora", choices=("lora", "qlora", "full"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--batch", default="auto", help="sizes with commas: auto or rows")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    args = parser.parse_args()
    if not args.model.is_dir():
        random_model(args.shape, args.model)

    os.environ.update(allocator_defaults(os.environ))  # as every run has them
    from sft_play.data.tokenizer import load_tokenizer
    from sft_play.evaluation.generate import Generator

    model, config, process = load(args)
    vocabulary = model.config.get_text_config().vocab_size
    # no token is the stop: random weights stop anywhere, and every answer is to have all its tokens
    generator = Generator(load_tokenizer(config), config.train, process, saved_stops=(vocabulary,))
    prompts = draw_prompts(vocabulary, args.prompts, args.prompt_tokens)
    short = config.train.model_copy(update={"generation_max_new_tokens": WARM_UP})
    Generator(generator.tokenizer, short, process).generate(model, prompts[:WARM_UP])
    machine = Machine.here(on_cpu=process.device.type == "cpu")
    results = [measure(model, generator, prompts, batch) for batch in args.batch.split(",")]
    for result in results:
        print(json.dumps(result))
    if args.out:
        facts = {"machine": vars(machine), "mode": args.mode, "results": results}
        args.out.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
