"""Generation without a copy of keys for each query head: the answers of transformers' own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_fast_install import plain_model
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sft_play.evaluation.generate import attend_one_token, shared_keys

PROMPTS = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13], [0, 14, 15, 16, 17, 18]])
MASK = (PROMPTS > 0).long()
NEW = 8


def answered(model: Any, mask: torch.Tensor | None = MASK, **options: Any) -> Any:
    """Return the ids and the scores of a greedy answer."""
    return model.generate(
        input_ids=PROMPTS,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of query heads of each token that is attended for without copies."""
    heads: list[int] = []

    def noting(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        heads.append(query.shape[1])
        return attend_one_token(query, *rest)

    monkeypatch.setattr("sft_play.evaluation.generate.attend_one_token", noting)
    yield heads


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen2-window"])
def test_answers_are_those_of_repeated_keys(
    name: str, options: dict[str, Any], seen: list[int]
) -> None:
    model = plain_model(name).eval()
    model.config.use_cache = True
    expected = answered(model, **options)
    assert not seen
    with torch.no_grad(), shared_keys():
        found = answered(model, **options)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(seen) == layers * (NEW - 1), "the prompts are read by transformers' own function"
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("is_additive", [False, True])
def test_one_token_sees_what_its_mask_lets_it(heads: int, is_additive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads, 1, 16, generator=generator)
    key, value = (torch.randn(3, 2, 9, 16, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1, 1, 9, generator=generator) > 0.4
    mask[..., -1] = True
    if is_additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    repeated = [tensor.repeat_interleave(heads // 2, dim=1) for tensor in (key, value)]
    for each in (mask, None):
        expected = functional.scaled_dot_product_attention(
            query, *repeated, attn_mask=each, scale=0.3
        )
        found = attend_one_token(query, key, value, each, 0.3)
        torch.testing.assert_close(found, expected.transpose(1, 2))


def test_attention_is_transformers_own_again_afterwards() -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(RuntimeError, match="stops"), shared_keys():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not own
        raise RuntimeError("stops")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
