"""sft_play.models.checkpointing: the first layers are recomputed, which changes only memory."""

import itertools

import pytest
import torch
from tiny_models import with_adapters
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sft_play.models import checkpointing
from sft_play.models.architecture import decoder_layers
from sft_play.models.checkpointing import IN_FLIGHT, LayerOffloading, Offloaded, checkpoint_layers

CPU = torch.device("cpu")
LAYERS = 4
IDS = torch.arange(2 * 24).reshape(2, 24) % 96


def tiny(dropout: float = 0.0) -> nn.Module:
    """A Llama with adapters whose B is not zero, in training."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            use_cache=False,
            attention_dropout=dropout,
        )
    )
    return with_adapters(base, lora_dropout=dropout)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of one step from the same random state."""
    torch.manual_seed(1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes that a forward pass saves for backward, each storage once, no weights."""
    held: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss  # alive, so that no address is used twice
    del loss
    return sum(held.values())


def calls_of(model: nn.Module, layers: list[nn.Module]) -> list[int]:
    """How often each layer's MLP runs in one step."""
    calls = [0] * len(layers)

    def counter(number):
        def count(*_):
            calls[number] += 1

        return count

    handles = [
        layer.mlp.register_forward_pre_hook(counter(number)) for number, layer in enumerate(layers)
    ]
    gradients(model)
    for handle in handles:
        handle.remove()
    return calls


def test_the_first_layers_are_computed_twice_and_the_others_once():
    model = tiny()
    for count in (LAYERS, 1, 3, 0, 2):  # can be changed and taken back
        checkpoint_layers(model, count)
        assert calls_of(model, decoder_layers(model)) == [2] * count + [1] * (LAYERS - count)
    checkpoint_layers(model.eval(), LAYERS)
    assert calls_of(model, decoder_layers(model)) == [1] * LAYERS


def test_each_layer_more_keeps_fewer_bytes_by_as_much():
    kept = []
    for count in range(LAYERS + 1):
        model = tiny()
        checkpoint_layers(model, count)
        kept.append(kept_bytes(model))
    freed = [more - less for more, less in itertools.pairwise(kept)]
    assert min(freed) > 0.1 * kept[0] and max(freed) - min(freed) < 0.02 * kept[0]


def test_the_first_layer_computes_no_gradient_of_the_embeddings():
    model = tiny()
    checkpoint_layers(model, LAYERS)
    assert not model.get_input_embeddings()(IDS).requires_grad


def test_a_model_without_such_layers_checkpoints_in_its_own_way_and_says_so(caplog):
    class Loop(GPT2LMHeadModel):
        """A model of an older make, whose layers are no GradientCheckpointingLayer."""

    model = Loop(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))
    model.transformer.h = nn.ModuleDict({"0": model.transformer.h[0], "1": model.transformer.h[1]})
    checkpoint_layers(model, 1)
    assert model.is_gradient_checkpointing
    assert "Loop has no layers to choose from" in caplog.text
    caplog.clear()
    checkpoint_layers(model, 0)
    assert not model.is_gradient_checkpointing
    checkpoint_layers(tiny(), 0)
    assert not caplog.text


@pytest.fixture
def offloading(monkeypatch):
    """Offloading of tensors of any size, as `checkpoint_layers` will make it."""
    made = LayerOffloading(min_bytes=1)
    monkeypatch.setattr(checkpointing, "LayerOffloading", lambda: made)
    return made


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("count", [1, 3, LAYERS])
@pytest.mark.parametrize("offloads", [False, True])
def test_checkpointed_layers_give_the_same_gradients(offloads, count, dropout, offloading):
    """To the bit: the same operations on the same numbers, in the same random state."""
    plain, checkpointed = tiny(dropout), tiny(dropout)
    checkpoint_layers(checkpointed, count, offloads * count)
    expected = gradients(plain)
    for _ in range(2):  # steps
        for one, other in zip(expected, gradients(checkpointed), strict=True):
            assert torch.equal(one, other)
        checkpointed.zero_grad()


def test_few_inputs_wait_on_the_device_and_each_comes_before_its_layer(offloading):
    model = tiny()
    checkpoint_layers(model, LAYERS, LAYERS)
    saved: list[Offloaded] = []
    pack, unpack = offloading._pack, offloading._unpack

    def packed(tensor):
        found = pack(tensor)
        if isinstance(found, Offloaded):
            saved.append(found)
        on_device.append(count())
        return found

    def unpacked(found):
        if isinstance(found, Offloaded):
            number = saved.index(found)
            is_there.append(found.on_device is not None)
            order.append(number)
        return unpack(found)

    def count():
        return sum(one.on_device is not None for one in saved)

    on_device: list[int] = []
    is_there: list[bool] = []
    order: list[int] = []
    offloading._pack, offloading._unpack = packed, unpacked
    gradients(model)
    assert len(saved) == LAYERS and max(on_device) == IN_FLIGHT
    assert order == list(reversed(range(LAYERS)))
    assert all(is_there), "a layer waited for its input, which nobody had fetched"
    assert count() == 0, "an input stays on the device after the step"


def test_small_tensors_stay_where_they_are():
    offloading = LayerOffloading()
    small = torch.zeros(4)
    assert offloading._pack(small) is small
    numbers = torch.zeros(2**20, dtype=torch.int64)
    assert offloading._pack(numbers) is numbers


def test_a_longer_row_takes_the_place_of_a_buffer_that_is_too_small():
    offloading = LayerOffloading(min_bytes=1)
    for tokens in (100, 300, 200):
        saved = offloading._pack(torch.zeros(tokens))
        offloading._unpack(saved)
        del saved
        assert len(offloading._free[CPU]) == 1
    assert len(offloading._free[CPU][0]) == 1200  # bytes of 300 float32
