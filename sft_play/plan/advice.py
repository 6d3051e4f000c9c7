"""What would make a step fit: changes of settings, as the words to type, ranked by what they cost in speed. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sft_play.plan.sizing import Setup, Sized, size
from sft_play.plan.speed import Speed

SHORTEST_ROW = 256  # tokens; nobody is told to train on less
MOST_AT_ONCE = 3  # changes
LENGTH = "length"
NO_ORDER = 0.0  # speed of what nobody can tell the speed of


@dataclass(frozen=True)
class Change:
    """Settings that make a step fit. `costs` is what they change beside speed, "" where nothing else."""

    words: str
    costs: str
    predicted_peak: int  # bytes of a rank
    relative_speed: float | None  # of the step that does not fit, had it room; None: unknown


@dataclass(frozen=True)
class Knob:
    """One setting that frees memory, set."""

    words: str
    setup: Setup
    costs: str = ""
    group: str = ""  # of those that set the same: one of a group at a time


def changes(setup: Setup, gpus: int) -> tuple[Change, ...]:
    """Return what makes a step of `setup` fit on a host of `gpus` GPUs: settings of which none could be left out.

    First those that train the same thing, then those that do not, each by speed, fastest first; `()` where no three of them do.
    """
    knobs, before = list(_knobs(setup, gpus)), setup.speed_of(size(setup).chosen)
    found: dict[frozenset[str], Change] = {}  # by what is set
    for number in range(1, MOST_AT_ONCE + 1):
        for chosen in combinations(knobs, number):
            key = frozenset(
                LENGTH if knob.group == LENGTH else knob.words for knob in chosen
            )  # the longest rows that fit, alone
            is_plain = len({knob.group for knob in chosen}) == number
            if (
                is_plain
                and not any(fewer <= key for fewer in found)
                and (change := _change(setup, chosen, before))
            ):
                found[key] = change
        if any(not change.costs for change in found.values()):
            break
    return tuple(
        sorted(
            found.values(),
            key=lambda change: (bool(change.costs), -(change.relative_speed or NO_ORDER)),
        )
    )


def _change(setup: Setup, knobs: Sequence[Knob], before: Speed | None) -> Change | None:
    changed = setup
    for knob in knobs:
        changed = _merged(setup, changed, knob.setup)
    sized = size(changed)
    if not sized.fits:
        return None
    after = changed.speed_of(sized.chosen)
    told = [_numbers(sized) if knob.group == "batch" else knob.words for knob in knobs]
    relative = after.tokens_per_second / before.tokens_per_second if before and after else None
    words = " ".join(sorted(told, key=lambda word: not word.startswith("make")))
    return Change(
        words,
        ", ".join(knob.costs for knob in knobs if knob.costs),
        sized.memory.predicted_peak,
        relative,
    )


def _numbers(sized: Sized) -> str:
    return f"TRAIN_BATCH_SIZE={sized.chosen.batch_size} TRAIN_GRAD_ACCUM={sized.chosen.grad_accum}"


def _merged(base: Setup, one: Setup, other: Setup) -> Setup:
    """Return `one` with what `other` has otherwise than `base`."""
    config = one.config
    for section in ("model", "tuning", "train"):
        was, now = getattr(base.config, section), getattr(other.config, section)
        changed = {
            name: getattr(now, name)
            for name in type(was).model_fields
            if getattr(was, name) != getattr(now, name)
        }
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update=changed)}
        )
    plain = {
        name: getattr(other, name)
        for name in ("ranks", "zero_stage", "offload", "offload_weights", "is_effective_set")
        if getattr(other, name) != getattr(base, name)
    }
    return replace(one, config=config, **plain)


def _knobs(setup: Setup, gpus: int) -> Iterator[Knob]:
    """Yield every setting that can free memory here."""
    train, tuning, model = setup.config.train, setup.config.tuning, setup.config.model
    if train.batch_size != "auto":
        rows = size(setup).chosen.effective_batch
        yield Knob(
            "",
            _with(
                setup,
                train={"batch_size": "auto", "grad_accum": "auto", "effective_batch_size": rows},
                is_effective_set=True,
            ),
            group="batch",
        )
    if train.gradient_checkpointing is False:
        yield Knob(
            "TRAIN_GRADIENT_CHECKPOINTING=auto",
            _with(setup, train={"gradient_checkpointing": "auto"}),
            group="checkpointing",
        )
    yield from _engines(setup, gpus)
    if (
        tuning.mode == "full"
        and model.dtype in ("auto", "float32")
        and setup.is_half
        and not setup.zero_stage
    ):
        yield Knob(
            "MODEL_DTYPE=bfloat16",
            _with(setup, model={"dtype": "bfloat16"}),
            "weights are updated in 16 bits",
            "dtype",
        )
    if tuning.mode == "full" and setup.ranks.device == "cuda" and "8bit" not in train.optim:
        yield Knob(
            "TRAIN_OPTIM=adamw_8bit",
            _with(setup, train={"optim": "adamw_8bit"}),
            "optimizer state in 8 bits",
            "optim",
        )
    if tuning.mode == "full":
        yield Knob(
            "TUNING_MODE=lora", _with(setup, tuning={"mode": "lora"}), "trains adapters", "mode"
        )
    if tuning.mode != "qlora":
        yield Knob(
            "TUNING_MODE=qlora",
            _with(setup, tuning={"mode": "qlora"}),
            "trains adapters over 4-bit weights",
            "mode",
        )
    tokens = model.max_seq_len // 2
    while tokens >= SHORTEST_ROW:
        yield Knob(
            f"MODEL_MAX_SEQ_LEN={tokens}",
            _with(setup, model={"max_seq_len": tokens}),
            f"rows of at most {tokens} tokens",
            LENGTH,
        )
        tokens //= 2


def _engines(setup: Setup, gpus: int) -> Iterator[Knob]:
    """Yield ZeRO on the GPUs of the plan, and on all of the host where the plan leaves some idle."""
    ranks = setup.ranks
    if setup.config.tuning.backend == "unsloth" or ranks.device != "cuda":
        return
    for per_node in sorted({ranks.per_node, gpus}):
        if per_node * ranks.nodes < 2 or per_node < ranks.per_node:
            continue
        wide = replace(ranks, strategy="deepspeed", per_node=per_node)
        number = f" NUM_GPUS={per_node}" if per_node != ranks.per_node else ""
        for stage in range(max(2, setup.zero_stage + (per_node == ranks.per_node)), 4):
            words = (
                f"make train-deepspeed{number} DEEPSPEED_CONFIG=configs/deepspeed_zero{stage}.json"
            )
            yield Knob(
                words,
                _with(setup, ranks=wide, zero_stage=stage, offload=False, offload_weights=False),
                group="engine",
            )


def _with(
    setup: Setup,
    model: dict[str, Any] | None = None,
    tuning: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **plain: Any,
) -> Setup:
    config = setup.config
    for section, update in (("model", model), ("tuning", tuning), ("train", train)):
        if update:
            config = config.model_copy(
                update={section: getattr(config, section).model_copy(update=update)}
            )
    return replace(setup, config=config, **plain)
