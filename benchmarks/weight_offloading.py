"""Frozen weights in host memory against weights on the GPU: speed, memory, and equal numbers.

python -m benchmarks.weight_offloading
python -m benchmarks.weight_offloading --mode qlora --shape meta-llama/Llama-3.1-70B --layers 16
python -m benchmarks.weight_offloading --tokens 4096 --offloaded 16 --kept 16 --exact

A model with random weights takes some steps three times: resident, resident again, and offloaded.
The second says how far two runs differ by chance: backward kernels of attention add in another
order each time. `--exact` computes attention in plain torch, which is slower. One micro-batch of
rows of 2,048 tokens is a step; its layers are recomputed, except the last `--kept`. `copies` is the
time that the link needs for the copies of a step by itself.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.inputs import make_model
from benchmarks.machine import GIB
from benchmarks.report import grid
from benchmarks.workloads import BaseModel

if TYPE_CHECKING:
    import torch

    from sft_kernels.process import Process

ROW_TOKENS = 2048
SHAPE = "meta-llama/Llama-3.1-8B"
HEAD = [
    *("layers offloaded", "tokens/s", "of resident", "step s", "copies s", "peak GiB", "load s"),
    *("load GiB", "equal"),
]


class Measured(NamedTuple):
    """What the steps of one model took and computed."""

    step_seconds: float
    copy_seconds: float  # of a step
    peak_gib: float
    load_seconds: float
    load_gib: float
    losses: list[float]
    adapters: list[torch.Tensor]  # after the steps


def measure(args: argparse.Namespace, folder: Path, offloaded: int) -> Measured:
    """Load a model with some layers offloaded, and train it for some steps."""
    import torch

    from sft_kernels.loss.head import fused_nll
    from sft_kernels.loss.tokens import LossTokens
    from sft_kernels.process import Process
    from sft_kernels.training_setup import base_model_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    process = Process.alone(device, torch.bfloat16)
    gc.collect()  # an earlier model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _take_peak_gib()
    started = time.monotonic()
    model = _load(args, folder, offloaded, process)
    load_seconds, load_gib = time.monotonic() - started, _take_peak_gib()
    trained = [weight for weight in model.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    losses: list[torch.Tensor] = []

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        shape = (args.tokens // ROW_TOKENS, ROW_TOKENS)
        ids = torch.randint(2000, shape, generator=generator).to(device)
        positions = torch.arange(ids.numel(), device=device)
        tokens = LossTokens(positions, ids.flatten(), ids.numel())
        inputs = {"input_ids": ids, "use_cache": False}
        with process.autocast():
            loss = fused_nll(model, model, inputs, tokens) / ids.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step(0)  # kernels are compiled
    step(1)
    _wait()
    started = time.monotonic()
    for number in range(2, args.steps + 2):
        step(number)
    _wait()
    seconds = time.monotonic() - started
    return Measured(
        step_seconds=seconds / args.steps,
        copy_seconds=_copy_seconds(base_model_of(model)),
        peak_gib=_take_peak_gib(),
        load_seconds=load_seconds,
        load_gib=load_gib,
        losses=[float(loss) for loss in losses],
        adapters=[weight.detach().cpu() for weight in trained],
    )


def _load(
    args: argparse.Namespace, folder: Path, offloaded: int, process: Process
) -> torch.nn.Module:
    """Return a model with adapters, some layers offloaded, and all but `--kept` recomputed."""
    from transformers import set_seed

    from sft_kernels.training_setup import base_model_of
    from sft_play.config.schema import Config
    from sft_play.models.architecture import decoder_layers
    from sft_play.models.checkpointing import checkpoint_layers
    from sft_play.models.load import WeightPlaces, load_model

    settings = {
        "model": {
            "name": str(folder),
            "max_seq_len": ROW_TOKENS,
            "attn_implementation": "eager" if args.exact else "auto",
        },
        "tuning": {"mode": args.mode, "base_dtype": args.base_dtype},
    }
    set_seed(0)
    places = WeightPlaces(offloaded_layers=offloaded)
    model = load_model(Config.model_validate(settings), process, places)
    base = base_model_of(model)
    checkpoint_layers(base, len(decoder_layers(base)) - args.kept)
    return model


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _take_peak_gib() -> float:
    """Return the GiB of the GPU that tensors took at most, and begin again."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return peak


def _copy_seconds(base: torch.nn.Module) -> float:
    """Return the seconds in which all offloaded layers are copied twice, 0 if there are none."""
    from sft_kernels.modules import ATTRIBUTE

    offloaded = vars(base).get(ATTRIBUTE)
    if offloaded is None:
        return 0.0
    _wait()
    started = time.monotonic()
    for _ in range(2):
        for layer in base.modules():
            offloaded.bring(layer)
    _wait()
    return time.monotonic() - started


def compared(measured: Measured, resident: Measured) -> str:
    """Return how far losses and adapters are from those of the first run, as text."""
    if measured.losses != resident.losses:
        pairs = zip(measured.losses, resident.losses, strict=True)
        return f"losses differ by {max(abs(one - other) for one, other in pairs):.1e}"
    pairs = zip(measured.adapters, resident.adapters, strict=True)
    different = sum(not one.equal(other) for one, other in pairs)
    return f"losses; {different} adapters differ" if different else "losses, adapters"


def main() -> None:
    """Measure, and print a line for each run."""
    from transformers import AutoConfig
    from transformers.utils import logging

    parser = argparse.ArgumentParser("weight_offloading", description=__doc__)
    add = parser.add_argument
    add("--shape", default=SHAPE)
    add("--layers", type=int, help="of the model; default all")
    add("--mode", choices=("lora", "qlora"), default="lora")
    add("--base-dtype", choices=("auto", "float8"), default="auto")
    add("--tokens", type=int, default=16_384, help="of a micro-batch")
    add("--kept", type=int, default=0, help="layers that are not recomputed")
    add("--offloaded", type=int, nargs="*", help="layers, one number a run; default all")
    add("--steps", type=int, default=6)
    add("--only-offloaded", action="store_true", help="where resident weights do not fit")
    add("--exact", action="store_true", help="with attention in plain torch")
    add("--folder", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args()
    logging.disable_progress_bar()
    folder = make_model(BaseModel(shape=args.shape, layers=args.layers), args.folder)
    layers = AutoConfig.from_pretrained(folder).num_hidden_layers
    runs = args.offloaded or [layers]
    if not args.only_offloaded:
        runs = [0, 0, *runs]
    first = None
    rows = []
    for offloaded in runs:
        measured = measure(args, folder, offloaded)
        first = first or measured
        share = first.step_seconds / measured.step_seconds
        rows.append(
            [
                f"{offloaded} of {layers}",
                f"{args.tokens / measured.step_seconds:,.0f}",
                f"{share:.3f}",
                f"{measured.step_seconds:.3f}",
                f"{measured.copy_seconds:.3f}",
                f"{measured.peak_gib:.2f}",
                f"{measured.load_seconds:.0f}",
                f"{measured.load_gib:.2f}",
                compared(measured, first),
            ]
        )
        print(" | ".join(rows[-1]), measured.losses, flush=True)
    print(grid(HEAD, rows, HEAD))


if __name__ == "__main__":
    main()
