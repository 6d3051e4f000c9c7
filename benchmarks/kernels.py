"""Each optional kernel on and off: what it adds to the speed of a training step.

python -m benchmarks.kernels --workloads 8b-lora 8b-qlora
python -m benchmarks.kernels --workloads 1b-lora --kernels glu norms
python -m benchmarks.kernels --workloads tiny

A model with random weights takes some steps with all kernels, then some with one of them replaced
by its reference, and so on in turns. `with` and `without` are tokens/s. `differs` is the relative
difference of the gradients of one micro-batch. The weights do not change. One micro-batch is a step
and no layer is recomputed. Kernels that a workload does not call are left out.
"""

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging

from benchmarks.inputs import make_model
from benchmarks.report import grid
from benchmarks.workloads import TOY, BaseModel
from sft_kernels import mxfp4
from sft_kernels.experts import products as expert_products
from sft_kernels.linears import adapter_gradients, glu, lora, mlp
from sft_kernels.linears import products as linear_products
from sft_kernels.loss import head as loss_head
from sft_kernels.loss import linear_cross_entropy
from sft_kernels.loss.tokens import LossTokens
from sft_kernels.norms import residual
from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of, is_fused
from sft_play.config.schema import Config
from sft_play.models.load import load_model

HEAD = ("kernel", "workload", "with", "without", "gain %", "differs")


class Workload(NamedTuple):
    """A model and the rows of its micro-batch."""

    model: BaseModel
    mode: str = "lora"
    base_dtype: str = "auto"
    rows: int = 4
    row_tokens: int = 2048


LLAMA_8B = BaseModel(shape="meta-llama/Llama-3.1-8B", layers=8)
QWEN3_MOE = BaseModel(shape="Qwen/Qwen3-30B-A3B", layers=8)
WORKLOADS = {
    "8b-lora": Workload(LLAMA_8B),
    "8b-qlora": Workload(LLAMA_8B, "qlora"),
    "8b-float8": Workload(LLAMA_8B, base_dtype="float8"),
    "1b-lora": Workload(BaseModel(shape="meta-llama/Llama-3.2-1B"), rows=1),
    "moe-lora": Workload(QWEN3_MOE),
    "moe-qlora": Workload(QWEN3_MOE, "qlora"),
    "gpt-oss": Workload(BaseModel(shape="openai/gpt-oss-20b", layers=8, in_mxfp4=True)),
    "tiny": Workload(BaseModel(shape=TOY), rows=2, row_tokens=64),
}
Change = tuple[object, str, Any]  # an owner, the name of an attribute, and its other value


def changes_by_kernel(model: nn.Module) -> dict[str, list[Change]]:
    """Return what replaces each kernel by its reference."""
    modules = list(base_model_of(model).modules())
    layers = [module for module in modules if is_fused(module, residual.layer_forward)]
    own_forward = [(layer, "forward", MethodType(type(layer).forward, layer)) for layer in layers]
    norms = [module for module in modules if hasattr(module, "norm_kind") and layers]
    liger = [(norm, "forward", MethodType(residual.norm_forward, norm)) for norm in norms]
    has_gpu = torch.cuda.is_available()  # which Liger's kernels need
    return {
        "adapter gradients": [(adapter_gradients, "fit_one_pass", lambda *_: False)],
        "adapters cast at once": [
            (lora.AdapterCopies, "__call__", lambda *_: None),
            *((group.bind(), "copies", ()) for group in lora.groups_of(model) if group.bind()),
        ],
        "4-bit unpack": [(linear_products, "unpack_with_kernel", unpack)],
        "4-bit unpack, experts": [
            (expert_products, "block_lines", lambda _: None),
            (linear_products, "unpack_with_kernel", unpack),
        ],
        "tiles of 4-bit experts": [(expert_products, "unpacks_tiles", lambda *_: False)],
        "4-bit experts at a time": [(expert_products, "unpacks_tiles", lambda *_: True)],
        "glu": [
            (owner, name, function)
            for owner in (glu, mlp)
            for name, function in (("glu_forward", glu_forward), ("glu_backward", glu_backward))
        ],
        "mlp as one function": [(mlp, "lora_mlp", mlp_by_linears)],
        "norms": [(residual, "_kernels", lambda _: residual.ReferenceNorms)],
        "norms and sums in one": [*own_forward, *(liger if has_gpu else [])],
        "liger's norms": [(residual, "normalize", normalize)],
        "loss": [(linear_cross_entropy, "nll_and_gradient_", nll_and_gradient_)],
        "loss with its head": [(loss_head, "fused_linear_cross_entropy", head_and_loss)],
    }


def unpack(weight: Tensor) -> Tensor:
    state = weight.quant_state
    if isinstance(state, mxfp4.Mxfp4State):
        return mxfp4.unpack_mxfp4(weight, state)
    return dequantize_4bit(weight.view(-1, 1), state)


def glu_forward(gate: Tensor, up: Tensor, activation: Any) -> Tensor:
    p, _ = glu.sigmoid_argument(gate.float(), activation)
    return (gate.float() * torch.sigmoid(p) * up.float()).to(gate.dtype)


def glu_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: Any, dgate: Tensor, dup: Tensor, h: Any = None
) -> None:
    g, u, d = gate.float(), up.float(), dh.float()
    p, slope = glu.sigmoid_argument(g, activation)
    s = torch.sigmoid(p)
    dgate.copy_(d * (s + g * s * (1 - s) * slope) * u)
    dup.copy_(d * g * s)
    if h is not None:
        h.copy_(g * s * u)


