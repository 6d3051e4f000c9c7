"""The fast path on a GPU: as close to float32 as the plain path, and without synchronizing."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_fast_install import MODELS, batches, plain_model, settings
from test_fast_residual import GEMMA, LLAMA

from sft_kernels.install import FusedKernels, fused_kernels_of
from sft_kernels.norms.residual import ReferenceNorms, TritonNorms
from sft_kernels.process import Process
from sft_play.data.batch import Batch
from sft_play.models.fast import install_fused_kernels
from sft_play.models.loss import sum_nll

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
}  # kernels want multiples of 8 and more
MODES = ["lora", "full"]


def on_gpu(name: str, mode: str, dtype: torch.dtype) -> Any:
    return plain_model(name, mode, std=0.08, dtype=dtype, **SIZES).cuda()


def make(model: Any, mode: str, dtype: torch.dtype) -> FusedKernels:
    return install_fused_kernels(
        model, settings(mode), Process.alone(torch.device("cuda", 0), dtype)
    )


def loss_of(model: Any, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Summed nats of a micro-batch, computed as a training step computes them."""
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        return sum_nll(model, model, batch)


def on_device(is_packed: bool, names_boundaries: bool, in_one_row: bool = False) -> Iterator[Batch]:
    for batch in batches(is_packed, names_boundaries, in_one_row):
        yield batch.to(torch.device("cuda"))


def gradients(model: Any, is_packed: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of a step of 16 samples, and its loss."""
    model.zero_grad()
    total = torch.zeros((), device="cuda")
    for batch in on_device(
        is_packed, fused_kernels_of(model).reads_boundaries, fused_kernels_of(model).in_one_row
    ):
        loss = loss_of(model, batch, dtype) / 100
        loss.backward()
        total += loss.detach()
    return {
        "loss": total,
        **{
            name: parameter.grad.float()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    }


def error(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the root mean square over tensors of the relative distance to the reference."""
    assert found.keys() == reference.keys()
    return (
        torch.stack(
            [(found[name] - wanted).norm() / wanted.norm() for name, wanted in reference.items()]
        )
        .square()
        .mean()
        .sqrt()
        .item()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fast_step_is_as_near_to_float32_as_a_plain_one(name, is_packed, mode):
    """Both round to bfloat16, at different places.

    Allowed are 1.25 of the plain error, and 0.1 % of a gradient's length.
    """
    model = on_gpu(name, mode, torch.bfloat16)
    reference = gradients(copy.deepcopy(model).float(), is_packed, torch.float32)
    plain = error(gradients(model, is_packed, torch.bfloat16), reference)
    installed = make(model, mode, torch.bfloat16)
    assert {"attention", "mlp", "norms", "loss"} <= installed.on.keys()
    fast = error(gradients(model, is_packed, torch.bfloat16), reference)
    assert 1e-4 < plain < 0.1, "else there is nothing to compare"
    assert fast <= 1.25 * plain + 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_in_float32_the_kernels_compute_the_plain_step(mode):
    """All but attention, which computes in 16 bits. float32, summed in another order."""
    model = on_gpu("qwen3", mode, torch.float32)
    plain = gradients(model, True, torch.float32)
    installed = make(model, mode, torch.float32)
    assert (
        "16 bits" in installed.off["attention"] and {"norms", "mlp", "loss"} <= installed.on.keys()
    )
    assert error(gradients(model, True, torch.float32), plain) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # Qwen 3 has norms of queries and keys
def test_full_training_on_float32_weights_goes_through_the_kernels(name):
    model = on_gpu(name, "full", torch.float32)
    reference, plain = gradients(model, True, torch.float32), gradients(model, True, torch.bfloat16)
    installed = make(model, "full", torch.bfloat16)
    assert "attention" in installed.on
    assert (
        error(gradients(model, True, torch.bfloat16), reference)
        <= 1.25 * error(plain, reference) + 1e-3
    )


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "phi3"])
def test_a_fast_step_never_waits_for_the_gpu(name, is_packed):
    model = on_gpu(name, "lora", torch.bfloat16)
    make(model, "lora", torch.bfloat16)
    waiting = list(
        on_device(
            is_packed, fused_kernels_of(model).reads_boundaries, fused_kernels_of(model).in_one_row
        )
    )
    loss_of(model, waiting[0], torch.bfloat16).backward()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in waiting:
            loss_of(model, batch, torch.bfloat16).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_evaluation_and_generation_are_the_same_to_the_bit():
    model = on_gpu("llama", "lora", torch.bfloat16).eval()
    ids = next(iter(on_device(False, False))).ids

    @torch.no_grad()
    def outcome():
        return model(input_ids=ids).logits, model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )

    before = outcome()
    make(model, "lora", torch.bfloat16)
    assert all(torch.equal(one, two) for one, two in zip(before, outcome(), strict=True))


@pytest.mark.parametrize("kind", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("features", [40, 2048, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_the_residual_stream_compute_their_formulas(kind, features, dtype):
    """The result is rounded once: the tolerance is one step of the dtype, 2^-8 for bfloat16.

    Float32 sums have their own tolerance.
    """
    draw = torch.Generator("cuda").manual_seed(0)
    x, r, dy, ds = (
        torch.randn(3, 5, features, generator=draw, device="cuda").to(dtype) for _ in range(4)
    )
    weight = torch.randn(features, generator=draw, device="cuda").to(dtype)
    tolerance = (
        {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for residual in (r, None):
        found, wanted = (
            where.forward(x, residual, weight, kind) for where in (TritonNorms, ReferenceNorms)
        )
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found[0], wanted[0], **tolerance)
        torch.testing.assert_close(found[2], wanted[2].squeeze(-1), rtol=1e-5, atol=0)
        one = TritonNorms.backward(dy, ds, found[1], weight, found[2], kind)
        torch.testing.assert_close(
            one, ReferenceNorms.backward(dy, ds, wanted[1], weight, wanted[2], kind), **tolerance
        )
