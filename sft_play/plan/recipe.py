"""Choose learning rate, epochs and longest row if they are auto. Pure: no torch, no I/O.

They depend on mode, model and rows. Each choice has a reason, which becomes the setting's origin.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sft_play.config.layers import displayed
from sft_play.config.loader import CHOSEN, DEFAULT, SHIPPED_MODEL, LoadedConfig, is_shipped_model
from sft_play.config.schedules import LION, MATRIX_OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.config.yaml_source import Located
from sft_play.plan.model_shape import ModelShape

SETTINGS = ("train.learning_rate", "train.epochs", "model.max_seq_len")
BY_MEMORY = ("tuning.mode", "tuning.lora.experts")  # chosen by the plan if the default does not fit

# (number of weights up to which it is used, peak learning rate)
# QLoRA (Dettmers et al. 2023, table 9): 2e-4 for 7B and 13B, 1e-4 for 33B and 65B. The best rate
# hardly depends on the rank (Thinking Machines, "LoRA Without Regret", 2025).
ADAPTER_RATES = ((30e9, 2e-4), (math.inf, 1e-4))
# A tenth of an adapter's rate (the same article); less for larger models: 2e-5 and 5e-6 for 7B and
# 8B (Alpaca, Tulu 3), 1e-5 and 2e-6 for 65B and 70B (LIMA, Tulu 3). The values are their means.
FULL_RATES = ((3e9, 2e-5), (30e9, 1e-5), (math.inf, 5e-6))
# Lion's rate is 3 to 10 times smaller than AdamW's (Chen et al. 2023, arXiv 2302.06675, section 5).
# Muon, scaled to the RMS of AdamW's update, uses AdamW's rate (Moonshot 2025, arXiv 2502.16982). So
# does Adafactor, whose update has an RMS of 1 at most (Shazeer and Stern 2018, section 6).
LION_SHARE = 5

# As in OpenAI's cookbook: three passes, and fewer if that is more than 25,000 rows
EPOCHS = 3
MOST_ROWS_SEEN = 25_000
# 100 steps of 32 rows: in fewer, an adapter hardly changes. LIMA used 15 passes over 1,000 rows.
FEWEST_ROWS_SEEN = 3_200
MOST_EPOCHS = 10

KEPT_ROWS = 0.995
KEPT_TOKENS = 0.99  # a few very long rows may contain a large part of the tokens
HARDLY_LONGER = 1.25  # than the length that covers almost all rows: then no row is dropped
SHORTEST_LIMIT = 512  # packed rows share a sequence, so a shorter one saves nothing
ASSUMED_LIMIT = 2048


class Choice(NamedTuple):
    """A value and why it was chosen."""

    value: int | float
    reason: str


@dataclass(frozen=True)
class RowFacts:
    """Facts from a first read of the training rows."""

    rows: int  # of an epoch
    lengths: tuple[int, ...]  # tokens of some rows, shortest first; at least one
    is_estimated: bool = False  # from the first part of large files
    # why the tokens were estimated from the characters; None: a tokenizer counted them
    uncounted_because: str | None = None
    are_texts: bool = False  # no row is a conversation
    labelled: float | None = None  # share of the tokens that have loss; None if not known
    samples_per_row: float = 1.0
    distinct: float = 1.0  # share of the tokens without beginnings that samples of a row share


@dataclass(frozen=True)
class RecipeFacts:
    """The facts on which the choices depend; None means not known."""

    parameters: int | None = None
    positions: int | None = None  # longest sequence that the base supports, in tokens
    rows: RowFacts | str = "nobody looked at the rows"  # or why there are none


def settle_autos(loaded: LoadedConfig, facts: RecipeFacts) -> LoadedConfig:
    """Return the config with a number for each auto of SETTINGS; its origin contains the reason.

    Raises: ConfigError if a number breaks a rule between settings.
    """
    config = loaded.config
    choices: dict[str, Choice] = {}
    if config.train.learning_rate == "auto":
        choices["train.learning_rate"] = choose_learning_rate(
            config.tuning.mode, facts.parameters, config.train.optim
        )
    if config.train.epochs == "auto":
        choices["train.epochs"] = choose_epochs(facts.rows)
    if config.model.max_seq_len == "auto":
        generated_tokens, may_lose = 0, None
        asked = config.train.generation_max_new_tokens  # auto follows from max_seq_len
        if config.train.predict_with_generate and asked != "auto":
            generated_tokens = asked
        are_texts = isinstance(facts.rows, RowFacts) and facts.rows.are_texts
        if config.data.too_long == "drop" or (config.data.too_long == "auto" and not are_texts):
            may_lose = config.data.max_lost
        choices["model.max_seq_len"] = choose_max_seq_len(
            facts.rows, facts.positions, generated_tokens, may_lose
        )
    values = {}
    for path, choice in choices.items():
        values[path] = Located(choice.value, f"{CHOSEN}{choice.reason}")
    return loaded.with_values(values) if values else loaded


def depends_on_rows(config: Config) -> bool:
    """Return whether some auto depends on the rows."""
    return "auto" in (config.train.epochs, config.model.max_seq_len)


def is_settled(config: Config) -> bool:
    """Return whether no auto of SETTINGS is left."""
    return config.train.learning_rate != "auto" and not depends_on_rows(config)


def choose_learning_rate(mode: str, parameters: int | None, optim: str = "adamw_torch") -> Choice:
    """Return the peak learning rate for a mode, the model's number of weights and an optimizer.

    >>> choose_learning_rate("lora", 1_540_000_000)
    Choice(value=0.0002, reason='adapters on 1.54 billion weights')
    """
    rates = FULL_RATES if mode == "full" else ADAPTER_RATES
    trained = "full training of" if mode == "full" else "adapters on"
    rate = rates[0][1]
    reason = f"{trained} a model of unknown size"
    if parameters is not None:
        rate = next(rate for below, rate in rates if parameters < below)
        reason = f"{trained} {format_count(parameters)} weights"
    if optim in LION:
        return Choice(round(rate / LION_SHARE, 8), f"{reason}, a fifth of AdamW's for Lion")
    if optim in MATRIX_OPTIMIZERS:
        reason += f", AdamW's for {optim.capitalize()}"
    return Choice(rate, reason)


def choose_epochs(facts: RowFacts | str) -> Choice:
    """Return the number of passes over the training rows: an integer, so each row counts the same.

    >>> choose_epochs(RowFacts(7473, (100,)))
    Choice(value=3.0, reason='7,473 training rows')
    """
    if isinstance(facts, str):
        return Choice(1.0, f"assumed, as {facts}")
    fewest = min(MOST_EPOCHS, math.ceil(FEWEST_ROWS_SEEN / facts.rows))
    most = max(1, MOST_ROWS_SEEN // facts.rows)
    epochs = max(fewest, min(EPOCHS, most))
    about = "about " if facts.is_estimated else ""
    plural = "" if facts.rows == 1 else "s"
    return Choice(float(epochs), f"{about}{facts.rows:,} training row{plural}")


def choose_max_seq_len(
    facts: RowFacts | str,
    positions: int | None,
    generated_tokens: int = 0,
    may_lose: float | None = None,
) -> Choice:
    """Return the length in tokens that covers almost all rows, within the base's `positions`.

    An evaluation that generates `generated_tokens` needs room for them and for a prompt. If
    longer rows are dropped, `may_lose` is the share of trained tokens that may be lost with them.
    """
    limit = math.inf if positions is None else positions
    shortest = max(SHORTEST_LIMIT, round_up(2 * generated_tokens))
    if isinstance(facts, str):
        return Choice(int(min(max(shortest, ASSUMED_LIMIT), limit)), f"assumed, as {facts}")
    needed = _covering_tokens(facts.lengths)
    reason = f"{_share(facts, needed)} have at most {needed:,} tokens"
    if facts.uncounted_because:
        reason = f"by their characters {reason}, as {facts.uncounted_because}"
    chosen = max(shortest, round_up(needed))
    if chosen > limit:
        chosen = int(limit)
        reason = f"the model takes {positions:,}; {reason}"
        fitting = facts.lengths[: bisect_right(facts.lengths, limit)]
        if may_lose is not None and fitting:
            needed = _covering_tokens(fitting)
            chosen = min(chosen, max(shortest, round_up(needed)))
            lost = 1 - sum(fitting) / sum(facts.lengths)
            reason = (
                f"the model takes {positions:,}: {len(facts.lengths) - len(fitting):,} of "
                f"{len(facts.lengths):,} rows are longer, and dropped with {lost:.0%} of the "
                f"tokens; almost all others have at most {needed:,}"
            )
            if lost > may_lose:
                reason += (
                    ". data-check refuses to lose so many: set DATA_TOO_LONG=split, or raise "
                    f"DATA_MAX_LOST, which is {may_lose:g}"
                )
    return Choice(chosen, reason)


def round_up(tokens: int) -> int:
    """Return the next multiple of 64, or of an eighth of the power of two below.

    >>> [round_up(tokens) for tokens in (1, 300, 1000, 1025, 5000)]
    [64, 320, 1024, 1152, 5120]
    """
    step = max(64, 2 ** (max(tokens - 1, 1).bit_length() - 1) // 8)
    return math.ceil(tokens / step) * step


def sentences(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the settings of the recipe with their values and origins."""
    by_memory = [path for path in BY_MEMORY if loaded.origin[path].startswith(CHOSEN)]
    return tuple(map(loaded.described, (*SETTINGS, *by_memory)))


