"""Where a project keeps what is computed once for many runs. Loads no torch."""

from pathlib import Path

from sft_play.config.schema import Config


def cache_folder(config: Config) -> Path:
    """Return the folder of the cache."""
    default = Path(config.train.output_dir) / ".data"
    return Path(config.data.cache_dir or default).resolve()
