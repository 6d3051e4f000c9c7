"""Merges the layers of a config: defaults < base.yaml < includes < CONFIG < environment < --set.

Every value knows its origin. This is the only module of the front end that reads os.environ. It
loads no torch and opens nothing but YAML files.
"""

import difflib
import operator
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sft_play.config import layers, rules
from sft_play.config.layers import BUILT_IN, Layer, displayed, nearest_path
from sft_play.config.messages import has_no_name, invalid, is_switch, no_such_file, refuse, word
from sft_play.config.schema import FREE_TEXTS, Config, env_name, is_name, settings
from sft_play.config.yaml_source import YamlValue
from sft_play.errors import ConfigError
from sft_play.masking import holds_credential

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = PACKAGE / "_project"  # in a wheel, by setup.py: configs, scripts, data and requirements
PROJECT_ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
CONFIGS = PROJECT_ROOT / "configs"
BASE = CONFIGS / "base.yaml"
DEFAULT = CONFIGS / "tiny.yaml"  # of the model that ships, and of no other
SHIPPED_MODEL = PROJECT_ROOT / "data" / "tiny_llama"

# Settings whose values in configs/ may be files of the project
SHIPPED_PATHS = ("model.name", "data.train_path", "data.val_path", "data.test_path")

MAX_VALUE = 100_000  # characters of a value that is to be typed
CHOSEN = "auto: "  # begins the origin of a value that was chosen for the user, and why

SettingValue = Any  # of the type that its field in the schema has


@dataclass(frozen=True)
class LoadedConfig:
    """A merged config; `origin` names where each setting's value was written."""

    config: Config
    origin: dict[str, str]
    source: Path  # the CONFIG file
    unset: frozenset[str] = frozenset()  # settings of a resumed run that nobody chose

    def is_set(self, path: str) -> bool:
        """Return whether the user chose this setting, not a default or configs/base.yaml."""
        if path in self.unset:
            return False
        origin = self.origin[path]
        return not is_default(origin) and not origin.startswith(CHOSEN)

    def value(self, path: str) -> SettingValue:
        """Return the value of a setting by its dotted name."""
        return operator.attrgetter(path)(self.config)

    def described(self, path: str) -> str:
        """Return `train.batch_size=4 (environment TRAIN_BATCH_SIZE)` for a message."""
        return f"{path}={word(self.value(path))} ({self.origin[path]})"

    def with_values(self, values: Layer) -> "LoadedConfig":
        """Return the config with other values and their origins.

        Raises: ConfigError if they break a rule between settings.
        """
        config = self.config.changed({path: located.value for path, located in values.items()})
        origins = {path: located.origin for path, located in values.items()}
        loaded = replace(self, config=config, origin=self.origin | origins)
        refuse(rules.broken(loaded.config, loaded.described))
        return loaded


class RunSettings(NamedTuple):
    """The settings of a run that is resumed, in place of the defaults and configs/base.yaml."""

    layer: Layer
    source: Path  # its config.yaml
    unset: frozenset[str]  # of these, what nobody chose


def environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of the process environment, as make does."""
    os.environ.update(variables)


def load_merged(
    config_path: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    target: Layer | None = None,
    resumed: RunSettings | None = None,
    adapter: Layer | None = None,
) -> LoadedConfig:
    """Return the merged config.

    `config_path` is a file, the name of one in configs/ ("tiny"), or None: for the model that ships
    its config, for any other configs/base.yaml.
    `overrides` are words such as `train.batch_size=4`; `target` is what the make target itself
    sets (train-unsloth: the backend). `resumed` are the settings of the run that continues: they
    take the place of configs/base.yaml, and without a `config_path` of the embedded default;
    `adapter` are those that follow from the adapter of model.adapter.

    Raises: ConfigError that lists every problem with its origin and what to write instead.
    """
    problems: list[str] = []
    given = [
        layers.from_environment(environ or {}, problems),
        target or {},
        layers.from_overrides(overrides, problems),
    ]
    default = BASE if adapter else _default_source(given)
    source = _find(config_path) if config_path else default
    if resumed is None:
        files = layers.from_files(source, BASE, problems)
    elif config_path:
        files = [resumed.layer, *layers.from_files(source, None, problems)]
    else:
        files = [resumed.layer]
        source = resumed.source
    merged = _with_shipped_files(_merged([layers.defaults(), *files, *given]))
    merged = _with_adapter(merged, adapter or {}, problems)
    problems += _credentials(merged)
    origin = {path: located.origin for path, located in merged.items()}
    unset = frozenset()
    if resumed is not None:  # what is still as the run has it
        unset = frozenset(path for path in resumed.unset if merged[path] is resumed.layer.get(path))
    loaded = LoadedConfig(_validate(merged, problems), origin, source, unset)
    refuse(rules.broken(loaded.config, loaded.described))
    return loaded


def given_value(
    path: str, config_path: str | None, environ: Mapping[str, str], overrides: Iterable[str]
) -> YamlValue:
    """Return what CONFIG, the environment or --set say of a setting, None if they do not.

    What is wrong with the other settings is for `load_merged` to say.
    Raises: ConfigError for a CONFIG that cannot be read.
    """
    problems: list[str] = []
    files = layers.from_files(_find(config_path), None, problems) if config_path else []
    given = [
        *files,
        layers.from_environment(environ, problems),
        layers.from_overrides(overrides, problems),
    ]
    located = _merged(given).get(path)
    return located.value if located else None


def _merged(chain: Iterable[Layer]) -> Layer:
    """Return the settings of all layers; a later one wins."""
    merged: Layer = {}
    for layer in chain:
        merged.update(layer)
    return merged


def _with_shipped_files(merged: Layer) -> Layer:
    """Return the settings with the files that ship where they are, whatever the current folder is.

    The defaults and configs/ name them relative to the project.
    """
    found = dict(merged)
    for path in SHIPPED_PATHS:
        located = merged[path]
        is_ours = located.origin == BUILT_IN or located.origin.startswith(f"{displayed(CONFIGS)}/")
        if not is_ours or not isinstance(located.value, str) or os.path.exists(located.value):
            continue
        shipped = PROJECT_ROOT / located.value
        if shipped.exists():
            found[path] = replace(located, value=str(shipped))
    return found


def is_shipped_model(name: str) -> bool:
    """Return whether model.name is the model that ships, the only one DEFAULT is meant for."""
    # the built-in name is relative to the project, whatever the current folder is
    places = (os.path.abspath(name), os.path.abspath(os.path.join(PROJECT_ROOT, name)))
    return str(SHIPPED_MODEL) in places


def nested(values: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return `{"train.batch_size": 4}` as `{"train": {"batch_size": 4}}`."""
    tree: dict[str, SettingValue] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _default_source(above_files: Iterable[Layer]) -> Path:
    """Return the config if CONFIG names none."""
    names = [layer["model.name"].value for layer in above_files if "model.name" in layer]
    return DEFAULT if not names or is_shipped_model(str(names[-1])) else BASE


