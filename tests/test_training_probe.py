"""sft_play.training.probe: measured points are used again where a step would take as much."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_examples import plan_for

from sft_kernels.process import Process
from sft_play.config.loader import PROJECT_ROOT
from sft_play.plan import probe_fit
from sft_play.plan.memory import step_bytes
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training.context import RunContext
from sft_play.training.memory import MemoryMeter
from sft_play.training.probe import Probe

PLANNED = plan_for("1xH200")


def fingerprint(planned: PlannedRun = PLANNED) -> str:
    """Return what a probe of this run keeps its points under."""
    process = Process.alone(torch.device("cpu"))
    context = RunContext(planned, RunFolder("run"), process, MemoryMeter(process))
    rows = SimpleNamespace(samples=())
    engine = SimpleNamespace(model=torch.nn.Linear(1, 1))
    trainer = SimpleNamespace(engine=engine, rows=rows)
    return Probe(context, trainer)._fingerprint()


def with_plan(**fields: Any) -> PlannedRun:
    return replace(PLANNED, plan=replace(PLANNED.plan, **fields))


def with_setting(section: str, **settings: Any) -> PlannedRun:
    changed = getattr(PLANNED.config, section).model_copy(update=settings)
    return replace(PLANNED, config=PLANNED.config.model_copy(update={section: changed}))


PLAN = PLANNED.plan
OTHERS = {
    "model": with_plan(step=replace(PLAN.step, model=replace(PLAN.step.model, layers=16))),
    "row length": with_plan(layout=replace(PLAN.layout, max_seq_len=77)),
    "deepspeed": with_plan(deepspeed=DeepSpeedPlan({"train_batch_size": 4}, "a.json")),
    "tuning": with_setting("tuning", bnb_4bit_quant_type="fp4"),
    "precision": with_setting("train", bf16=False, fp16=True),
    "ddp": with_setting("train", ddp_bucket_cap_mb=5),
}
SAME = {
    "layout": with_plan(layout=replace(PLAN.layout, batch_size=1, checkpointed_layers=1)),
    "learning rate": with_setting("train", learning_rate=0.5),
}


@pytest.mark.parametrize("name", OTHERS | SAME)
def test_what_a_step_follows_from_and_nothing_else_changes_the_fingerprint(name):
    assert (fingerprint((OTHERS | SAME)[name]) == fingerprint()) == (name in SAME)


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_that_deepspeed_creates_in_its_first_step_are_counted(stage):
    path = PROJECT_ROOT / "configs" / f"deepspeed_zero{stage}.json"
    environ = {"DEEPSPEED_CONFIG": str(path)}
    planned = plan_for("4xH200", "tuning.mode=full", use_deepspeed=True, environ=environ)
    step, layout = planned.plan.step, planned.plan.layout
    process = Process.alone(torch.device("cpu"))
    context = RunContext(planned, RunFolder("run"), process, MemoryMeter(process))
    probe = Probe(context, SimpleNamespace(engine=SimpleNamespace(is_deepspeed=True)))
    assert probe._later_state_bytes() == 0, "without a GPU nothing was measured to correct"
    probe.memory = SimpleNamespace(is_exact=True)
    held = step_bytes(step, layout).peak.optimizer
    masters = 4 * step.trained_weights // layout.world_size
    assert probe._later_state_bytes() == pytest.approx(held - masters, abs=2)
    assert probe._later_state_bytes() > 0


def test_another_gpu_or_other_code_changes_the_fingerprint(monkeypatch):
    before = fingerprint()
    monkeypatch.setattr(Process, "gather", lambda process, value: [("NVIDIA H100", 80 << 30)])
    on_h100 = fingerprint()
    monkeypatch.setattr(probe_fit, "digest_of_step", lambda: "0")
    assert len({before, on_h100, fingerprint()}) == 3
