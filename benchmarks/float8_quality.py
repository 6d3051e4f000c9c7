"""What a float8 base costs in quality, and a 4-bit base: KL at the start, loss curves, scores.

Bases are float8, NF4 and the model's own weights. KL compares the base's probabilities for the
labeled tokens of held-out rows. The curves are those of LoRA runs that differ only in the base.
Matrix multiplications are in float32 on a CPU and in bfloat16 on a GPU.

python -m benchmarks.float8_quality --out benchmarks/results/float8-quality-tiny_llama.json
python -m benchmarks.float8_quality --steps 150 --seeds 3
python -m benchmarks.float8_quality --model FOLDER --rows data/gsm8k --kl-rows 64 --steps 0
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks import quality
from benchmarks.machine import Machine
from benchmarks.report import grid, number
from benchmarks.results import Result, Results, write_as

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from sft_play.config.schema import Config
    from sft_play.data.store import Sample

BASES = {
    "own": {"tuning.mode": "lora", "tuning.base_dtype": "auto"},
    "float8": {"tuning.mode": "lora", "tuning.base_dtype": "float8"},
    "nf4": {"tuning.mode": "qlora", "tuning.base_dtype": "auto"},
}
HEAD = ["base", "KL at start", "share of NF4's", "same most likely token", "training loss"]
HEAD += ["held-out loss", "next to the own base's"]
CURVE_POINTS = 20
MAX_KL_SHARE = 0.2  # of NF4's KL: the limit for a float8 base


def config_of(args: argparse.Namespace, base: str, cache: str | None = None) -> Config:
    """Return the config of a run over a base."""
    from sft_play.config.loader import load_merged

    settings = quality.model_settings(args) | BASES[base]
    if cache:
        settings["data.cache_dir"] = cache
    return load_merged(None, None, [f"{name}={value}" for name, value in settings.items()]).config


def held_out(args: argparse.Namespace) -> list[Sample]:
    """Return the first samples of the test rows, as a run prepares them."""
    from sft_play.data.pipeline import build_run_data
    from sft_play.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as cache:
        config = config_of(args, "own", cache)
        split = build_run_data(config, load_tokenizer(config)).test
        return [split[index] for index in range(min(args.kl_rows, len(split)))]


def base_model(args: argparse.Namespace, base: str) -> PreTrainedModel:
    """Return a base as a run evaluates it."""
    import torch

    from sft_kernels.process import Process
    from sft_play.models.load import load_base

    process = Process.alone(torch.device("cpu"), torch.float32)
    if torch.cuda.is_available():
        process = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    return load_base(config_of(args, base), process).eval()


def log_probabilities(model: PreTrainedModel, samples: Sequence[Sample]) -> Iterator[Tensor]:
    """Yield the log probabilities (labels, V) of the labeled tokens of each sample."""
    import torch

    from sft_play.data.render import IGNORE_INDEX

    for sample in samples:
        ids = torch.tensor(sample.ids[None], device=model.device)
        labelled = torch.tensor(sample.labels != IGNORE_INDEX).nonzero()[:, 0]
        logits = model(input_ids=ids, use_cache=False).logits[0, labelled - 1]
        yield logits.float().log_softmax(-1)


def make_result(args: argparse.Namespace, name: str, base: str, **more: Any) -> Result:
    """Return a result that names the model and the rows, with the options as its settings."""
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    workload = f"{Path(args.model).name}-{args.rows.name}-{name}"
    return Result(workload, base, settings=settings, **more)


def divergences(args: argparse.Namespace) -> Iterator[Result]:
    """Yield for each base the mean KL to the model's own weights, in nats per token."""
    import torch

    samples, own = held_out(args), base_model(args, "own")
    with torch.no_grad():
        for base in ("float8", "nf4"):
            other = base_model(args, base)
            kl, agreed, count = 0.0, 0, 0
            both = (log_probabilities(own, samples), log_probabilities(other, samples))
            for right, left in zip(*both, strict=True):
                kl += float((right.exp() * (right - left)).sum())
                agreed += int((right.argmax(-1) == left.argmax(-1)).sum())
                count += len(right)
            figures = {"kl": kl / count, "top1_agreement": agreed / count, "tokens": count}
            yield make_result(args, "start", base, figures=figures)


def curves(args: argparse.Namespace) -> Iterator[Result]:
    """Yield the runs over every base and seed."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds if args.steps else 0):
            for base, settings in BASES.items():
                more = settings | {
                    "train.seed": seed,
                    "train.reopen_saved": "false",
                    "train.logging_steps": max(1, args.steps // CURVE_POINTS),
                }
                report = quality.train(args, Path(folder), f"{base}-{seed}", more)
                scores = report.metrics
                figures = {when: scores[when]["eval_loss"] for when in ("before", "after")}
                yield make_result(args, f"seed-{seed}", base, losses=report.loss, figures=figures)


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    starts = {each.arm: each.figures for each in results.results if "kl" in each.figures}
    rows = []
    for base in BASES:
        cells = [base, "0", "0", "100 %"]
        if base in starts:
            kl, agreement = starts[base]["kl"], starts[base]["top1_agreement"]
            cells = [base, f"{kl:.2e}", f"{kl / starts['nf4']['kl']:.2f}", f"{agreement:.1%}"]
        after = _held_out_loss(results, base)
        change = "-" if after is None else f"{after / _held_out_loss(results, 'own') - 1:+.2%}"
        loss = _training_loss(results, base)
        rows.append([*cells, number(loss, ".4f"), number(after, ".4f"), change])
    return grid(HEAD, rows, HEAD)


def _held_out_loss(results: Results, base: str) -> float | None:
    """Return the mean over seeds of the score after training."""
    runs = [each for each in results.results if each.arm == base and each.losses]
    return mean(run.figures["after"] for run in runs) if runs else None


def _training_loss(results: Results, base: str) -> float | None:
    """Return the mean over seeds of the second half of the loss curve."""
    means = []
    for run in results.results:
        if run.arm == base and run.losses:
            losses = [logged.loss for logged in run.losses]
            means.append(mean(losses[len(losses) // 2 :]))
    return mean(means) if means else None


def main() -> None:
    """Measure, print the table and write the results."""
    parser = quality.make_parser(__doc__, length=256, steps=1000, batch=8, rate=2e-4)
    add = parser.add_argument
    add("--kl-rows", type=int, default=100)
    add("--seeds", type=int, default=1)
    add("--out", type=Path, help="results file")
    args = parser.parse_args()
    import torch

    machine = Machine.here(on_cpu=not torch.cuda.is_available())
    results = Results(machine=machine, results=[*divergences(args), *curves(args)])
    print(table(results))
    if args.out:
        write_as(args.out, results)


if __name__ == "__main__":
    main()
