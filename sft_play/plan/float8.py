"""Where a base in float8 can run. Pure: no torch, no I/O."""

from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.cards import Card
from sft_play.plan.devices import Hardware
from sft_play.plan.ranks import Ranks

FLOAT8_CAPABILITY = (8, 9)  # Ada, the first with float8 tensor cores


def supports_float8(hardware: Hardware) -> bool:
    """Return whether every GPU here multiplies float8 numbers; a CPU computes what they would."""
    return all(gpu.capability >= FLOAT8_CAPABILITY for gpu in hardware.gpus)


def may_be_float8(config: Config, card: Card | None) -> bool:
    """Return whether a run that has no float8 base could have one on GPUs of a known card."""
    if card is None or card.capability < FLOAT8_CAPABILITY or config.tuning.has_float8_base:
        return False
    lora = config.tuning.lora
    is_plain = not lora.use_dora and lora.init_lora_weights != "orthogonal"
    return config.tuning.mode == "lora" and config.tuning.backend == "bnb" and is_plain


def require_float8(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Raise EnvironmentFault where a base in float8 is asked for and a GPU has no float8."""
    if not loaded.config.tuning.has_float8_base or supports_float8(hardware):
        return
    gpu = next(gpu for gpu in hardware.gpus if gpu.capability < FLOAT8_CAPABILITY)
    raise EnvironmentFault(
        f"{loaded.described('tuning.base_dtype')}: cuda:{gpu.index} {gpu.name} has capability "
        f"{gpu.capability[0]}.{gpu.capability[1]}, and float8 products need 8.9 (Ada, Hopper and "
        "later); set TUNING_BASE_DTYPE=auto, or TUNING_MODE=qlora for a 4-bit base"
    )


def refuse_deepspeed(loaded: LoadedConfig, ranks: Ranks) -> None:
    """Raise ConfigError for a base in float8 under DeepSpeed."""
    if loaded.config.tuning.has_float8_base and ranks.strategy == "deepspeed":
        raise ConfigError(
            f"{loaded.described('tuning.base_dtype')}: DeepSpeed converts all weights to one type; "
            "train with make train-distributed (TRAIN_STRATEGY=ddp, or fsdp to divide the base), "
            "or set TUNING_BASE_DTYPE=auto"
        )
