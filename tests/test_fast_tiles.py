"""MLPs of long rows in tiles: the same step, no more computed, and attention in halves of its heads."""

from collections import Counter

import pytest
import torch
from architecture_steps import adapted, fused, gap, settings, trained_step
from test_published_training import without_dropout
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from sft_kernels.attention import kernels
from sft_kernels.attention.reference import Scoring
from sft_kernels.linears import mlp, tiles
from sft_kernels.packed import Documents
from sft_play.models.checkpointing import checkpoint_layers

TILE = 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_TOKENS", TILE)


def recomputed(model_type: str, mode: str, **lora: object) -> torch.nn.Module:
    """A model all of whose layers are recomputed."""
    chosen = settings(mode, **lora)
    model = tiny_model(model_type)
    model.config.use_cache = False
    without_dropout(model)
    made = fused(adapted(model, chosen), chosen)
    checkpoint_layers(made, 2)
    return made


@pytest.mark.parametrize(
    "model_type, mode, packed",
    [
        ("llama", "lora", True),
        ("gemma3", "full", False),
        ("phi3", "lora", False),
        ("olmo2", "full", True),
    ],
)
def test_a_step_in_tiles_is_the_step(model_type, mode, packed, monkeypatch):
    made = recomputed(model_type, mode)
    in_tiles = trained_step(made, packed)
    monkeypatch.setattr(tiles, "TILE_TOKENS", 1000)
    assert gap(trained_step(made, packed), in_tiles).is_rounding


def test_a_tile_is_computed_twice_where_the_mlp_ends_the_layer(monkeypatch):
    made = recomputed("llama", "lora")
    sizes: Counter[int] = Counter()
    computed = mlp.lora_mlp

    def count(x, **kwargs):
        sizes[len(x)] += 1
        return computed(x, **kwargs)

    monkeypatch.setattr(mlp, "lora_mlp", count)
    step = trained_step(made, True)
    tokens = 56  # of the row, which `logits_of` computes once more, without gradients
    assert step.gradients and set(sizes) == {TILE}
    assert sizes[TILE] == 2 * 2 * tokens // TILE


def test_what_a_layer_saves_of_its_mlp_is_the_input(monkeypatch):
    made = recomputed("llama", "lora")
    saved: Counter[int] = Counter()

    def note(tensor):
        saved[tensor.shape[-1]] += 1
        return tensor

    layer = made.base_model.model.model.layers[0]
    x = torch.randn(1, 64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer.mlp(x)
    output.sum().backward()
    assert saved == {32: 1} and x.grad is not None


def test_dropout_and_a_short_row_are_not_cut(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("cut into tiles")

    monkeypatch.setattr(tiles, "in_tiles", refuse)
    with_dropout = recomputed("llama", "lora", dropout=0.1)
    trained_step(with_dropout, True)
    short = recomputed("llama", "lora")
    short(input_ids=torch.arange(2 * TILE - 1)[None]).logits.sum().backward()
    with pytest.raises(AssertionError, match="cut"):
        short(input_ids=torch.arange(2 * TILE)[None])


def test_without_gradients_the_mlp_is_cut_as_well(monkeypatch):
    made = recomputed("llama", "lora").eval()
    ids = torch.arange(3 * TILE + 1)[None]
    widest: list[int] = []
    hook = made.base_model.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda _, args: widest.append(args[0].shape[0])
    )
    with torch.no_grad():
        cut = made(input_ids=ids).logits
        hook.remove()
        monkeypatch.setattr(tiles, "TILE_TOKENS", 1000)
        whole = made(input_ids=ids).logits
    assert max(widest) == TILE
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole_rows", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
def test_attention_in_parts_of_the_heads(whole_rows, sinks, monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 24, heads, 8, requires_grad=True) for heads in (12, 3, 3))
    scoring = Scoring(
        0.3, window=None if whole_rows else 5, sinks=torch.randn(12) if sinks else None
    )
    documents = None if whole_rows else Documents(torch.tensor([0, 10, 24, 48]).int(), 24)
    outputs, gradients = [], []
    for most in (2**31, query.numel() // 3):
        monkeypatch.setattr(kernels, "MAX_ELEMENTS", most)
        out = kernels.attend(query, key, value, scoring, documents)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), (query, key, value)))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_no_call_of_a_kernel_has_2_to_the_31_elements(monkeypatch):
    sizes: list[int] = []

    def note(query, key, value, scale):
        sizes.append(query.numel())
        return query

    monkeypatch.setattr(kernels, "attend_rows", note)
    query = torch.empty(1, 2**20, 32, 128, device="meta")
    key = torch.empty(1, 2**20, 8, 128, device="meta")
    assert kernels.attend(query, key, key, Scoring(1.0)).shape == query.shape
    assert sum(sizes) == query.numel() and max(sizes) < 2**31


@pytest.mark.parametrize("offloaded", [0, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_is_computed_once_where_its_outputs_are_kept(packed, offloaded):
    made = recomputed("llama", "lora")
    calls: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            calls[operation.overloadpacket.__name__] += 1
            return operation(*args, **(kwargs or {}))

    steps, computed = [], []
    for keeps in (False, True):
        checkpoint_layers(made, 2, offloaded, keeps)
        calls.clear()
        with Count():
            steps.append(trained_step(made, packed))
        computed.append(calls["_scaled_dot_product_flash_attention_for_cpu"])
    assert gap(*steps).is_rounding
    # forward, again in the backward pass, and in `logits_of`, which keeps nothing
    assert computed[0] * 2 == computed[1] * 3 > 0