def _find(config_path: str) -> Path:
    # os.path and not Path: its predicates answer False for names that no file can have
    path = Path(config_path)
    preset = CONFIGS / f"{config_path}.yaml"
    is_bare_name = path.suffix == "" and len(path.parts) == 1
    if is_bare_name and not os.path.isfile(path) and os.path.isfile(preset):
        return preset
    if os.path.isdir(path):
        raise ConfigError(
            f"CONFIG={config_path} is a folder; name a file in it, such as "
            f"CONFIG={displayed(DEFAULT)}"
        )
    if os.path.exists(path):
        return path
    known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    near = nearest_path(path) if path.suffix else ""
    for name in difflib.get_close_matches(path.stem, known, n=1):
        near = near or displayed(CONFIGS / f"{name}.yaml")
    hint = f"did you mean CONFIG={near}?" if near else f"configs/ has {', '.join(known)}"
    if os.path.islink(path):
        raise ConfigError(f"CONFIG={word(config_path)}: {no_such_file(path)}; {hint}")
    raise ConfigError(f"CONFIG={word(config_path)}: no such file; {hint}")


def _validate(merged: Layer, problems: list[str]) -> Config:
    """Return the typed config.

    Raises: ConfigError with `problems` and every value that does not fit its setting.
    """
    config = None
    # pydantic reads true as 1, so this looks for switches where none belong; it accepts empty names
    wrong = {
        path
        for path, located in merged.items()
        if (isinstance(located.value, bool) and not is_switch(path))
        or (has_no_name(located.value) and is_name(path))
    }
    try:
        values = {path: located.value for path, located in merged.items()}
        config = Config.model_validate(nested(values))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        wrong.update(_setting_at(detail["loc"]) for detail in details)
    refuse(problems + [invalid(path, merged[path]) for path in merged if path in wrong])
    assert config is not None, "a config that pydantic refused has a problem"
    return config


def _with_adapter(merged: Layer, adapter: Layer, problems: list[str]) -> Layer:
    """Return the settings with those of an adapter that training continues from.

    Its base may be elsewhere now, and rows may be written by another template.
    """
    found = dict(merged)
    for path, located in adapter.items():
        given = merged[path]
        if path == "model.adapter" or is_default(given.origin):
            found[path] = located
        elif path.startswith("tuning.") and given.value != located.value:
            problems.append(
                f"{path}={word(given.value)} ({given.origin}): the adapter of {located.origin} "
                f"has another; set {env_name(path)}={shlex.quote(word(located.value, MAX_VALUE))}"
            )
    return found


def is_default(origin: str) -> bool:
    """Return whether a value comes from a default or configs/base.yaml."""
    return origin == BUILT_IN or origin.startswith(f"{displayed(BASE)}:")


def _credentials(merged: Layer) -> list[str]:
    """Return a sentence for every setting that would write a token or a password to the disk."""
    return [
        f"{path} ({located.origin}): it has a token or a password, and settings are written to "
        "the run's folder; give it to the service by its own variable, such as HF_TOKEN, or fetch "
        "the files and name their folder"
        for path, located in merged.items()
        if path not in FREE_TEXTS and holds_credential(str(located.value))
    ]


def _setting_at(location: tuple[int | str, ...]) -> str:
    """Return the setting at pydantic's location, which may end in names of union members."""
    names = [".".join(map(str, location[:length])) for length in range(len(location), 0, -1)]
    return next(name for name in names if name in settings())
