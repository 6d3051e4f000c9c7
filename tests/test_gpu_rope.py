"""Rotary angles on a GPU in a run that allows TF32: those of float64, at every position."""

from pathlib import Path

import pytest
import torch

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.load import load_base
from sft_play.training.runtime import allow_tf32

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("tokens", [512, 8192, 131072])
def test_angles_are_those_of_float64(rows, tokens):
    process = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    config = Config.model_validate({"model": {"name": str(ROOT / "data" / "tiny_llama")}})
    before = torch.get_float32_matmul_precision()
    allow_tf32(process)
    try:
        rotary = load_base(config, process).model.rotary_emb
        assert torch.get_float32_matmul_precision() == "high"
        positions = torch.arange(tokens, device="cuda")[None].expand(min(rows, 2**20 // tokens), -1)
        cos, _ = rotary(torch.zeros((), device="cuda"), positions)
    finally:
        torch.set_float32_matmul_precision(before)
    half = positions[0, :, None].double() * rotary.inv_freq.double()
    expected = torch.cat([half, half], dim=-1).cos() * rotary.attention_scaling
    assert cos.dtype == torch.float32
    # an angle of 131,071 in float32 is off by 4e-3
    assert (cos.double() - expected).abs().max() <= 1e-2
