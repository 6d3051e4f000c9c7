"""plan/known_models.json: the sizes of well-known models against the published parameters."""

import json

import pytest

from sft_play.errors import EnvironmentFault
from sft_play.plan.model_shape import KNOWN, known_config, known_models, load_shape

# Billions of weights of the language model, by model card, report or the hub's count of stored
# weights (tied embeddings once).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-2-13b-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-70B": 70.554,
    "meta-llama/Llama-3.1-405B": 405.85,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-72B": 72.706,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-32B": 32.762,
    "google/gemma-2-2b": 2.614,
    "google/gemma-2-9b": 9.242,
    "google/gemma-2-27b": 27.227,
    "google/gemma-3-1b-pt": 1.000,
    "google/gemma-3-4b-pt": 3.884,
    "google/gemma-3-12b-pt": 11.771,
    "google/gemma-3-27b-pt": 27.016,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "mistralai/Mistral-7B-v0.3": 7.248,
    "mistralai/Mistral-Nemo-Base-2407": 12.248,
    "mistralai/Mistral-Small-24B-Base-2501": 23.572,
    "microsoft/Phi-3-mini-4k-instruct": 3.821,
    "microsoft/Phi-3-medium-4k-instruct": 13.960,
    "microsoft/phi-4": 14.660,
    "microsoft/Phi-4-mini-instruct": 3.836,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-360M": 0.3618,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.100,
    "allenai/OLMo-2-1124-7B": 7.299,
    "allenai/OLMo-2-1124-13B": 13.716,
    "ibm-granite/granite-3.1-2b-base": 2.534,
    "ibm-granite/granite-3.1-8b-base": 8.171,
    "01-ai/Yi-1.5-6B": 6.061,
    "01-ai/Yi-1.5-9B": 8.829,
    "01-ai/Yi-1.5-34B": 34.389,
}


def test_every_shape_has_a_published_count_to_be_held_to() -> None:
    assert set(json.loads(KNOWN.read_text())) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_shape_has_the_parameters_that_its_maker_publishes(name: str) -> None:
    assert load_shape(name, None, {}).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_names_that_share_a_shape_are_that_shape_in_any_case() -> None:
    assert len(known_models()) > 2 * len(PUBLISHED)
    # no name stands for two shapes
    assert len({name.lower() for name in known_models()}) == len(known_models())
    eight = load_shape("meta-llama/Llama-3.1-8B", None, {})
    for name in (
        "meta-llama/Llama-3.1-8B-Instruct",
        "META-LLAMA/llama-3.1-8b",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ):
        assert load_shape(name, None, {}) == eight
    assert known_config("meta-llama/Llama-3.1-9B") is None
    # a key of the file, not of a config
    assert "also" not in known_config("meta-llama/Llama-3.1-8B")


def test_the_nearest_known_names_are_told_where_the_hub_gives_nothing() -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"set MODEL_NAME to the folder; known without the hub: "
        r"meta-llama/Llama-3.2-1B-Instruct, ",
    ):
        # no name that the hub could have, so that nothing is asked
        load_shape("a/b/llama-3.2-1b-instruct", None, {})
    with pytest.raises(EnvironmentFault, match=r"set MODEL_NAME to the folder$"):
        load_shape("a/b/zzz", None, {})
