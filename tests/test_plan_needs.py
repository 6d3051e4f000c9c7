"""What a run is refused for that this machine does not have."""

from dataclasses import replace

import pytest
from plan_examples import plan_for

from sft_play.errors import EnvironmentFault
from sft_play.plan import needs
from sft_play.plan.cards import parse_hardware
from sft_play.plan.devices import Hardware

FLASH_2 = "model.attn_implementation=flash_attention_2"


def test_flash_attention_2_is_refused_until_it_is_installed(monkeypatch):
    monkeypatch.setattr(needs, "FLASH2", "no-such-package")
    h200 = replace(parse_hardware("1xH200").gpus[0], uuid="GPU-1")  # a GPU of this machine
    with pytest.raises(EnvironmentFault, match=r"no-such-package .* install flash-attn"):
        plan_for(Hardware("cuda", (h200,), 8, 1 << 36), FLASH_2)
    assert plan_for("2xH200", FLASH_2).config.model.attn_implementation == "flash_attention_2"
