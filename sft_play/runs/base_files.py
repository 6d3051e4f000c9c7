"""Whether a base model's files may be loaded: what they are, and whose code they run. No torch."""

import re
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import ConfigError

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}


def refuse_unsafe_base(config: Config) -> None:
    """Refuse pickled weights, and a hub model's code that is not pinned to a commit.

    Raises: ConfigError with the setting that allows it.
    """
    model = config.model
    folder = Path(model.name)
    if folder.is_dir():
        pickled = pickled_weights(folder)
        if pickled and not model.allow_pickled_weights:
            raise ConfigError(
                f"model.name={model.name}: its weights are {pickled[0]}, a pickle, which can run "
                "any code when it is loaded; save them as safetensors, or set "
                "MODEL_ALLOW_PICKLED_WEIGHTS=true if you trust who made it"
            )
        return
    if model.trust_remote_code and not COMMIT.fullmatch(model.revision or ""):
        raise ConfigError(
            f"model.trust_remote_code=true runs Python code of {model.name}, and "
            f"model.revision={model.revision or 'null'} may be other code tomorrow; set "
            "MODEL_REVISION to the commit that you have read, 40 digits"
        )


def pickled_weights(folder: Path) -> list[str]:
    """Return the pickled weight files of a folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return []
    names = {path.name for pattern in PICKLED for path in folder.glob(pattern)}
    return sorted(names - NO_WEIGHTS)
