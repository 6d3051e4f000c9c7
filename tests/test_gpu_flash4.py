"""FlashAttention 4 on a Hopper GPU: equal to attention's definition, and never waited for."""

import importlib.metadata
import logging
from collections.abc import Iterator

import pytest
import torch
from test_fast_install import plain_model, settings

from sft_play.models.fast.attention import flash4, kernels
from sft_play.models.fast.attention.reference import attend_lengths
from sft_play.models.fast.attention.scoring import Scoring
from sft_play.models.fast.documents import Documents
from sft_play.models.fast.install import install_fused_kernels
from sft_play.plan import needs
from sft_play.process import Process


def why_not() -> str | None:
    """Return why these tests cannot run here."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability() != needs.FLASH4_CAPABILITY:
        return "needs a Hopper GPU"
    try:
        importlib.metadata.version(needs.FLASH4)
    except importlib.metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed: {needs.INSTALL_FLASH4}"
    return None


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SIZES = {"hidden_size": 128, "intermediate_size": 192}
RAGGED = (1, 700, 129, 64, 1, 1100, 53)
SHORT = (60, 1, 400, 100)
MANY = (3,) * 300 + (148,)


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        flash4.choose(True)
        yield
    lines = [record.message for record in caplog.records if record.name == flash4.__name__]
    assert lines == [], "torch's kernels took over"
    flash4.choose(False)


def numbers(
    lengths: tuple[int, ...], heads: int, key_heads: int, features: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    made = []
    for count in (heads, key_heads, key_heads):
        shape = (1, sum(lengths), count, features)
        made.append(torch.randn(shape, generator=draw, device="cuda").to(dtype).requires_grad_())
    return made


def documents_of(lengths: tuple[int, ...]) -> Documents:
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return Documents(starts, max(lengths))


def results(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an output and the gradients of the inputs for a gradient that is the same each time."""
    draw = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(out.shape, generator=draw, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_right(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    features: int,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare attention of packed documents with float32, document by document."""
    inputs = numbers(lengths, *heads, features, dtype)
    scoring = Scoring(features**-0.5, window)
    found = results(kernels.attend(*inputs, scoring, documents_of(lengths)), inputs)
    assert flash4.kernel_in_force().startswith("FlashAttention 4")
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    flat = attend_lengths(*(t.flatten(0, 1) for t in wide), scoring, list(lengths))
    for right, other in zip(results(flat[None], wide), found, strict=True):
        assert gap(right, other) <= flash4.LARGEST_ERROR


def gap(right: torch.Tensor, other: torch.Tensor) -> float:
    """Return the size of a difference, over that of the right tensor."""
    return float((other.float() - right.float()).norm() / right.float().norm())


@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("features", flash4.HEADS)
def test_ragged_documents_are_as_defined_with_and_without_a_window(
    chosen: None, features: int, window: int | None
) -> None:
    assert_right(RAGGED, (8, 2), features, window)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2)], ids=str)
def test_any_number_of_key_heads_is_as_defined(chosen: None, heads: tuple[int, int]) -> None:
    assert_right(RAGGED, heads, 128)


@pytest.mark.parametrize("features", [32, 80, 256])
def test_other_head_sizes_go_to_torchs_kernels(chosen: None, features: int) -> None:
    inputs = numbers(SHORT, 4, 2, features, torch.bfloat16)
    documents, scoring = documents_of(SHORT), Scoring(features**-0.5)
    found = kernels.attend(*inputs, scoring, documents)
    flat = [tensor.flatten(0, 1) for tensor in inputs]
    assert torch.equal(found[0], kernels.attend_torch_varlen(*flat, scoring, documents))
    assert flash4.kernel_in_force() == "torch"


@pytest.mark.parametrize("lengths", [SHORT, MANY, (5, 1, 3), (1024, 1024)], ids=str)
def test_short_many_and_equal_documents_are_as_defined(
    chosen: None, lengths: tuple[int, ...]
) -> None:
    assert_right(lengths, (4, 2), 64)


def test_float16_is_as_defined(chosen: None) -> None:
    assert_right(RAGGED, (4, 2), 128, dtype=torch.float16)


def test_rows_without_boundaries_are_documents(chosen: None) -> None:
    inputs = numbers((512,), 4, 2, 64, torch.bfloat16)
    rows = [tensor.view(2, 256, *tensor.shape[2:]) for tensor in inputs]
    scoring = Scoring(0.125)
    one = kernels.attend(*rows, scoring).view(1, 512, 4, 64)
    two = kernels.attend(*inputs, scoring, documents_of((256, 256)))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("implementation", "features", "expected"),
    [
        ("flash_attention_4", 64, "FlashAttention 4 (flash-attn-4 "),
        ("flash_attention_4", 80, f"torch; FlashAttention 4 {flash4.NO_KERNEL}"),
        ("auto", 64, "torch"),
        ("sdpa", 64, "torch"),
    ],
)
def test_an_installed_model_says_which_kernel_it_uses(
    implementation: str, features: int, expected: str
) -> None:
    sizes = {**SIZES, "head_dim": features}
    model = plain_model("llama", "lora", std=0.08, dtype=torch.bfloat16, **sizes).cuda()
    config = settings("lora")
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"attn_implementation": implementation})}
    )
    process = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    kernels_of = install_fused_kernels(model, config, process)
    assert "attention" in kernels_of.on
    assert kernels_of.kernels["attention"].startswith(expected)
    assert implementation not in ("auto", "sdpa") or kernels_of.kernels["attention"] == "torch"
    flash4.choose(False)


def test_deterministic_gradients_are_the_same_to_the_bit(chosen: None) -> None:
    inputs = numbers(RAGGED, 8, 2, 128, torch.bfloat16)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out = kernels.attend(*inputs, Scoring(0.1), documents_of(RAGGED))
            runs.append(results(out, inputs))
    finally:
        torch.use_deterministic_algorithms(before)
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


def test_a_call_does_not_wait_for_the_gpu_and_can_be_recorded(chosen: None) -> None:
    """As CUDA graphs do: with boundaries that change, and empty documents at the end."""
    inputs = numbers((1024,), 4, 2, 64, torch.bfloat16)
    documents = Documents(torch.zeros(17, dtype=torch.int32, device="cuda"), 1024)
    grad = torch.randn_like(inputs[0])

    def fill(*lengths: int) -> None:
        documents.boundaries.fill_(1024)
        documents.boundaries[: len(lengths) + 1] = documents_of(lengths).boundaries

    def step() -> list[torch.Tensor]:
        out = kernels.attend(*inputs, Scoring(0.125), documents)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    fill(1024)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recorded = step()
    for lengths in ((300, 700, 24), (1, 1000, 20, 3)):
        fill(*lengths)
        graph.replay()
        for one, two in zip(step(), recorded, strict=True):
            assert gap(one, two) <= flash4.LARGEST_ERROR


def test_memory_of_a_backward_pass_is_no_more_than_the_trace_counts(chosen: None) -> None:
    """`fake_kernels.FakeFlashAttention`, but for rounding up to tiles."""
    tokens, heads, key_heads, features = 8192, 32, 8, 128
    lengths = (2048,) * 4
    inputs = numbers(lengths, heads, key_heads, features, torch.bfloat16)
    documents = documents_of(lengths)
    out = kernels.attend(*inputs, Scoring(0.1), documents)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, inputs, grad, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, inputs, grad, retain_graph=True)
    used = torch.cuda.max_memory_allocated() - before
    gradients = 2 * tokens * (heads + 2 * key_heads) * features
    sums = 4 * tokens * heads * features + 4 * tokens * heads
    grouped = 2 * 2 * tokens * heads * features
    assert used <= 1.01 * (gradients + sums + grouped)
