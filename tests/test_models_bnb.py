"""4-bit weights: what this machine's kernels make of them."""

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from transformers import BitsAndBytesConfig

from sft_play.errors import EnvironmentFault
from sft_play.models import bnb
from sft_play.models.bnb import pack_4bit

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


class OneWeight(nn.Module):
    """A model with one packed weight of normal random numbers."""

    def __init__(self, *shape: int):
        super().__init__()
        self.plain = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.weight = pack_4bit(self.plain, NF4)

    def error(self) -> float:
        """Return the relative error of what is unpacked: 0.09 for NF4 in blocks of 64."""
        unpacked = dequantize_4bit(self.weight.data, self.weight.quant_state)
        return float((unpacked - self.plain).norm() / self.plain.norm())


@pytest.mark.parametrize("shape", [(32, 32), (5, 96), (3, 8, 32)])
def test_rows_of_broken_blocks_are_unpacked_rightly_or_refused(shape):
    model = OneWeight(*shape)
    if model.error() < 0.12:
        bnb.refuse_wrong_unpacking(model)
        return
    with pytest.raises(EnvironmentFault, match=r"unpacks weight .*; set TUNING_MODE=lora"):
        bnb.refuse_wrong_unpacking(model)


def test_a_weight_that_is_unpacked_to_other_numbers_is_refused(monkeypatch):
    """As a kernel does it that takes the scales of other blocks where rows are no whole ones."""

    def wrongly(packed, state):
        unpacked = dequantize_4bit(packed, state)
        return unpacked.roll(1, dims=0) if len(state.shape) > 1 else unpacked

    monkeypatch.setattr(bnb, "dequantize_4bit", wrongly)
    with pytest.raises(EnvironmentFault, match=r"\(5, 96\) to other numbers than were packed"):
        bnb.refuse_wrong_unpacking(OneWeight(5, 96))
    bnb.refuse_wrong_unpacking(OneWeight(5, 128))


def test_rows_of_whole_blocks_are_unpacked_rightly():
    assert OneWeight(5, 128).error() < 0.12
