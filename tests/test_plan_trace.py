"""The trace counts what a run has: every byte of real tiny models and of their steps, and what the closed form says of large ones."""

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
from traced_steps import build_on_meta, loaded, real_point, storage_bytes, traced_point
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sft_kernels.loss.head import fused_nll
from sft_kernels.loss.tokens import LossTokens
from sft_kernels.process import Process
from sft_play import cli
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load_merged
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models import trace
from sft_play.models.load import load_model
from sft_play.models.parameters import adapter_parameters, iter_base_tensors
from sft_play.models.step_meter import MemoryTracker, StepMeter, StepSetup
from sft_play.models.trace import tracing
from sft_play.plan import counting, memory
from sft_play.plan.cards import parse_hardware
from sft_play.plan.config_json import known_model
from sft_play.plan.resolve import resolve_plan
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.traced import TracedSize

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
    folder: Path, mode: str = "lora", attn: str = "auto", dropout: float = 0.0, **train: Any
) -> StepSetup:
    config = Config.model_validate(
        {
            "model": {"name": str(folder), "max_seq_len": 24, "attn_implementation": attn},
            "tuning": {"mode": mode, "lora": {"r": 4, "dropout": dropout}},
            "train": {"batch_size": 3, "packing": False, "bf16": False, "fp16": False, **train},
        }
    )
    return StepSetup(config, "cpu", zero_stage=0)


# Against real models


# the modes are the same code for every architecture, and one of each is tried by `make test`
MODES_AND_NAMES = [
    ("lora", "gemma2"),
    ("qlora", "llama"),
    ("full", "gemma3"),
    *(long("lora", name) for name in ARCHITECTURES),
    *(long("qlora", name) for name in ARCHITECTURES),
    *(long("full", name) for name in ARCHITECTURES),
]


@pytest.mark.parametrize("mode, name", MODES_AND_NAMES)
def test_a_step_without_data_has_the_bytes_of_the_real_one(name, mode, folder_of):
    step = step_for(folder_of(name), mode)
    assert traced_point(step) == real_point(step)


STEPS = {
    "one layer checkpointed": (1, {}),
    "all layers checkpointed": (2, {}),
    "PEFT's own code": (0, {"fast_path": False}),
    "dropout": (0, {"dropout": 0.1}),
    "eager attention": (0, {"attn": "eager"}),
    "16-bit products": (0, {"bf16": True}),
    "no mask": (0, {"batch_size": 1}),
}
LONG_STEPS = {
    "all checkpointed, full": (2, {"mode": "full"}),
    "PEFT's own code over 4 bits": (0, {"fast_path": False, "mode": "qlora"}),
    "16-bit products, full": (0, {"bf16": True, "mode": "full"}),
    "16-bit products, PEFT's own code": (0, {"bf16": True, "fast_path": False}),
    "no mask, PEFT's own code": (0, {"batch_size": 1, "fast_path": False}),
}


@pytest.mark.parametrize(
    "layers, changes",
    [*STEPS.values(), *(long(*step) for step in LONG_STEPS.values())],
    ids=[*STEPS, *LONG_STEPS],
)
def test_however_a_step_is_computed_its_trace_has_its_bytes(layers, changes, folder_of):
    step = step_for(folder_of("llama"), **changes)
    assert traced_point(step, layers) == real_point(step, layers)


def saved_bytes(model: torch.nn.Module) -> int:
    """Bytes that a forward pass saves for backward, less those of parameters, buffers and constants."""
    held = {
        tensor.untyped_storage()._cdata
        for tensor in (*iter_base_tensors(model), *adapter_parameters(model), *model.buffers())
    }
    saved: list[Tensor] = []

    def pack(tensor):
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=torch.zeros(3, 24, dtype=torch.int64), use_cache=False).logits
    assert logits.requires_grad
    return storage_bytes(tensor for tensor in saved if tensor.untyped_storage()._cdata not in held)


@pytest.mark.parametrize("mode", ["lora", long("full")])
@pytest.mark.parametrize("name", ["gemma3", long("llama"), long("qwen3")])
def test_autograd_saves_as_much_with_data_as_without_and_the_trace_sees_it_live(
    name, mode, folder_of
):
    step = step_for(folder_of(name), mode)
    real = saved_bytes(loaded(step))
    model = build_on_meta(step.config, step.compute_dtype)
    with tracing(model, step):
        assert saved_bytes(model.train()) == real
    # next to what is saved there live the ids, the positions and the head's input, which lora does not save
    width, tokens = 64 * 4, 3 * 24
    assert 0 <= traced_point(step).kept - real <= tokens * width + 4 * tokens * 8


# Against the closed form


def planned(*settings: str, hardware: str = "1xH200", exact: bool = False) -> PlannedRun:
    asked = invocation.read_invocation({"EXACT": "1"} if exact else {})
    return resolve_plan(
        load_merged(NO_CONFIG, {}, settings), asked, parse_hardware(hardware), {}, True, False
    )


def setup_of(run: PlannedRun) -> StepSetup:
    return StepSetup(run.config, "cuda", zero_stage=0)


