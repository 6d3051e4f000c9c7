"""Models, machines, steps and plans that the tests of sft_play.plan share."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from conftest import NO_CONFIG

from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load_merged
from sft_play.plan.batch import BatchRequest
from sft_play.plan.cards import parse_hardware
from sft_play.plan.config_json import load_facts
from sft_play.plan.devices import Hardware
from sft_play.plan.memory import GIB, PhaseBytes, StepBytes, step_bytes
from sft_play.plan.model_shape import ModelShape, shape_of
from sft_play.plan.probe_fit import MeasuredFit, ProbePoint
from sft_play.plan.resolve import resolve_plan
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.step import Layout, StepSpec


def load_shape(name: str, revision: str | None, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a local model, a well-known one, or one in the hub's cache or on the hub."""
    facts = load_facts(name, revision, environ)
    return replace(shape_of(facts.config, name), structure=facts.structure)


EMPTY = str(NO_CONFIG)
CPU = Hardware("cpu", (), 8, 64 * GIB)
EIGHT_B = ModelShape(  # Llama 3.1 8B
    vocab=128256,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    is_tied=False,
    model_type="llama",
)
STEP = StepSpec(
    model=EIGHT_B,
    mode="lora",
    compute_bytes=2,
    weight_bytes=2,
    optim="adamw_torch",
    double_quant=True,
    is_fast=False,
    zero_stage=0,
    offload=False,
    is_gpu=True,
)
LAYOUT = Layout(batch_size=2, grad_accum=2, world_size=1, max_seq_len=512)
REQUEST = BatchRequest(
    batch_size="auto",
    grad_accum="auto",
    effective_batch=32,
    is_effective_set=False,
    gradient_checkpointing="auto",
    row=Layout(batch_size=1, grad_accum=1, world_size=1, max_seq_len=2048),
    layers=10,
)


def asked(request: BatchRequest = REQUEST, **changes: Any) -> BatchRequest:
    """Return a request with these fields of it, or of its row, changed."""
    of_row = {field.name for field in fields(Layout)} - {"batch_size", "grad_accum"}
    row = {name: changes.pop(name) for name in of_row & changes.keys()}
    return replace(request, row=replace(request.row, **row), **changes)


class Example(NamedTuple):
    """A step, and how its rows are cut into micro-batches."""

    step: StepSpec
    layout: Layout

    def changed(self, **changes: Any) -> "Example":
        """Return the example with these fields of its step or its layout changed."""
        of_step = {field.name for field in fields(StepSpec)} & changes.keys()
        step = replace(self.step, **{name: changes.pop(name) for name in of_step})
        return Example(step, replace(self.layout, **changes))

    @property
    def memory(self) -> StepBytes:
        """The bytes of its phases."""
        return step_bytes(self.step, self.layout)


EXAMPLE = Example(STEP, LAYOUT)


def peak(**changes: Any) -> int:
    """Return the bytes of the example's fullest phase."""
    return EXAMPLE.changed(**changes).memory.predicted_peak


def held(phase: str = "backward", **changes: Any) -> PhaseBytes:
    """Return the bytes that a phase of the example holds."""
    return EXAMPLE.changed(**changes).memory.phases[phase]


# The step and the request of a run that a probe measures
PROBED_STEP = replace(STEP, is_fast=True, optim="adamw_torch_fused")
PROBED_REQUEST = replace(REQUEST, is_effective_set=True, layers=EIGHT_B.layers)


def unchanged(name: str, size: int) -> float:
    return size


def measured(
    step: StepSpec,
    tokens: int,
    checkpointed_layers: int,
    world_size: int = 1,
    change: Callable[[str, int], float] = unchanged,
) -> ProbePoint:
    """Return the point that a device would give whose phases are the closed form's, changed."""
    layout = Layout(1, 2, world_size, tokens, checkpointed_layers)
    closed = step_bytes(step, layout).phases
    phases = {}
    for name in ("forward", "backward", "optimizer"):
        phases[name] = round(change(name, closed[name].total)) - closed[name].context
    return ProbePoint(tokens, checkpointed_layers, accumulates=True, phases=phases)


def fit_of(
    step: StepSpec = PROBED_STEP,
    checkpointed_layers: int = 0,
    world_size: int = 1,
    change: Callable[[str, int], float] = unchanged,
) -> MeasuredFit:
    """Return the fit of two such points, of 1,024 and 2,048 tokens."""
    small = measured(step, 1024, checkpointed_layers, world_size, change)
    large = measured(step, 2048, checkpointed_layers, world_size, change)
    return MeasuredFit(step, small, large)


def plan_for(
    gpus: str | Hardware = "1xH200",
    *settings: str,
    config: str = EMPTY,
    environ: Mapping[str, str] | None = None,
    distributed: bool = True,
    use_deepspeed: bool = False,
) -> PlannedRun:
    """Return the plan of a config on some hardware; `environ` holds the variables of make."""
    environ = environ or {}
    hardware = parse_hardware(gpus) if isinstance(gpus, str) else gpus
    with contextlib.chdir(PROJECT_ROOT):  # the path of the model that ships is relative to it
        loaded = load_merged(config, environ, settings)
        call = invocation.read_invocation(environ)
        return resolve_plan(loaded, call, hardware, environ, distributed, use_deepspeed)
