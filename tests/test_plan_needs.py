"""What a run is refused for that this machine does not have."""

from dataclasses import replace

import pytest
from plan_examples import CPU, plan_for

from sft_play.errors import EnvironmentFault
from sft_play.plan import needs
from sft_play.plan.devices import Gpu, Hardware, parse

FLASH_2 = "model.attn_implementation=flash_attention_2"
FLASH_4 = "model.attn_implementation=flash_attention_4"
ASKED = r"model.attn_implementation=flash_attention_4 \(--set model.attn_implementation\): "
INSTEAD = "set MODEL_ATTN_IMPLEMENTATION=auto"
H200 = replace(parse("1xH200").gpus[0], uuid="GPU-1")


def on(*gpus: Gpu) -> Hardware:
    return Hardware("cuda", gpus, 8, 1 << 36)


def test_flash_attention_4_is_refused_where_it_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(needs, "FLASH4", "no-such-package")
    install = "python -m tools.install add requirements-hopper.txt"
    with pytest.raises(
        EnvironmentFault, match=f"{ASKED}no-such-package is not .*; run {install}, or {INSTEAD}"
    ):
        plan_for(on(H200), FLASH_4)
    monkeypatch.setattr(needs, "FLASH4", "pytest")
    assert plan_for(on(H200), FLASH_4).config.model.has_flash4
    assert not plan_for(on(H200)).config.model.has_flash4


def test_a_plan_for_hoppers_elsewhere_does_not_need_the_package(monkeypatch) -> None:
    monkeypatch.setattr(needs, "FLASH4", "no-such-package")
    assert plan_for("2xH200", FLASH_4).config.model.has_flash4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_flash_attention_4_is_refused_on_gpus_other_than_hopper(
    capability: tuple[int, int],
) -> None:
    other = replace(H200, index=1, name="another", capability=capability)
    number = ".".join(map(str, capability))
    with pytest.raises(
        EnvironmentFault, match=f"{ASKED}cuda:1 another has capability {number}, .*; {INSTEAD}"
    ):
        plan_for(on(H200, other), FLASH_4)


def test_flash_attention_4_is_refused_on_a_cpu() -> None:
    with pytest.raises(
        EnvironmentFault, match=f"{ASKED}.*Hopper GPU.*no GPU is usable here; {INSTEAD}"
    ):
        plan_for(CPU, FLASH_4)


def test_flash_attention_2_is_refused_where_it_cannot_compute(monkeypatch) -> None:
    asked = ASKED.replace("_4", "_2")
    with pytest.raises(EnvironmentFault, match=f"{asked}.*no GPU is usable here; {INSTEAD}"):
        plan_for(CPU, FLASH_2)
    with pytest.raises(EnvironmentFault, match=f"{asked}cuda:0 Tesla T4 has capability 7.5, "):
        plan_for("1xT4", FLASH_2)
    monkeypatch.setattr(needs, "FLASH2", "no-such-package")
    build = "run .venv/bin/pip install flash-attn --no-build-isolation"
    with pytest.raises(
        EnvironmentFault, match=f"{asked}no-such-package is not .*; {build}, or {INSTEAD}"
    ):
        plan_for(on(H200), FLASH_2)
    assert plan_for("2xH200", FLASH_2).config.model.attn_implementation == "flash_attention_2"