def cut(name: str, layers: int, folder: Path) -> Path:
    """Return the folder with the config of a known model of fewer layers."""
    sizes = {**known_model(name).config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.mark.parametrize(
    "name, mode",
    [
        ("Qwen/Qwen2.5-14B-Instruct", "lora"),  # has biases
        *(("meta-llama/Llama-3.2-1B-Instruct", mode) for mode in ("qlora", "full")),
        *(long("meta-llama/Llama-3.1-8B-Instruct", mode) for mode in ("lora", "qlora", "full")),
    ],
)
def test_the_closed_form_has_the_weights_and_adapters_of_the_real_architecture(name, mode):
    run = planned(
        f"model.name={name}", f"tuning.mode={mode}", "train.bf16=false", "train.batch_size=1"
    )  # no copies by autocast
    step = setup_of(run)
    model = build_on_meta(step.config, step.compute_dtype)
    weights, adapters = (
        storage_bytes(iter_base_tensors(model)),
        storage_bytes(adapter_parameters(model)),
    )
    assert run.plan.memory.phases["load"].weights == pytest.approx(weights, rel=1e-3)
    assert run.plan.memory.phases["load"].adapters == adapters


@pytest.fixture
def traced_here(monkeypatch):
    monkeypatch.setattr(counting, "_ask", lambda module, request, _: trace.answer(request))


@pytest.mark.parametrize("layers", [4, long(16)])
def test_the_closed_form_is_near_the_trace_where_it_was_fitted(layers, tmp_path, traced_here):
    folder = cut("meta-llama/Llama-3.2-1B-Instruct", layers, tmp_path)
    words = (f"model.name={folder}", f"data.cache_dir={tmp_path}", "train.batch_size=4")
    exact = planned(*words, "train.grad_accum=2", exact=True).plan
    closed = memory.step_bytes(replace(exact.step, traced=None), exact.layout)
    for name in ("load", "forward", "backward", "optimizer"):
        total = exact.memory.phases[name].total
        assert closed.phases[name].total == pytest.approx(total, rel=0.03), name
    assert exact.memory.peak_phase == "backward"


def test_the_closed_form_has_what_a_layer_of_an_evaluation_holds(tmp_path):
    folder = cut("meta-llama/Llama-3.1-8B-Instruct", 2, tmp_path)  # one layer holds at a time
    run = planned(f"model.name={folder}", "train.batch_size=4", "train.predict_with_generate=false")
    step, phase = setup_of(run), run.plan.memory.phases["evaluation"]
    model = build_on_meta(step.config, step.compute_dtype)
    size = TracedSize(run.config.train.eval_batch_size, run.config.model.max_seq_len)
    with tracing(model, step), torch.no_grad():
        passing = StepMeter(model.eval(), step).measure(size, 0, runs_backward=False)
    assert passing.layers > passing.kept + passing.logits, (
        "the loss needs less than a layer before it"
    )
    # copies of the adapters in 16 bits are left out
    assert phase.activations + phase.logits == pytest.approx(passing.layers, rel=0.06)


# What is shown


def test_an_exact_plan_is_a_traced_one(folder_of, monkeypatch, tmp_path, traced_here):
    monkeypatch.chdir(PROJECT_ROOT)
    settings = [f"model.name={folder_of('llama')}", "train.batch_size=2"]
    words = ["plan", "--gpus", "1xH200", "--config", NO_CONFIG]
    for setting in (*settings, f"data.cache_dir={tmp_path}"):
        words += ["--set", setting]
    plain, exact = (
        json.loads(CliRunner().invoke(cli.app, [*words, "--json", *option]).stdout)
        for option in ([], ["--exact"])
    )
    assert (plain["memory_source"], exact["memory_source"]) == ("closed form", "traced")
    for name in ("weights", "adapters", "optimizer"):
        assert exact["memory"][name] == plain["memory"][name]
    said = CliRunner().invoke(cli.app, words, env={"EXACT": "1"}).stdout
    assert "by a trace of the model's" in said


@pytest.mark.parametrize("words", ["tuning.backend=unsloth", "tuning.lora.use_dora=true"])
def test_what_cannot_be_traced_is_said_with_the_reason(words, folder_of, tmp_path, traced_here):
    monkeypatch = pytest.MonkeyPatch()
    settings = (
        f"model.name={folder_of('llama')}",
        "tuning.mode=qlora",
        f"data.cache_dir={tmp_path}",
    )
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="EXACT=1 cannot trace"):
        patched.setattr("importlib.util.find_spec", lambda name: name)  # unsloth is installed
        planned(*settings, words, exact=True)


def test_dropout_on_a_gpu_keeps_its_output_and_a_byte_per_element():
    tracker = MemoryTracker()
    with FakeTensorMode(), trace.fake_kernels(is_gpu=True):
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
    run = planned(f"model.name={tmp_path}", f"tuning.{setting}", "model.max_seq_len=1024")
    step = StepSetup(run.config, "cuda", zero_stage=0)
    exact = traced_point(step, layers, TracedSize(4, 1024))
    model = load_model(step.config, Process.alone(torch.device("cuda"), step.compute_dtype))
    # which leaves gradients to add to
    real = StepMeter(model.train(), step).measure(TracedSize(4, 1024), layers)
    assert exact.kept == pytest.approx(real.kept, rel=0.01)

    ids = torch.zeros(4, 1024, dtype=torch.int64, device="cuda")
    begun = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", step.compute_dtype):
        ones = ids[:, 1:].flatten()
        loss = fused_nll(model, model, {"input_ids": ids}, LossTokens(ones, ones, len(ones)))
    kept = torch.cuda.memory_allocated() - begun
    assert kept == pytest.approx(exact.kept + exact.logits_kept, rel=0.02)
    loss.backward()
    peak = max(exact.layers, exact.kept + exact.logits, exact.backward, exact.end)
    assert torch.cuda.max_memory_allocated() - begun == pytest.approx(peak, rel=0.05)
