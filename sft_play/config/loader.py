"""Merges built-in defaults < configs/base.yaml < include chain < CONFIG < environment < --set; every value knows its origin.

The only module of the front end that reads os.environ. Loads no torch and opens nothing but YAML files.
"""

import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from sft_play.config import rules
from sft_play.config.schema import Config, Section, env_name, settings
from sft_play.config.yaml_source import Located, parse_scalar, read_mapping
from sft_play.errors import ConfigError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = PROJECT_ROOT / "configs"
BASE = CONFIGS / "base.yaml"
DEFAULT = CONFIGS / "tiny.yaml"
BUILT_IN = "built-in default"
SECTIONS = tuple(Config.model_fields)
PROBLEMS_SHOWN = 8

Layer = dict[str, Located]  # {"train.batch_size": Located(4, "configs/a.yaml:7")}


@dataclass(frozen=True)
class LoadedConfig:
    """A merged config; `origin` names where each setting's value was written."""

    config: Config
    origin: dict[str, str]
    source: Path  # the CONFIG file

    def is_set(self, path: str) -> bool:
        """Return whether the user, rather than a default or configs/base.yaml, chose this setting."""
        return not self.origin[path].startswith((BUILT_IN, _shown(BASE)))

    def described(self, path: str) -> str:
        """Return `train.batch_size=4 (environment TRAIN_BATCH_SIZE)` for a message."""
        value: Any = self.config
        for name in path.split("."):
            value = getattr(value, name)
        return f"{path}={_word(value)} ({self.origin[path]})"


def environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


def load(
    config_path: str | None = None, environ: Mapping[str, str] | None = None, overrides: Iterable[str] = (), target: Layer | None = None
) -> LoadedConfig:
    """Return the merged config.

    `config_path` is a file, the name of one in configs/ ("tiny"), or None for the embedded default; `overrides` are
    `train.batch_size=4` words; `target` holds what a make target itself implies (train-unsloth: the backend).

    Raises: ConfigError that lists every problem with its origin and the nearest real name.
    """
    source = _find(config_path) if config_path else DEFAULT
    problems: list[str] = []
    layers = [_defaults()]
    for file in _chain(source):
        layers.append(_flatten(file, problems))
    layers.append(_from_environment(environ or {}, problems))
    layers.append(target or {})
    layers.append(_from_overrides(overrides, problems))
    _refuse(problems)
    merged = {path: located for layer in layers for path, located in layer.items()}
    loaded = LoadedConfig(_validate(merged), {path: located.origin for path, located in merged.items()}, source)
    _refuse(rules.broken(loaded.config, loaded.described))
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
    path = Path(config_path)
    if not path.exists() and path.suffix == "" and len(path.parts) == 1:
        path = CONFIGS / f"{config_path}.yaml"
    if path.exists():
        return path
    known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    near = difflib.get_close_matches(Path(config_path).stem, known, n=1)
    hint = f"; did you mean CONFIG=configs/{near[0]}.yaml?" if near else f"; configs/ has {', '.join(known)}"
    raise ConfigError(f"CONFIG={config_path}: no such file{hint}")


def _shown(path: Path) -> str:
    """The path as a user would type it: relative to the project where it lies inside."""
    path = path.resolve()
    return str(path.relative_to(PROJECT_ROOT)) if path.is_relative_to(PROJECT_ROOT) else str(path)


def _chain(source: Path) -> list[dict[str, Located]]:
    """Return the top-level mappings to merge, weakest first: base, what is included, the file."""
    files: list[dict[str, Located]] = [read_mapping(Path(_shown_or_self(BASE)))] if BASE.exists() else []

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        if path.resolve() in trail:
            names = " -> ".join(_shown(step) for step in (*trail, path))
            raise ConfigError(f"{_shown(path)}: include goes in a circle: {names}")
        mapping = read_mapping(Path(_shown_or_self(path)))
        include = mapping.pop("include", None)
        for name in _include_names(include):
            child = path.parent / name
            if not child.is_file():
                raise ConfigError(f"{include.origin}: include '{name}': no such file {_shown(child)}; paths are relative to the including file")
            visit(child, (*trail, path.resolve()))
        files.append(mapping)

    if source.resolve() != BASE:
        visit(source, ())
    return files


def _shown_or_self(path: Path) -> str:
    """A name that both opens from here and reads well in a message."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


def _include_names(include: Located | None) -> list[str]:
    if include is None or include.value is None:
        return []
    names = include.value if isinstance(include.value, list) else [include.value]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{include.origin}: include takes a file name or a list of them, not {include.value!r}")
    return names


def _defaults() -> Layer:
    values = {path: field.get_default(call_default_factory=True) for path, field in settings().items()}
    assert PydanticUndefined not in values.values(), "every setting has a default"
    return {path: Located(value, BUILT_IN) for path, value in values.items()}


def _flatten(mapping: dict[str, Located], problems: list[str]) -> Layer:
    """Return a file's leaves by dotted path; unknown keys and misplaced sections become problems."""
    leaves: Layer = {}
    known = settings()

    def visit(section: type[Section], node: dict[str, Located], prefix: str) -> None:
        for key, located in node.items():
            path = f"{prefix}{key}"
            field = section.model_fields.get(key)
            if field is None:
                problems.append(f"{located.origin}: unknown setting '{path}'{_nearest(path, known)}")
            elif path in known:
                leaves[path] = Located(_plain(located.value), located.origin)
            elif located.value is None:
                continue  # `train:` with everything under it commented out
            elif isinstance(located.value, dict):
                visit(field.annotation, located.value, f"{path}.")
            else:
                problems.append(f"{located.origin}: {path} is a section; write its settings below it, not {path}: {located.value!r}")

    visit(Config, mapping, "")
    return leaves


