"""What a run is refused for that this machine does not have."""

from dataclasses import replace

import pytest
from plan_examples import CPU, plan_for

from sft_play.errors import EnvironmentFault
from sft_play.plan import needs
from sft_play.plan.cards import parse
from sft_play.plan.devices import Gpu, Hardware

FLASH_2 = "model.attn_implementation=flash_attention_2"
ASKED = r"model.attn_implementation=flash_attention_2 \(--set model.attn_implementation\): "
INSTEAD = "set MODEL_ATTN_IMPLEMENTATION=auto"
H200 = replace(parse("1xH200").gpus[0], uuid="GPU-1")


def on(*gpus: Gpu) -> Hardware:
    return Hardware("cuda", gpus, 8, 1 << 36)


def test_flash_attention_2_is_refused_where_it_cannot_compute(monkeypatch) -> None:
    with pytest.raises(EnvironmentFault, match=f"{ASKED}.*no GPU is usable here; {INSTEAD}"):
        plan_for(CPU, FLASH_2)
    with pytest.raises(EnvironmentFault, match=f"{ASKED}cuda:0 Tesla T4 has capability 7.5, "):
        plan_for("1xT4", FLASH_2)
    monkeypatch.setattr(needs, "FLASH2", "no-such-package")
    build = "run .venv/bin/pip install flash-attn --no-build-isolation"
    with pytest.raises(
        EnvironmentFault, match=f"{ASKED}no-such-package is not .*; {build}, or {INSTEAD}"
    ):
        plan_for(on(H200), FLASH_2)
    assert plan_for("2xH200", FLASH_2).config.model.attn_implementation == "flash_attention_2"