def foreign_recipe(loaded: LoadedConfig) -> list[str]:
    """Return a warning if another model is trained with the settings of the model that ships."""
    if is_shipped_model(loaded.config.model.name):
        return []
    file = displayed(DEFAULT)
    foreign = [path for path in SETTINGS if loaded.origin[path].startswith(f"{file}:")]
    if not foreign:
        return []
    return [
        f"{', '.join(map(loaded.described, foreign))} suit {displayed(SHIPPED_MODEL)}, not "
        f"{loaded.described('model.name')}; without CONFIG they are chosen for it"
    ]


def format_count(number: float) -> str:
    """Return a large number as `1.54 billion` or `2.7 million`."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.1f} million"


def model_summary(model: ModelShape) -> str:
    """Return a model's number of weights as text, and the special features of its layers."""
    words = f"{format_count(model.parameters)} weights"
    if model.guess is not None:
        words = f"about {words}, a guess"
    if model.active_parameters < model.parameters:
        words += f", {format_count(model.active_parameters)} active per token"
    return words + model.counts.describe()


def _covering_tokens(lengths: tuple[int, ...]) -> int:
    """Return the length that covers KEPT_ROWS of the rows and KEPT_TOKENS of their tokens."""
    by_rows = lengths[math.ceil(KEPT_ROWS * len(lengths)) - 1]
    wanted = KEPT_TOKENS * sum(lengths)
    by_tokens = next(
        tokens for tokens, held in zip(lengths, accumulate(lengths), strict=True) if held >= wanted
    )
    enough = max(by_rows, by_tokens)
    longest = lengths[-1]
    return longest if longest <= HARDLY_LONGER * enough else enough


def _share(facts: RowFacts, limit: int) -> str:
    """Return how many of the rows a limit covers, as text."""
    looked_at = len(facts.lengths)
    share = bisect_right(facts.lengths, limit) / looked_at
    is_sample = looked_at < facts.rows
    if share == 1:
        return f"all {looked_at:,} rows looked at" if is_sample else "all rows"
    return (
        f"{share:.1%} of {looked_at:,} rows looked at" if is_sample else f"{share:.1%} of the rows"
    )
