"""Steps of LoRA with adapters beside the weights, and with products of their own, on one GPU.

python -m benchmarks.columns                     Llama 8B's shapes, half a minute
python -m benchmarks.columns 1b

Layers of random weights in bfloat16, without the rest of a run: milliseconds of a forward and
backward pass, in turns, each for seconds on end, with the power and the clock of the GPU meanwhile.
The gradients of both are as close to those of float32, or this ends with an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sft_play.config.schema import Config
from sft_play.models.fast.install import install_fused_kernels
from sft_play.models.fast.linears.beside import put_beside_weights
from sft_play.models.fast.linears.copies import AdapterCopies, float32_adapters
from sft_play.process import Process

ROUNDS = 3
MOST_FURTHER = 1.25  # times the distance that products of their own have to float32
CLOCK_AND_POWER = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")


class Shape(NamedTuple):
    """Layers and rows to compute."""

    sizes: dict[str, int]
    layers: int  # computed here
    of: int  # layers of the model
    rows: tuple[int, int]
    seconds: float  # of each arm in a round


SHAPES = {
    "8b": Shape({"hidden_size": 4096, "intermediate_size": 14336}, 8, 32, (4, 2048), 2.5),
    "1b": Shape({"hidden_size": 2048, "intermediate_size": 8192}, 16, 16, (4, 2048), 2.5),
    "tiny": Shape({"hidden_size": 1024, "intermediate_size": 1280}, 2, 2, (1, 64), 0.0),
}


def plain_model(shape: Shape, device: torch.device) -> nn.Module:
    """Return a model of PEFT in bfloat16 with adapters in float32: the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        num_hidden_layers=shape.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        **shape.sizes,
    )
    with device:
        base = LlamaForCausalLM(config).bfloat16()
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base, lora).to(device).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    model.config.use_cache = False
    return model


def tokens_of(shape: Shape, device: torch.device) -> torch.Tensor:
    """Return rows of random tokens, the same each time."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 1024, shape.rows, generator=draw).to(device)


def exact_gradients(shape: Shape, device: torch.device) -> torch.Tensor:
    """Return the gradients of all adapters as plain modules compute them in float32."""
    model = plain_model(shape, device).float()
    tokens = tokens_of(shape, device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    adapters = float32_adapters(model.get_base_model().get_decoder())
    return torch.cat([adapter.grad.flatten() for adapter in adapters])


class Bench:
    """A model whose adapters lie beside its weights or apart."""

    def __init__(self, shape: Shape, device: torch.device):
        self.model = plain_model(shape, device)
        settings = Config.model_validate({"tuning": {"mode": "lora", "lora": {"dropout": 0.0}}})
        install_fused_kernels(self.model, settings, Process.alone(device, torch.bfloat16))
        self.tokens = tokens_of(shape, device)
        self.decoder = self.model.get_base_model().get_decoder()
        self.adapters = float32_adapters(self.decoder)
        self.hook: Any = self.decoder.register_forward_pre_hook(AdapterCopies(self.adapters))

    def move_beside(self) -> None:
        """Move the adapters beside the weights."""
        self.hook.remove()
        places = put_beside_weights(self.decoder)
        self.decoder.register_forward_pre_hook(AdapterCopies(self.adapters, places))

    def step(self) -> None:
        """Run one forward and backward pass."""
        self.model.zero_grad()
        with torch.autocast(self.tokens.device.type, torch.bfloat16):
            self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def gradients(self) -> torch.Tensor:
        """Return the gradients of all adapters after a step."""
        self.step()
        return torch.cat([adapter.grad.flatten() for adapter in self.adapters])


def milliseconds(bench: Bench, seconds: float) -> tuple[float, str]:
    """Return the time of a step, measured for seconds after as many, and what the GPU says."""
    bench.step()
    bench.step()
    on_gpu = bench.tokens.is_cuda
    state = "no GPU"
    counted = 0
    for _ in range(2):
        _wait(on_gpu)
        start = time.perf_counter()
        counted = 0
        while counted < 3 or time.perf_counter() - start < seconds:
            bench.step()
            counted += 1
            if counted % 4 == 0:  # so that the host does not run far ahead
                _wait(on_gpu)
        if on_gpu:
            said = subprocess.run(CLOCK_AND_POWER, capture_output=True, text=True, check=True)
            state = said.stdout.splitlines()[0]
        _wait(on_gpu)
    return (time.perf_counter() - start) * 1e3 / counted, state


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def main() -> None:
    """Print the time of a step of both arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="8b", choices=SHAPES)
    name = parser.parse_args().shape
    shape = SHAPES[name]
    if name != "tiny" and not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU is here; try python -m benchmarks.columns tiny")
    device = torch.device("cpu" if name == "tiny" else "cuda")
    exact = exact_gradients(shape, device)
    apart, beside = Bench(shape, device), Bench(shape, device)
    beside.move_beside()
    gaps = [((bench.gradients() - exact).norm() / exact.norm()).item() for bench in (apart, beside)]
    said = f"gradients differ from float32's by {gaps[0]:.1e} apart, {gaps[1]:.1e} beside"
    if not gaps[1] <= MOST_FURTHER * gaps[0]:
        sys.exit(said)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; {said}")
    print(f"{shape.layers} layers of {shape.of}, {shape.rows[0]} rows of {shape.rows[1]} tokens")
    for _ in range(ROUNDS):
        for arm, bench in (("apart", apart), ("beside", beside)):
            took, state = milliseconds(bench, shape.seconds)
            print(f"{arm:8} {took:8.2f} ms a step   clock, power: {state}", flush=True)


if __name__ == "__main__":
    main()
