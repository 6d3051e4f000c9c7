"""The layers of a config: built-in defaults, YAML files with their includes, the environment, --set words.

Each becomes `{"train.batch_size": Located(4, "configs/a.yaml:7")}`; what cannot be read is added to a list of problems,
so that one error can name them all. Opens YAML files and nothing else; the environment arrives as a mapping.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined

from sft_play.config.messages import nearest, wanted, word
from sft_play.config.schema import Config, Section, env_name, is_structured, kinds, settings
from sft_play.config.yaml_source import Located, parse_flow, parse_names, parse_scalar, read_mapping
from sft_play.errors import ConfigError

BUILT_IN = "built-in default"
PREFIXES = tuple(f"{section.upper()}_" for section in Config.model_fields)
NULLS = ("null", "none", "None", "~")

Layer = dict[str, Located]


def displayed(path: Path) -> str:
    """Return a file's name that opens from here and reads well: relative where it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative


def defaults() -> Layer:
    """Return every setting at its built-in default."""
    values = {
        path: field.get_default(call_default_factory=True) for path, field in settings().items()
    }
    assert PydanticUndefined not in values.values(), "every setting has a default"
    return {path: Located(value, BUILT_IN) for path, value in values.items()}


def from_files(source: Path, base: Path, problems: list[str]) -> list[Layer]:
    """Return the layers of a config file, weakest first: base, what it includes, the file itself.

    Paths of an include are relative to the including file; a file that is reached twice counts where it came first.
    Raises: ConfigError for files that cannot be read and includes that go in a circle.
    """
    layers: list[Layer] = []
    merged: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        mapping = read_mapping(path, displayed(path))
        include = mapping.pop("include", None)
        trail = (*trail, path.resolve())
        for name in _include_names(include):
            child = path.parent / name
            _refuse_bad_include(include, name, child, trail)
            if child.resolve() not in merged:
                visit(child, trail)
        merged.add(path.resolve())
        layers.append(_leaves(mapping, problems))

    if base.exists():
        visit(base, ())
    if source.resolve() not in merged:
        visit(source, ())
    return layers


def _include_names(include: Located | None) -> list[str]:
    if include is None or include.value is None:
        return []
    names = include.value if isinstance(include.value, list) else [include.value]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{include.origin}: include={word(include.value)} is not valid; write a file name, or a list of them"
        )
    return names


def _refuse_bad_include(include: Located, name: str, child: Path, trail: tuple[Path, ...]) -> None:
    if child.resolve() in trail:
        circle = " -> ".join(
            displayed(step) for step in (*trail[trail.index(child.resolve()) :], child.resolve())
        )
        raise ConfigError(
            f"{include.origin}: include={name} goes in a circle: {circle}; delete one of them"
        )
    if not child.is_file():
        beside = {
            file.stem: file.name
            for file in sorted(child.parent.glob("*.y*ml"))
            if file.resolve() not in trail
        }
        near = difflib.get_close_matches(child.stem, beside, n=1)
        hint = (
            f"did you mean {Path(name).parent / beside[near[0]]}?"
            if near
            else "write it relative to the including file"
        )
        raise ConfigError(
            f"{include.origin}: include={name}: no such file {displayed(child)}; {hint}"
        )


def _leaves(mapping: dict[str, Located], problems: list[str]) -> Layer:
    """Return a file's settings by dotted path; unknown names and misplaced sections become problems."""
    leaves: Layer = {}
    known = settings()

    def visit(section: type[Section], node: dict[str, Located], prefix: str) -> None:
        for key, located in node.items():
            path = f"{prefix}{key}"
            field = section.model_fields.get(key)
            if field is None:
                problems.append(f"{located.origin}: {_unknown(path, located, prefix)}")
            elif path in known:
                leaves[path] = (
                    Located(_plain(located.value), located.origin, located.text)
                    if is_structured(path)
                    else located
                )
            elif isinstance(located.value, dict):
                visit(field.annotation, located.value, f"{path}.")
            elif located.value is not None:  # null: `train:` with everything below it commented out
                typed = word(located.value) if located.text is None else located.text
                problems.append(
                    f"{located.origin}: {path}={typed} is not valid: {path} is a section; write its settings below it"
                )

    visit(Config, mapping, "")
    return leaves


