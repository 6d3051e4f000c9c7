"""Merges built-in defaults < configs/base.yaml < include chain < CONFIG < environment < --set; every value knows its origin.

The only module of the front end that reads os.environ. Loads no torch and opens nothing but YAML files.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_play.config import layers, rules
from sft_play.config.layers import BUILT_IN, Layer, displayed
from sft_play.config.messages import invalid, is_switch, refuse, word
from sft_play.config.schema import Config, env_name, settings
from sft_play.errors import ConfigError

__all__ = ["Layer", "LoadedConfig", "env_name", "environment", "load", "nested", "settings"]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = PROJECT_ROOT / "configs"
BASE = CONFIGS / "base.yaml"
DEFAULT = CONFIGS / "tiny.yaml"


@dataclass(frozen=True)
class LoadedConfig:
    """A merged config; `origin` names where each setting's value was written."""

    config: Config
    origin: dict[str, str]
    source: Path  # the CONFIG file

    def is_set(self, path: str) -> bool:
        """Return whether the user, rather than a default or configs/base.yaml, chose this setting."""
        return self.origin[path] != BUILT_IN and not self.origin[path].startswith(
            f"{displayed(BASE)}:"
        )

    def described(self, path: str) -> str:
        """Return `train.batch_size=4 (environment TRAIN_BATCH_SIZE)` for a message."""
        value: Any = self.config
        for name in path.split("."):
            value = getattr(value, name)
        return f"{path}={word(value)} ({self.origin[path]})"


def environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


def load(
    config_path: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    target: Layer | None = None,
) -> LoadedConfig:
    """Return the merged config.

    `config_path` is a file, the name of one in configs/ ("tiny"), or None for the embedded default; `overrides` are
    `train.batch_size=4` words; `target` holds what a make target itself implies (train-unsloth: the backend).

    Raises: ConfigError that lists every problem with its origin and the nearest real name.
    """
    source = _find(config_path) if config_path else DEFAULT
    problems: list[str] = []
    chain = [
        layers.defaults(),
        *layers.from_files(source, BASE, problems),
        layers.from_environment(environ or {}, problems),
        target or {},
        layers.from_overrides(overrides, problems),
    ]
    merged = {path: located for layer in chain for path, located in layer.items()}
    config = _validated(merged, problems)
    loaded = LoadedConfig(
        config, {path: located.origin for path, located in merged.items()}, source
    )
    refuse(rules.broken(config, loaded.described))
    return loaded


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"train.batch_size": 4}` as `{"train": {"batch_size": 4}}`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _find(config_path: str) -> Path:
    # os.path rather than Path: its predicates answer False for names that no file can have
    path, preset = Path(config_path), CONFIGS / f"{config_path}.yaml"
    if (
        path.suffix == ""
        and len(path.parts) == 1
        and not os.path.isfile(path)
        and os.path.isfile(preset)
    ):
        return preset
    if os.path.isdir(path):
        raise ConfigError(
            f"CONFIG={config_path} is a folder; name a file in it, such as CONFIG={displayed(DEFAULT)}"
        )
    if os.path.exists(path):
        return path
    known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    near = difflib.get_close_matches(path.stem, known, n=1)
    hint = (
        f"did you mean CONFIG={displayed(CONFIGS / near[0])}.yaml?"
        if near
        else f"configs/ has {', '.join(known)}"
    )
    raise ConfigError(f"CONFIG={word(config_path)}: no such file; {hint}")


def _validated(merged: Layer, problems: list[str]) -> Config:
    """Return the typed config. Raises ConfigError with `problems` and every value that does not fit its setting."""
    # pydantic reads true as 1, so switches where none belong are looked for here
    wrong = [
        path
        for path, located in merged.items()
        if isinstance(located.value, bool) and not is_switch(path)
    ]
    config = None
    try:
        config = Config.model_validate(
            nested({path: located.value for path, located in merged.items()})
        )
    except ValidationError as error:
        wrong += [
            _path_of(detail["loc"])
            for detail in error.errors(include_url=False, include_context=False)
        ]
    refuse(problems + [invalid(path, merged[path]) for path in merged if path in wrong])
    assert config is not None, "a config that pydantic refused has a problem"
    return config


def _path_of(loc: tuple[Any, ...]) -> str:
    """pydantic's location, less the names of union members behind the setting's own."""
    names = [".".join(map(str, loc[:n])) for n in range(len(loc), 0, -1)]
    return next(name for name in names if name in settings())