def _plain(value: Any) -> Any:
    return {key: _plain(child.value) for key, child in value.items()} if isinstance(value, dict) else value


def _nearest(path: str, known: Iterable[str]) -> str:
    """`; did you mean train.batch_size?`: by the whole path, then by the last word (a key in the wrong section)."""
    known = list(known)
    leaf = path.rsplit(".", 1)[-1]
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    sections = [section for section in SECTIONS if difflib.get_close_matches(path, [section], cutoff=0.7)]
    near = same_leaf or difflib.get_close_matches(path, known, n=1, cutoff=0.6) or sections
    if near:
        return f"; did you mean {near[0]}?"
    by_leaf = difflib.get_close_matches(leaf, [name.rsplit(".", 1)[-1] for name in known], n=1, cutoff=0.6)
    if by_leaf:
        return f"; did you mean {next(name for name in known if name.endswith(by_leaf[0]))}?"
    return "; `make config` lists every setting"


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Layer:
    known = {env_name(path): path for path in settings()}
    layer: Layer = {}
    for name in sorted(environ):
        if not name.startswith(tuple(f"{section.upper()}_" for section in SECTIONS)) or environ[name] == "":
            continue
        if name in known:
            origin = f"environment {name}"
            layer[known[name]] = Located(_typed(known[name], environ[name], origin, problems), origin)
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"unset {name} if it is another program's"
            problems.append(f"environment {name}={environ[name]}: no such setting; {hint}")
    return layer


def _from_overrides(overrides: Iterable[str], problems: list[str]) -> Layer:
    known = settings()
    layer: Layer = {}
    for word in overrides:
        path, equals, text = word.partition("=")
        origin = f"--set {path}"
        if not equals:
            problems.append(f"--set {word}: write --set name=value, such as --set train.batch_size=4")
        elif path not in known:
            problems.append(f"--set {word}: unknown setting '{path}'{_nearest(path, known)}")
        else:
            layer[path] = Located(_typed(path, text, origin, problems), origin)
    return layer


def _typed(path: str, text: str, origin: str, problems: list[str]) -> Any:
    """Read a word from the shell by the setting's type: a text stays as typed, everything else is one YAML value."""
    kinds = _kinds(settings()[path].annotation)
    if text in ("null", "none", "None") and type(None) in kinds:
        return None
    if list in kinds and text not in ("all-linear",):
        return [name.strip() for name in text.strip("[]").split(",") if name.strip()]
    if str in kinds:
        return text
    try:
        return parse_scalar(text)
    except yaml.YAMLError:
        problems.append(f"{origin}: {path}={text!r} cannot be read; {_wanted(path)}")
        return None


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation admits; Literals count as themselves."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(argument) for argument in typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    return {origin if origin is list else annotation}


def _validate(merged: Layer) -> Config:
    problems = [
        f"{located.origin}: {path}={_word(located.value)} is a switch value; {_wanted(path)}"
        for path, located in merged.items()
        if isinstance(located.value, bool) and not _takes_bool(path)
    ]
    _refuse(problems)
    try:
        return Config.model_validate(nested({path: located.value for path, located in merged.items()}))
    except ValidationError as error:
        for path in dict.fromkeys(_path_of(detail["loc"]) for detail in error.errors()):
            problems.append(f"{merged[path].origin}: {path}={_word(merged[path].value)} is not valid; {_wanted(path)}")
        raise ConfigError(_listed(problems)) from None


def _takes_bool(path: str) -> bool:
    return bool in _kinds(settings()[path].annotation) or path.endswith("_strategy")


def _path_of(loc: tuple[Any, ...]) -> str:
    """pydantic's location, less the names of union members behind the setting's own."""
    known = settings()
    return next(".".join(map(str, loc[:n])) for n in range(len(loc), 0, -1) if ".".join(map(str, loc[:n])) in known)


def _wanted(path: str) -> str:
    """`write a whole number of at least 1, or auto`, from the schema."""
    field = settings()[path]
    return f"write {_words_of(field.annotation, field.metadata)}"


def _words_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(annotation)
        return _words_of(inner, [constraint for item in extra for constraint in getattr(item, "metadata", [item])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words_of(argument, metadata) for argument in typing.get_args(annotation))
    if origin is typing.Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}.get(annotation, "a list of names")
    bounds = [
        f"{word} {getattr(item, name)}"
        for item in metadata
        for name, word in (("ge", "of at least"), ("gt", "above"), ("lt", "below"), ("le", "of at most"))
        if getattr(item, name, None) is not None
    ]
    patterns = [f"that matches {item.pattern}" for item in metadata if getattr(item, "pattern", None) and annotation is str]
    return " ".join([words, *bounds, *patterns])


def _word(value: Any) -> str:
    """A value as YAML and the shell spell it."""
    return {True: "true", False: "false", None: "null"}.get(value, value) if isinstance(value, bool | None) else str(value)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(_listed(problems))


def _listed(problems: list[str]) -> str:
    more = [f"... and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
    return "\n".join([*problems[:PROBLEMS_SHOWN], *more])