def mlp_by_linears(
    x: Tensor, inner: lora.LinearGroup, down: lora.LinearGroup, activation: glu.Activation
) -> Tensor:
    return down.fused(glu.GluFunction.apply(*mlp.split_halves(inner.fused(x)), activation))[0]


def nll_and_gradient_(
    logits: Tensor, targets: Tensor, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    scores = logits.detach().requires_grad_()
    with torch.enable_grad():
        nll = nll_of(scores, targets, softcap)
    logits.copy_(torch.autograd.grad(nll, scores)[0] * scale)
    return nll.detach()


def nll_of(scores: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    scores = scores.float() if softcap is None else torch.tanh(scores.float() / softcap) * softcap
    return functional.cross_entropy(scores, targets, reduction="sum")


def head_and_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> Tensor:
    return nll_of(hidden @ weight.t(), targets, softcap)


def normalize(x: Tensor, *norm: Any) -> Tensor:
    return residual.ReferenceNorms.forward(x, None, *norm)[0]


class Trained:
    """A model that takes training steps of one micro-batch."""

    def __init__(self, workload: Workload, folder: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.process = Process.alone(self.device, torch.bfloat16)
        self.tokens = workload.rows * workload.row_tokens
        name = str(make_model(workload.model, folder))
        settings = {
            "model": {"name": name, "max_seq_len": workload.row_tokens},
            "tuning": {"mode": workload.mode, "base_dtype": workload.base_dtype},
        }
        self.model = load_model(Config.model_validate(settings), self.process).train()
        lora.copy_adapters_at_once(self.model, self.process.compute_dtype)
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        for weight in self.trained:
            nn.init.normal_(weight, std=0.02)  # PEFT's B are zeros
        torch.manual_seed(0)
        ids = torch.randint(2000, (workload.rows, workload.row_tokens))
        self.ids = ids.to(self.device)
        positions = torch.arange(self.ids.numel(), device=self.device)
        self.loss_tokens = LossTokens(positions, self.ids.flatten(), len(positions))

    def step(self) -> None:
        """Compute the gradients of a micro-batch."""
        for weight in self.trained:
            weight.grad = None
        inputs = {"input_ids": self.ids, "use_cache": False}
        with self.process.autocast():
            loss = loss_head.fused_nll(self.model, self.model, inputs, self.loss_tokens)
        (loss / self.tokens).backward()

    def measure(self, changes: list[Change], steps: int) -> tuple[float, list[Tensor], set[str]]:
        """Return the seconds of a step with changes, its gradients, and which changes it called."""
        called: set[str] = set()

        def noted(name: str, value: Any) -> Any:
            def function(*args: Any, **kwargs: Any) -> Any:
                called.add(name)
                return value(*args, **kwargs)

            return function if callable(value) else value

        with contextlib.ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(patch.object(owner, name, noted(name, value)))
            for _ in range(3):
                self.step()
            self.wait()
            started = time.monotonic()
            for _ in range(steps):
                self.step()
            self.wait()
            seconds = (time.monotonic() - started) / steps
        return seconds, [weight.grad.clone() for weight in self.trained], called

    def wait(self) -> None:
        """Wait for the GPU if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the relative difference of gradients."""
    squares = [(a - b).float().square().sum() for a, b in zip(found, wanted, strict=True)]
    total = sum(each.float().square().sum() for each in wanted)
    return math.sqrt(float(sum(squares)) / float(total))


def measured(trained: Trained, args: argparse.Namespace, workload: str) -> Iterator[list[str]]:
    """Yield a row of the table for each kernel that a workload calls."""
    for kernel, changes in changes_by_kernel(trained.model).items():
        if not changes or (args.kernels and kernel not in args.kernels):
            continue
        speeds: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            on, wanted, _ = trained.measure([], args.steps)
            off, found, called = trained.measure(changes, args.steps)
            if not called:
                break
            speeds[0].append(trained.tokens / on)
            speeds[1].append(trained.tokens / off)
        if not speeds[1]:
            continue
        with_it, without = map(statistics.median, speeds)
        numbers = (f"{with_it:,.0f}", f"{without:,.0f}", f"{100 * (with_it / without - 1):+.1f}")
        yield [kernel, workload, *numbers, f"{difference(found, wanted):.0e}"]


def main() -> None:
    """Measure, and print a line for each kernel and then the table."""
    parser = argparse.ArgumentParser("kernels", description=__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS][:-1])
    add("--kernels", nargs="+", help="default all")
    add("--layers", type=int, help="of each model")
    add("--rows", type=int, help="of a micro-batch")
    add("--steps", type=int, default=4, help="that are timed in a round")
    add("--rounds", type=int, default=3, help="of steps with and without a kernel")
    add("--folder", type=Path, default=Path("outputs/bench"))
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = []
    for name in args.workloads:
        workload = WORKLOADS[name]
        if args.layers is not None and name != "tiny":
            workload = workload._replace(model=replace(workload.model, layers=args.layers))
        if args.rows is not None:
            workload = workload._replace(rows=args.rows)
        trained = Trained(workload, args.folder)
        for row in measured(trained, args, name):
            rows.append(row)
            print(" | ".join(row), flush=True)
        del trained
        gc.collect()
    print(grid(HEAD, rows, HEAD[:2]))


if __name__ == "__main__":
    main()