def _plain(value: Any) -> Any:
    """Return a value without the places of its parts."""
    if isinstance(value, Located):
        return _plain(value.value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _unknown(path: str, located: Located, prefix: str) -> str:
    key = path.removeprefix(prefix)
    if key == "include":
        return "include stands inside a section; write it at the top level of the file"
    if key in settings():
        section, name = key.rsplit(".", 1)
        return f"'{key}' is one key with dots; write {name}: {word(located.value)} below {section.replace('.', ': ')}:"
    variables = _by_variable()
    if key.upper() in variables:
        return f"'{key}' is a variable of the shell; in a file write {variables[key.upper()]}"
    return f"unknown setting '{path}'{_did_you_mean(nearest(path, settings(), _sections()))}"


def _by_variable() -> dict[str, str]:
    return {env_name(path): path for path in settings()}


def _sections() -> list[str]:
    """Every section's dotted name, outer ones first."""
    parts = [path.split(".")[:-1] for path in settings()]
    return list(
        dict.fromkeys(".".join(part[:n]) for part in parts for n in range(1, len(part) + 1))
    )


def _first_below(section: str) -> str:
    return next(path for path in settings() if path.startswith(f"{section}."))


def _did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else "; `make config` lists every setting"


def from_environment(environ: Mapping[str, str], problems: list[str]) -> Layer:
    """Return the settings that variables such as TRAIN_BATCH_SIZE give; an empty one counts as unset."""
    known = _by_variable()
    layer: Layer = {}
    for name in sorted(environ):
        text = environ[name].strip()
        if not name.startswith(PREFIXES) or not text:
            continue
        if name in known:
            layer[known[name]] = _typed(known[name], text, f"environment {name}", problems)
        else:  # its value is not repeated: it may be another program's secret
            problems.append(f"environment {name}: no such setting; {_variable_hint(name, known)}")
    return layer


def _variable_hint(name: str, known: dict[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    near = close[0] if close else None
    if near is None:
        path = nearest(name.lower().replace("_", ".", 1), settings())
        near = env_name(path) if path else None
    return (
        f"did you mean {near}? If it is another program's, unset {name}"
        if near
        else f"unset {name} if it is another program's"
    )


def from_overrides(overrides: Iterable[str], problems: list[str]) -> Layer:
    """Return the settings of `train.batch_size=4` words."""
    layer: Layer = {}
    for entry in overrides:
        path, equals, text = entry.partition("=")
        if not equals:
            problems.append(
                f"--set {entry}: has no value; write --set name=value, such as --set train.batch_size=4"
            )
        elif path in _sections():
            problems.append(
                f"--set {entry}: {path} is a section; write one of its settings, such as --set {_first_below(path)}=value"
            )
        elif path not in settings():
            problems.append(
                f"--set {entry}: unknown setting '{path}'{_did_you_mean(nearest(path, settings()))}"
            )
        elif not text.strip():
            null = (
                f", or --set {path}=null"
                if type(None) in kinds(settings()[path].annotation)
                else ""
            )
            problems.append(f"--set {entry}: has no value; write --set {path}=value{null}")
        else:
            layer[path] = _typed(path, text.strip(), f"--set {path}", problems)
    return layer


def _typed(path: str, text: str, origin: str, problems: list[str]) -> Located:
    """Read a word from the shell by the setting's type: a text stays as typed, a list splits at commas."""
    expected = kinds(settings()[path].annotation)
    return Located(_value(path, text, origin, expected, problems), origin, text)


def _value(path: str, text: str, origin: str, expected: set[Any], problems: list[str]) -> Any:
    if text in NULLS and type(None) in expected:
        return None
    if text in [choice for kind in expected for choice in getattr(kind, "__args__", ())]:
        return text
    if is_structured(path) and text[:1] in ("{", "["):
        return _structured(path, text, origin, problems)
    if str in expected:
        return text
    if list not in expected:
        return parse_scalar(text)
    try:
        return parse_names(text)
    except yaml.YAMLError:
        problems.append(
            f"{origin}: {path}={text} cannot be read; write names with commas between them: q_proj,v_proj"
        )
        return []


def _structured(path: str, text: str, origin: str, problems: list[str]) -> Any:
    try:
        return parse_flow(text)
    except yaml.YAMLError:
        problems.append(f"{origin}: {path}={word(text)} cannot be read; write {wanted(path)}")
        return None
