"""sft_play.training.probe: measured points are used again where a step would take as much."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_examples import plan_for

from sft_play.plan import probe_fit
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun
from sft_play.process import Process
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder
from sft_play.training import probe as probe_module
from sft_play.training.context import RunContext
from sft_play.training.memory import MemoryMeter
from sft_play.training.probe import Probe

PLANNED = plan_for("1xH200")


def fingerprint(planned: PlannedRun = PLANNED) -> str:
    """Return what a probe of this run keeps its points under."""
    process = Process.alone(torch.device("cpu"))
    context = RunContext(planned, RunFolder("run"), process, MemoryMeter(process))
    rows = SimpleNamespace(samples=())
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1), train_dataset=rows)
    return Probe(context, trainer)._fingerprint()


def with_plan(**fields: Any) -> PlannedRun:
    return replace(PLANNED, plan=replace(PLANNED.plan, **fields))


def with_setting(section: str, **settings: Any) -> PlannedRun:
    changed = getattr(PLANNED.config, section).model_copy(update=settings)
    return replace(PLANNED, config=PLANNED.config.model_copy(update={section: changed}))


PLAN = PLANNED.plan
OTHERS = {
    "model": with_plan(step=replace(PLAN.step, model=replace(PLAN.step.model, layers=16))),
    "step": with_plan(step=replace(PLAN.step, lora_rank=8)),
    "row length": with_plan(layout=replace(PLAN.layout, max_seq_len=77)),
    "packing": with_plan(packing=not PLAN.packing),
    "strategy": with_plan(ranks=replace(PLAN.ranks, strategy="ddp")),
    "deepspeed": with_plan(deepspeed=DeepSpeedPlan({"train_batch_size": 4}, "a.json")),
    "tuning": with_setting("tuning", bnb_4bit_quant_type="fp4"),
    "name": with_setting("model", name="other"),
    "attention": with_setting("model", attn_implementation="eager"),
    "precision": with_setting("train", bf16=False, fp16=True),
    "ddp": with_setting("train", ddp_bucket_cap_mb=5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_a_step_follows_from_changes_the_fingerprint(name: str) -> None:
    assert fingerprint(OTHERS[name]) != fingerprint()


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (probe_module, "fused_kernels_of", lambda model: SimpleNamespace(on={"loss": 1})),
        (stamp, "versions", lambda: {"torch": "0"}),
        (probe_fit, "digest_of_code", lambda: "0"),
        (Process, "gather", lambda process, value: [("NVIDIA H100", 80 << 30)]),
    ],
    ids=["kernels", "versions", "code", "gpus"],
)
def test_whatever_computes_a_step_changes_the_fingerprint(
    owner: Any, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint()
    monkeypatch.setattr(owner, name, other)
    assert fingerprint() != before


@pytest.mark.parametrize(
    "planned",
    [
        with_plan(layout=replace(PLAN.layout, batch_size=1, checkpointed_layers=1)),
        with_plan(budget_bytes=1),
        with_setting("train", learning_rate=0.5),
    ],
    ids=["layout", "budget", "learning rate"],
)
def test_what_a_step_does_not_follow_from_keeps_the_fingerprint(planned: PlannedRun) -> None:
    assert fingerprint(planned) == fingerprint(PLANNED)
