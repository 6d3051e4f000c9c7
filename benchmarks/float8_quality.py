"""What a float8 base costs in quality, beside a 4-bit one: KL at start, loss curves, final scores.

Bases are float8, NF4 and the model's own weights. KL is that of the base's probabilities for the
trained tokens of held-out rows. The curves are those of LoRA runs by `make train`'s own command,
equal in all but the base. Products are in float32 on a CPU, in bfloat16 on a GPU.

python -m benchmarks.float8_quality --out benchmarks/results/float8-quality-tiny_llama.json
python -m benchmarks.float8_quality --steps 150 --seeds 3
python -m benchmarks.float8_quality --model FOLDER --rows data/gsm8k --kl-rows 64 --steps 0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from sft_play.data.store import Sample

BASES = {
    "own": ("tuning.mode=lora", "tuning.base_dtype=auto"),
    "float8": ("tuning.mode=lora", "tuning.base_dtype=float8"),
    "nf4": ("tuning.mode=qlora", "tuning.base_dtype=auto"),
}
CURVE_POINTS = 20
MAX_KL_SHARE = 0.2  # of NF4's: what a float8 base is held to


def settings_of(args: argparse.Namespace, base: str) -> list[str]:
    """Return the settings of a run over a base."""
    return [
        f"model.name={args.model}",
        f"model.max_seq_len={args.length}",
        *(f"data.{part}_path={args.rows / part}.jsonl" for part in ("train", "val", "test")),
        *BASES[base],
    ]


def held_out(args: argparse.Namespace) -> list[Sample]:
    """Return the first samples of the test rows, as a run prepares them."""
    from sft_play.config.loader import load
    from sft_play.data.pipeline import build_run_data
    from sft_play.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as cache:
        words = [*settings_of(args, "own"), f"data.cache_dir={cache}"]
        config = load(None, None, words).config
        split = build_run_data(config, load_tokenizer(config)).test
        return [split[index] for index in range(min(args.kl_rows, len(split)))]


def base_model(args: argparse.Namespace, base: str) -> PreTrainedModel:
    """Return a base as a run evaluates it."""
    import torch

    from sft_play.config.loader import load
    from sft_play.models.load import load_base
    from sft_play.process import Process

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    process = Process.alone(device, torch.bfloat16 if has_gpu else torch.float32)
    return load_base(load(None, None, settings_of(args, base)).config, process).eval()


def log_probabilities(model: PreTrainedModel, samples: list[Sample]) -> Iterator[Tensor]:
    """Yield the log probabilities (labels, V) for the trained tokens of each sample."""
    import torch

    from sft_play.data.render import IGNORE_INDEX

    for sample in samples:
        ids = torch.tensor(sample.ids[None], device=model.device)
        trained = torch.tensor(sample.labels != IGNORE_INDEX).nonzero()[:, 0]
        logits = model(input_ids=ids, use_cache=False).logits[0, trained - 1]
        yield logits.float().log_softmax(-1)


def divergences(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the mean KL of each base to the own weights, nats a token, and the agreement."""
    import torch

    samples = held_out(args)
    own = base_model(args, "own")
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for base in ("float8", "nf4"):
            other = base_model(args, base)
            kl, agreed, count = 0.0, 0, 0
            pairs = zip(
                log_probabilities(own, samples), log_probabilities(other, samples), strict=True
            )
            for right, left in pairs:
                kl += float((right.exp() * (right - left)).sum())
                agreed += int((right.argmax(-1) == left.argmax(-1)).sum())
                count += len(right)
            found[base] = {"kl": kl / count, "top1_agreement": agreed / count, "tokens": count}
    return found


def train(args: argparse.Namespace, base: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train over a base; return its loss curve and scores."""
    settings = [
        *settings_of(args, base),
        f"train.max_steps={args.steps}",
        f"train.batch_size={args.batch}",
        f"train.effective_batch_size={args.batch}",
        f"train.learning_rate={args.rate}",
        f"train.seed={seed}",
        f"train.output_dir={folder}",
        f"train.run_name={base}-{seed}",
        f"train.logging_steps={max(1, args.steps // CURVE_POINTS)}",
        "train.predict_with_generate=false",
        "train.reopen_saved=false",
        "train.save_strategy=no",
    ]
    words = [sys.executable, "-m", "sft_play", "train"]
    for setting in settings:
        words += ["--set", setting]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((folder / f"{base}-{seed}" / "run.json").read_text(encoding="utf-8"))
    return {
        "base": base,
        "seed": seed,
        "loss": [[entry["step"], entry["loss"]] for entry in report["loss"]],
        "before": report["metrics"]["before"]["eval_loss"],
        "after": report["metrics"]["after"]["eval_loss"],
    }


def curves(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs over every base and seed; each is printed as it ends."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds if args.steps else 0):
            for base in BASES:
                run = train(args, base, seed, Path(folder))
                print(f"{base} seed {seed}: held-out loss {run['after']:.4f}", file=sys.stderr)
                runs.append(run)
    return runs


def table(result: dict[str, Any]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = [
        "| base | KL at start | share of NF4's | same most likely token | training loss | "
        "held-out loss | beside the own base's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    own_after = _mean(result["runs"], "own", "after")
    for base in BASES:
        divergence = result["divergence"].get(base)
        cells = [base, "0", "0", "100 %"]
        if divergence:
            share = divergence["kl"] / result["divergence"]["nf4"]["kl"]
            agreement = f"{divergence['top1_agreement']:.1%}"
            cells = [base, f"{divergence['kl']:.2e}", f"{share:.2f}", agreement]
        after = _mean(result["runs"], base, "after")
        change = "-" if after is None else f"{after / own_after - 1:+.2%}"
        loss = _mean(result["runs"], base, "loss")
        cells += ["-" if number is None else f"{number:.4f}" for number in (loss, after)]
        lines.append(f"| {' | '.join([*cells, change])} |")
    return lines


def _mean(runs: list[dict[str, Any]], base: str, name: str) -> float | None:
    """Return the mean of a score over seeds; of `loss` the mean over the second half of a curve."""
    values = []
    for run in runs:
        if run["base"] != base:
            continue
        if name == "loss":
            half = [loss for _, loss in run["loss"]][len(run["loss"]) // 2 :]
            values.append(sum(half) / len(half))
        else:
            values.append(run[name])
    return sum(values) / len(values) if values else None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="data/tiny_llama")
    parser.add_argument("--rows", type=Path, default=Path("data/desk"), help="train, val and test")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest row")
    parser.add_argument("--kl-rows", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000, help="of each run; 0 trains nothing")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print the table and write the results."""
    args = parse()
    import torch

    result = {
        "machine": asdict(Machine.here(on_cpu=not torch.cuda.is_available())),
        "settings": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "divergence": divergences(args),
        "runs": curves(args),
    }
    print("\n".join(table(result)))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
