"""How infer and chat pick tokens: the variables TEMPERATURE, TOP_P, TOP_K and SEED. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sft_play.config.invocation import Words
from sft_play.config.messages import refuse, word

VARIABLES = frozenset({"TEMPERATURE", "TOP_P", "TOP_K", "SEED"})


@dataclass(frozen=True)
class SamplingRequest:
    """What a call asks of sampling; None is what the base's generation_config.json says."""

    temperature: float | None = None  # 0: always the most likely token
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def asks_nothing(self) -> bool:
        return self.temperature is None and self.top_p is None and self.top_k is None


def read_sampling(environ: Mapping[str, str]) -> SamplingRequest:
    """Return what the variables ask for. Raises ConfigError that lists every wrong one."""
    words = Words(environ)
    request = SamplingRequest(
        temperature=_number(words, "TEMPERATURE", lambda number: number >= 0, "of at least 0"),
        top_p=_number(words, "TOP_P", lambda number: 0 < number <= 1, "above 0, at most 1"),
        top_k=words.whole_number("TOP_K", 1),
        seed=words.whole_number("SEED", 0) or 0,
    )
    if request.is_greedy and (request.top_p, request.top_k) != (None, None):
        words.problems.append("TEMPERATURE=0 draws nothing; leave TOP_P and TOP_K out")
    refuse(words.problems)
    return request


def _number(
    words: Words, name: str, is_allowed: Callable[[float], bool], bounds: str
) -> float | None:
    text = words.text(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and is_allowed(number):
        return number
    words.problems.append(f"{name}={word(text)}: write a number {bounds}")
    return None
