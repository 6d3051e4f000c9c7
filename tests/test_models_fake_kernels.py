"""sft_play.models.trace: fakes save and return what the kernels do."""

from typing import Any

import pytest
import torch
from test_fast_residual import LLAMA
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from traced_steps import storage_bytes

from sft_kernels import triton_kernels
from sft_kernels.attention.reference import AllocatedFlashAttention
from sft_kernels.linears import glu
from sft_kernels.norms import residual
from sft_play.models import trace


def kept_and_made(
    function: Any, *inputs: Tensor
) -> tuple[int, list[tuple[torch.Size, torch.dtype]]]:
    """Bytes that a function saves beyond its inputs, and the outputs."""
    known, saved = {tensor.untyped_storage()._cdata for tensor in inputs}, []
    with saved_tensors_hooks(
        lambda tensor: saved.append(tensor.detach()) or tensor, lambda tensor: tensor
    ):
        outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(
        [output.sum() for output in outputs], [tensor for tensor in inputs if tensor.requires_grad]
    )
    made = [(tensor.shape, tensor.dtype) for tensor in (*outputs, *gradients)]
    return storage_bytes(
        tensor
        for tensor in saved
        if tensor.untyped_storage()._cdata not in known and tensor.numel() > 1
    ), made


def random(*shape: int, trained: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=trained)


def test_real_tensors_are_attended_to_among_fakes():
    inputs = (random(2, 4, 32, 16), random(2, 4, 32, 16), random(2, 4, 32, 16))
    real = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    with trace.fake_kernels(is_gpu=True):
        assert torch.equal(functional.scaled_dot_product_attention(*inputs, is_causal=True), real)


@pytest.mark.parametrize("keys", [4, 2])
def test_flash_attention_keeps_what_torchs_does(keys):
    def attend(*tensors):
        return AllocatedFlashAttention.apply(*tensors, None)

    inputs = (random(2, 4, 32, 16), random(2, keys, 32, 16), random(2, keys, 32, 16))
    if keys == 4:  # torch's on a CPU repeats grouped keys; a GPU's does not
        real = kept_and_made(
            lambda *tensors: functional.scaled_dot_product_attention(*tensors, is_causal=True),
            *inputs,
        )
        assert kept_and_made(attend, *inputs) == real
    kept, made = kept_and_made(attend, *inputs)
    assert kept == 4 * 2 * 4 * 32 * (16 + 1)
    assert [shape for shape, _ in made[1:]] == [tensor.shape for tensor in inputs]


def test_the_kernels_of_the_fast_path_keep_what_their_formulas_do():
    x, residual_x, weight = random(2, 8, 16), random(2, 8, 16), random(16, trained=False)
    gate, up = random(8, 24), random(8, 24)
    joined, activated = (
        (lambda *tensors: residual.AddNormFunction.apply(*tensors, LLAMA)),
        (lambda *tensors: glu.GluFunction.apply(*tensors, "silu")),
    )
    real = kept_and_made(joined, x, residual_x, weight), kept_and_made(activated, gate, up)
    with trace.fake_kernels(is_gpu=True):
        assert (
            kept_and_made(joined, x, residual_x, weight),
            kept_and_made(activated, gate, up),
        ) == real


def test_fakes_are_gone_afterwards():
    before = (
        triton_kernels.is_traced,
        glu.glu_forward,
        functional.scaled_dot_product_attention,
        torch.is_autocast_enabled,
    )
    with pytest.raises(KeyError), trace.fake_kernels(is_gpu=True):
        assert triton_kernels.is_traced
        raise KeyError
    assert (
        triton_kernels.is_traced,
        glu.glu_forward,
        functional.scaled_dot_product_attention,
        torch.is_autocast_enabled,
    ) == before
