"""Whether a run packs its samples: where documents are known to stay apart. Loads no torch."""

from sft_play.config.schema import Config
from sft_play.errors import ConfigError

# Architectures whose attention keeps documents apart by position ids, under sdpa and eager attention, sliding windows included.
# tests/test_packed_training.py builds each and looks. Not here: those with a state that runs on (Mamba, linear attention,
# convolutions), those that count positions without position ids (ALiBi, OPT), and those that nobody has looked at.
ISOLATING = frozenset(
    "apertus arcee cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox granite granitemoe helium llama mistral "
    "mixtral olmo olmo2 olmo3 phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2".split()
)


# Architectures that Unsloth computes with code of its own, under adapters, told the lengths of a packed row's documents; looked at
# on an H200. Without flash-attn it masks the whole row, which beats padding up to rows of so many tokens.
UNSLOTH_ISOLATING, UNSLOTH_LONGEST = (
    frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"}),
    8192,
)


def resolve_packing(config: Config, model_type: str) -> tuple[bool, str | None]:
    """Return whether train.packing is on, and for `auto` why it is off, else None.

    `auto` packs on a CPU, too: two cores train the rows that ship, of 56 tokens on average, 1.4 times as fast in micro-batches of 16
    and 1.6 times in those of 1 (CPU seconds; sequences are no longer than they must be, so that attention costs no more).
    `true` packs an architecture that is not in the list as well: the run looks whether its documents stay apart before the
    first step. Raises: ConfigError for `true` where packing cannot work.
    """
    setting, by_unsloth = config.train.packing, config.tuning.backend == "unsloth"
    if setting is False:
        return False, None
    if by_unsloth and config.tuning.mode == "full":
        if setting is True:
            raise ConfigError(
                "train.packing=true: Unsloth keeps packed documents apart under adapters alone; set TRAIN_PACKING=auto, or TUNING_BACKEND=bnb"
            )
        return False, "Unsloth keeps packed documents apart under adapters alone"
    if setting is True:
        return True, None
    if model_type not in (UNSLOTH_ISOLATING if by_unsloth else ISOLATING):
        by = " under Unsloth" if by_unsloth else ""
        return (
            False,
            f"nobody has looked whether {model_type} keeps packed documents apart{by}; TRAIN_PACKING=true looks before the first step",
        )
    if by_unsloth and config.model.max_seq_len > UNSLOTH_LONGEST:
        return (
            False,
            f"Unsloth masks whole packed rows, which costs more than padding beyond {UNSLOTH_LONGEST} tokens",
        )
    return True, None


def needs_boundaries(attn_implementation: str, has_fast_attention: bool = False) -> bool:
    """Return whether a packed batch has to name the boundaries of its documents.

    Flash attention and our own work by them; sdpa and eager find them in position ids, in any batch.
    """
    return has_fast_attention or attn_implementation not in ("auto", "sdpa", "eager")
