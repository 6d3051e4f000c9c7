"""The trace counts what a run has: every byte of real tiny models and of their steps, and what the closed form says of large ones."""

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from test_fast_install import MODELS, SMALL
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sft_play import cli
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models import checkpointing, fake_kernels
from sft_play.models.checkpointing import LayerOffloading, checkpoint_layers
from sft_play.models.fake_model import build_on_meta, materialize
from sft_play.models.fast.install import install_fused_kernels
from sft_play.models.fast.loss.head import fused_nll
from sft_play.models.load import load_model
from sft_play.models.parameters import adapter_parameters, base_tensors
from sft_play.models.step_meter import (
    MemoryTracker,
    StepMeter,
    StepSetup,
    measure_step,
    storage_bytes,
)
from sft_play.models.trace import setup_of, trace_step
from sft_play.plan import memory
from sft_play.plan.cards import parse
from sft_play.plan.model_shape import known_model
from sft_play.plan.report import trace_lines
from sft_play.plan.resolve import resolve
from sft_play.plan.run_plan import PlannedRun
from sft_play.process import Process

NO_CONFIG = str(Path(__file__).parent / "fixtures" / "empty.yaml")
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
SIZES = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 200,
    "head_dim": 16,
}  # 4-bit blocks that are full, and some that are not
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a tiny model of an architecture, its sliding window longer than its rows."""
    folders: dict[str, Path] = {}

    def folder(name):
        if name not in folders:
            model_type, settings = MODELS[name]
            config = AutoConfig.for_model(model_type, **{**SIZES, **settings, "sliding_window": 64})
            folders[name] = tmp_path_factory.mktemp(name)
            AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
        return folders[name]

    return folder


def step_for(
    folder: Path,
    mode: str = "lora",
    layers: int = 0,
    accumulates: bool = True,
    attn: str = "auto",
    dropout: float = 0.0,
    **train: Any,
) -> StepSetup:
    config = Config.model_validate(
        {
            "model": {"name": str(folder), "max_seq_len": 24, "attn_implementation": attn},
            "tuning": {"mode": mode, "lora": {"r": 4, "dropout": dropout}},
            "train": {"batch_size": 3, "packing": False, "bf16": False, "fp16": False, **train},
        }
    )
    return StepSetup(config, "cpu", layers, zero_stage=0, accumulates=accumulates)


def loaded(step: StepSetup) -> Any:
    model = load_model(step.config, Process.alone(CPU, step.compute_dtype))
    checkpoint_layers(model, step.checkpointed_layers)
    return model.train()


# Against real models


# the modes are the same code for every architecture, and one of each is tried by `make test`
MODES_AND_NAMES = [
    *(("lora", name) for name in ("llama", "gemma2", "qwen3")),
    ("qlora", "llama"),
    ("full", "gemma3"),
    *(long("lora", name) for name in ARCHITECTURES),
    *(long("qlora", name) for name in ARCHITECTURES),
    *(long("full", name) for name in ARCHITECTURES),
]


@pytest.mark.long
def test_a_trace_does_not_count_what_is_offloaded(folder_of, monkeypatch):
    monkeypatch.setattr(checkpointing, "LayerOffloading", lambda: LayerOffloading(min_bytes=1))
    monkeypatch.setattr(checkpointing, "IN_FLIGHT", 0)
    kept = []
    for is_on in (False, True):
        step = step_for(folder_of("llama"), layers=2, activation_offloading=is_on)
        kept.append(trace_step(replace(step, device="cuda")).activations)
    inputs = 2 * 3 * 24 * SIZES["hidden_size"] * 4
    placeholders = 2 * 4
    assert kept[0] - kept[1] == inputs - placeholders


@pytest.fixture(scope="module")
def traced(folder_of):
    """A function that returns the traced step of an architecture in a mode, the same one to every test."""
    return functools.cache(lambda name, mode: trace_step(step_for(folder_of(name), mode)))


@pytest.mark.parametrize("mode, name", MODES_AND_NAMES)
def test_a_step_without_data_has_the_bytes_of_the_real_one(name, mode, folder_of, traced):
    step = step_for(folder_of(name), mode)
    assert traced(name, mode) == measure_step(loaded(step), step)


STEPS = {
    "one layer checkpointed": {"layers": 1},
    "all layers checkpointed": {"layers": 2},
    "all checkpointed, full": {"layers": 2, "mode": "full"},
    "one micro-batch a step": {"accumulates": False, "mode": "full"},
    "PEFT's own code": {"fast_path": False},
    "PEFT's own code over 4 bits": {"fast_path": False, "mode": "qlora"},
    "dropout": {"dropout": 0.1},
    "eager attention": {"attn": "eager"},
    "16-bit products": {"bf16": True},
    "16-bit products, full": {"bf16": True, "mode": "full"},
    "16-bit products, PEFT's own code": {"bf16": True, "fast_path": False},
    "one row": {"batch_size": 1},
    "one row, PEFT's own code": {"batch_size": 1, "fast_path": False},
}


@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS)
def test_however_a_step_is_computed_its_trace_has_its_bytes(changes, folder_of):
    step = step_for(folder_of("llama"), **changes)
    model = loaded(step)
    assert trace_step(step) == measure_step(model, step)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_weights_and_adapters_are_the_sum_of_what_is_saved_of_a_model(mode, folder_of, traced):
    model = loaded(step_for(folder_of("llama"), mode))
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "quant_state"):
            parts = parameter.quant_state.as_dict(packed=False)
            tensors |= {
                f"{name}.{part}": value
                for part, value in parts.items()
                if isinstance(value, Tensor)
            }
            if (
                parameter.quant_state.nested
            ):  # which as_dict holds as a number, and the model as a tensor
                tensors[f"{name}.offset"] = parameter.quant_state.offset
    assert len(tensors) > len(dict(model.named_parameters())) or mode == "lora"
    adapters = sum(tensor.nbytes for name, tensor in tensors.items() if "lora_" in name)
    found = traced("llama", mode)
    assert found.adapters == found.gradients == adapters > 0
    assert found.weights == sum(tensor.nbytes for tensor in tensors.values()) - adapters
    assert found.buffers == sum(buffer.nbytes for buffer in model.buffers())


def saved_bytes(model: torch.nn.Module) -> int:
    """Bytes that a forward pass saves for backward, less those of parameters, buffers and constants."""
    held = {
        tensor.untyped_storage()._cdata
        for tensor in (*base_tensors(model), *adapter_parameters(model), *model.buffers())
    }
    saved: list[Tensor] = []

    def pack(tensor):
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=torch.zeros(3, 24, dtype=torch.int64), use_cache=False).logits
    assert logits.requires_grad
    return storage_bytes(tensor for tensor in saved if tensor.untyped_storage()._cdata not in held)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("name", ["gemma3", long("llama"), long("qwen3")])
def test_autograd_saves_as_much_with_data_as_without_and_the_trace_sees_it_live(
    name, mode, folder_of, traced
):
    step = step_for(folder_of(name), mode)
    real = saved_bytes(loaded(step))
    model = build_on_meta(step.config, step.compute_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels.fake_kernels(is_gpu=False):
        materialize(model)
        install_fused_kernels(model, step.config, Process.alone(CPU))
        assert saved_bytes(model.train()) == real
    # beside what is saved there live the ids, the positions and the head's input, which lora does not save
    width, tokens = 64 * 4, 3 * 24
    assert 0 <= traced(name, mode).activations - real <= tokens * width + 4 * tokens * 8


@pytest.mark.long
def test_activations_are_linear_in_the_rows(folder_of, traced):
    one, four = (trace_step(step_for(folder_of("llama"), batch_size=rows)) for rows in (2, 5))
    two = traced("llama", "lora")  # of three rows
    row = two.activations - one.activations
    assert four.activations == two.activations + 2 * row
    assert one.activation_bytes_per_token == row // 24
    assert one.activation_bytes_fixed == one.activations - 2 * 24 * (row // 24)


# Against the closed form


def planned(*settings: str, hardware: str = "1xH200", deepspeed: bool = False) -> PlannedRun:
    return resolve(
        load(NO_CONFIG, {}, settings), invocation.read({}), parse(hardware), {}, True, deepspeed
    )


def cut(name: str, layers: int, folder: Path) -> Path:
    """Return the folder with the config of a known model of fewer layers."""
    sizes = {**known_model(name).config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.2-1B-Instruct",
        long("meta-llama/Llama-3.1-8B-Instruct"),  # as 14B, no bias
        "Qwen/Qwen2.5-14B-Instruct",
    ],
)
def test_the_closed_form_has_the_weights_and_adapters_of_the_real_architecture(name, mode):
    run = planned(
        f"model.name={name}", f"tuning.mode={mode}", "train.bf16=false", "train.batch_size=1"
    )  # no copies by autocast
    step = setup_of(run)
    model = build_on_meta(step.config, step.compute_dtype)
    weights, adapters = storage_bytes(base_tensors(model)), storage_bytes(adapter_parameters(model))
    assert run.plan.memory.phases["load"].weights == pytest.approx(weights, rel=1e-3)
    assert run.plan.memory.phases["load"].adapters == adapters


@pytest.mark.parametrize("layers", [4, long(16)])
def test_the_closed_form_is_near_the_trace_where_it_was_fitted(layers, tmp_path):
    folder = cut("meta-llama/Llama-3.2-1B-Instruct", layers, tmp_path)
    run = planned(f"model.name={folder}", "train.batch_size=4", "train.grad_accum=2")
    exact = trace_step(setup_of(run)).phases(run.plan.memory)
    for name in ("load", "forward", "backward", "optimizer"):
        assert run.plan.memory.phases[name].total == pytest.approx(
            exact.phases[name].total, rel=0.03
        ), name
    assert exact.peak_phase == "backward"


def test_the_closed_form_has_what_a_layer_of_an_evaluation_holds(tmp_path):
    folder = cut("meta-llama/Llama-3.1-8B-Instruct", 2, tmp_path)  # one layer holds at a time
    run = planned(f"model.name={folder}", "train.batch_size=4", "train.predict_with_generate=false")
    step, phase = setup_of(run), run.plan.memory.phases["evaluation"]
    model = build_on_meta(step.config, step.compute_dtype)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        fake_kernels.fake_kernels(True),
        torch.no_grad(),
    ):
        materialize(model)
        install_fused_kernels(
            model, step.config, Process.alone(torch.device("cuda"), step.compute_dtype)
        )
        passing = StepMeter(model.eval(), step).run_forward(run.config.train.eval_batch_size)
    assert passing.peak > passing.activations + passing.logits, (
        "the loss needs less than a layer before it"
    )
    assert phase.activations + phase.logits == pytest.approx(
        passing.peak, rel=0.06
    )  # copies of the adapters in 16 bits are left out


# What is shown


@pytest.fixture(scope="module")
def closed_and_exact(folder_of):
    """The bytes of a run by the closed form, and by a trace."""
    run = planned(
        f"model.name={folder_of('llama')}",
        "model.max_seq_len=24",
        "train.batch_size=3",
        "train.generation_max_new_tokens=4",
    )
    return run.plan.memory, trace_step(setup_of(run)).phases(run.plan.memory)


def test_the_table_has_every_phase_and_the_difference_of_the_closed_form(closed_and_exact):
    closed, exact = closed_and_exact
    lines = trace_lines(exact, closed)
    assert [line.split()[0] for line in lines[-len(memory.PHASES) :]] == list(memory.PHASES)
    weights = next(line for line in lines if line.split()[0] == "weights").split()
    difference = 100 * (closed.peak.weights / exact.peak.weights - 1)
    assert weights[1:] == [f"{exact.peak.weights / 2**30:.3f}", f"{difference:+.2f}", "%"]


def test_plan_exact_is_the_plan_with_a_trace(folder_of, monkeypatch):
    monkeypatch.chdir(PROJECT_ROOT)
    words = [
        "plan",
        "--gpus",
        "1xH200",
        "--config",
        NO_CONFIG,
        "--set",
        f"model.name={folder_of('llama')}",
        "--set",
        "train.batch_size=2",
        "--json",
    ]
    plain, exact = (CliRunner().invoke(cli.app, [*words, *option]) for option in ([], ["--exact"]))
    assert (plain.exit_code, exact.exit_code) == (0, 0), exact.output
    by_variable = CliRunner().invoke(cli.app, words, env={"EXACT": "1"})
    facts = json.loads(exact.stdout)
    assert json.loads(by_variable.stdout) == facts
    traced = facts.pop("exact")
    assert {**facts, "exact": None} == json.loads(plain.stdout)
    assert set(traced["phases"]) == set(memory.PHASES)
    assert traced["phases"]["load"]["weights"] == traced["weights"] + traced["buffers"]


def test_under_zero_what_a_rank_holds_is_the_closed_forms(folder_of):
    run = planned(
        f"model.name={folder_of('llama')}",
        "tuning.mode=full",
        "train.batch_size=2",
        hardware="2xH200",
        deepspeed=True,
    )
    traced = trace_step(setup_of(run))
    assert (run.plan.zero_stage, traced.optimizer) == (2, None)
    for name, phase in traced.phases(run.plan.memory).phases.items():
        estimated = run.plan.memory.phases[name]
        assert replace(phase, activations=0, logits=0) == replace(
            estimated, activations=0, logits=0
        ), name
    assert (
        traced.phases(run.plan.memory).phases["forward"].activations
        == traced.forward - traced.logits
        >= traced.activations
        > 0
    )


def test_unsloth_cannot_be_traced(folder_of):
    run = planned(f"model.name={folder_of('llama')}")
    unsloth = run.config.tuning.model_copy(update={"backend": "unsloth"})
    with pytest.raises(ConfigError, match="EXACT=1 cannot trace"):
        setup_of(replace(run, config=run.config.model_copy(update={"tuning": unsloth})))


def test_dropout_on_a_gpu_keeps_its_output_and_a_byte_per_element():
    tracker = MemoryTracker()
    with FakeTensorMode(), fake_kernels.fake_kernels(is_gpu=True):
        values = torch.empty(64, 128, dtype=torch.bfloat16, requires_grad=True)
        with tracker:
            out = torch.nn.Dropout(0.1)(values)
            assert out.requires_grad and tracker.live_bytes == (2 + 1) * values.numel()
            assert torch.nn.functional.dropout(values, training=False) is values


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "setting, layers",
    itertools.product(["mode=lora", "mode=qlora", "mode=full", "lora.dropout=0.1"], [0, 2]),
)
def test_a_gpu_allocates_what_was_traced(setting, layers, tmp_path):
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(
        tmp_path
    )
    run = planned(
        f"model.name={tmp_path}",
        f"tuning.{setting}",
        "model.max_seq_len=1024",
        "train.batch_size=4",
        "train.grad_accum=2",
    )
    step = StepSetup(run.config, "cuda", layers, zero_stage=0, accumulates=True)
    model = load_model(step.config, Process.alone(torch.device("cuda"), step.compute_dtype))
    checkpoint_layers(model, layers)
    real, exact = (
        measure_step(model.train(), step),
        trace_step(step),
    )  # which leaves gradients to add to
    held = ("weights", "buffers", "adapters", "gradients", "optimizer")
    assert [getattr(exact, name) for name in held] == [getattr(real, name) for name in held]
    assert exact.activations == pytest.approx(real.activations, rel=0.01)

    ids = torch.zeros(4, 1024, dtype=torch.int64, device="cuda")
    begun = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", step.compute_dtype):
        loss = fused_nll(
            model, model, {"input_ids": ids}, ids[:, 1:].flatten(), ids[:, 1:].flatten()
        )
    assert torch.cuda.memory_allocated() - begun == pytest.approx(
        exact.activations + exact.logits_kept, rel=0.02
    )
    loss.backward()
    assert torch.cuda.max_memory_allocated() - begun == pytest.approx(
        max(exact.forward, exact.backward), rel=0.05
    )
