"""How a model in use picks tokens: as its generation_config.json says, and as the call asks."""

from transformers import GenerationConfig

from sft_play.config.sampling import SamplingRequest
from sft_play.evaluation.generate import Sampling


def sampling_of(generation: GenerationConfig, request: SamplingRequest) -> Sampling | None:
    """Return the sampling, None for the most likely token.

    A base that samples by itself does so here; what the call asks for is put in its place.
    """
    base_samples = bool(generation.do_sample)
    if request.is_greedy or (request.asks_nothing and not base_samples):
        return None
    own = Sampling()
    if base_samples:
        own = Sampling(
            generation.temperature or 1.0,
            generation.top_p,
            generation.top_k or None,  # 0 is none
            generation.min_p,
        )
    return Sampling(
        own.temperature if request.temperature is None else request.temperature,
        own.top_p if request.top_p is None else request.top_p,
        own.top_k if request.top_k is None else request.top_k,
        own.min_p,
    )
