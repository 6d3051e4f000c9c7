"""Operations of a step: counted by hand, and next to what torch counts."""

import doctest

import pytest
import torch
from plan_examples import load_shape
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from sft_play.plan import speed
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.speed import pair_cost, step_flops
from sft_play.plan.step import PLAIN

TOY = ModelShape(
    vocab=64, hidden=16, intermediate=32, layers=2, heads=4, kv_heads=2, head_dim=4, is_tied=True
)
EIGHT = load_shape("meta-llama/Llama-3.1-8B-Instruct", None, {})


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(speed).failed == 0


def test_a_row_of_2048_tokens_costs_an_8b_with_lora_what_the_arithmetic_says() -> None:
    adapters = PLAIN.weights(EIGHT)
    per_token = step_flops(EIGHT, adapters, [2048], labelled=2048) / 2048
    linears, attention = 4 * (6_979_321_856 + 128256 * 4096) + 6 * 41_943_040, 6 * 32 * 4096 * 2049
    assert per_token == pytest.approx(linears + attention)


def test_tokens_without_a_label_cost_no_head() -> None:
    difference = step_flops(TOY, None, [16], labelled=16) - step_flops(TOY, None, [16], labelled=6)
    assert difference == 6 * 10 * TOY.vocab * TOY.hidden


@pytest.mark.parametrize("is_trained", [True, False], ids=["full", "frozen"])
def test_torch_counts_the_same_for_linear_layers(is_trained: bool) -> None:
    """Attention apart, which torch counts over all pairs of tokens and recomputes: eager products are taken off by hand."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tokens = 8
    embedded = torch.randn(1, tokens, 16, requires_grad=True)
    for parameter in model.parameters():
        parameter.requires_grad_(is_trained)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    rotary = 2 * 2 * tokens  # inverse frequencies (2) x positions, a product in transformers, once
    every_pair = (
        6 * 2 * tokens * tokens * 2 * 16
    )  # six products, two operations, both layers, sixteen features
    ours = step_flops(TOY, None if is_trained else 0, [tokens], labelled=tokens)
    causal_pairs = 12 * 2 * 16 * tokens * (tokens + 1) / 2
    assert counter.get_total_flops() == pytest.approx(ours - causal_pairs + every_pair + rotary)


@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_the_cost_of_a_pair_is_that_of_the_operations(tokens: int) -> None:
    adapters = PLAIN.weights(EIGHT)
    one, two = (step_flops(EIGHT, adapters, [1], 0), step_flops(EIGHT, adapters, [tokens], 0))
    share = pair_cost(EIGHT, adapters)
    assert two / one == pytest.approx(tokens * (1 + share * tokens) / (1 + share), rel=1e-3)
