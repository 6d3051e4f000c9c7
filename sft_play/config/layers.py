"""The layers of a config: built-in defaults, YAML files with includes, environment, --set words.

Each becomes `{"train.batch_size": Located(4, "configs/a.yaml:7")}`. What cannot be read is added to
a list of problems, so that one error can name them all. Opens YAML files and nothing else; the
environment is passed in as a mapping.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic_core import PydanticUndefined

from sft_play.config.messages import not_utf8, wanted_value, word
from sft_play.config.schema import (
    Config,
    Section,
    env_name,
    is_name,
    is_structured,
    kinds,
    sections,
    settings,
    with_present_names,
)
from sft_play.config.unknown import Suggestion, suggest
from sft_play.config.yaml_source import (
    Located,
    YamlValue,
    parse_flow,
    parse_names,
    parse_scalar,
    read_mapping,
)
from sft_play.errors import ConfigError

BUILT_IN = "built-in default"
PREFIXES = tuple(f"{section.upper()}_" for section in Config.model_fields)
NULLS = ("null", "none", "None", "~")

Layer = dict[str, Located]  # by dotted name


def displayed(path: Path) -> str:
    """Return a file's name for messages: relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative


def nearest_path(missing: str | Path) -> str:
    """Return the existing path most like a missing one, "" if there is none."""
    path = Path(missing)
    # os.path and not Path: its predicates answer False for names that no file can have
    parent = next(folder for folder in path.parents if os.path.isdir(folder))
    name, *below = path.relative_to(parent).parts
    names = sorted(os.listdir(parent))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if name in names or not near:
        return ""
    found = parent.joinpath(near[0], *below)
    if os.path.exists(found):
        return displayed(found)
    return nearest_path(found) or displayed(parent / near[0])


def defaults() -> Layer:
    """Return every setting at its built-in default."""
    layer: Layer = {}
    for path, field in settings().items():
        value = field.get_default(call_default_factory=True)
        assert value is not PydanticUndefined, f"{path} has a default"
        layer[path] = Located(value, BUILT_IN)
    return layer


def from_files(source: Path, base: Path | None, problems: list[str]) -> list[Layer]:
    """Return the layers of a config file, weakest first: base, what it includes, the file itself.

    Paths of an include are relative to the including file. A file that is reached twice counts
    where it came first.

    Raises: ConfigError for files that cannot be read and includes that go in a circle.
    """
    layers: list[Layer] = []
    merged: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        """Read a file after those that it includes."""
        mapping = read_mapping(path, displayed(path))
        include = mapping.pop("include", None)
        trail = (*trail, path.resolve())
        for name in _include_names(include):
            child = path.parent / name
            _refuse_bad_include(include, name, child, trail)
            if child.resolve() not in merged:
                visit(child, trail)
        merged.add(path.resolve())
        layers.append(_collect_settings(mapping, problems))

    if base is not None and base.exists():
        visit(base, ())
    if source.resolve() not in merged:
        visit(source, ())
    return layers


def of_run(path: Path, problems: list[str]) -> Layer:
    """Return the settings of a run's config.yaml, which includes no other. Raises ConfigError."""
    mapping = read_mapping(path, displayed(path))
    for name, section in mapping.items():
        if isinstance(section.value, dict):
            mapping[name] = replace(section, value=with_present_names(section.value))
    return _collect_settings(mapping, problems)


def _include_names(include: Located | None) -> list[str]:
    if include is None or include.value is None:
        return []
    names = include.value if isinstance(include.value, list) else [include.value]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{include.origin}: include={word(include.value)} is not valid; "
            "write a file name, or a list of them"
        )
    return names


def _refuse_bad_include(include: Located, name: str, child: Path, trail: tuple[Path, ...]) -> None:
    if child.resolve() in trail:
        circle = [*trail[trail.index(child.resolve()) :], child.resolve()]
        raise ConfigError(
            f"{include.origin}: include={name} goes in a circle: "
            f"{' -> '.join(map(displayed, circle))}; delete one of them"
        )
    if child.is_file():
        return
    candidates = [
        file for file in sorted(child.parent.glob("*.y*ml")) if file.resolve() not in trail
    ]
    names_by_stem = {file.stem: file.name for file in candidates}
    near = difflib.get_close_matches(child.stem, names_by_stem, n=1)
    hint = "write it relative to the including file"
    if near:
        hint = f"did you mean {Path(name).parent / names_by_stem[near[0]]}?"
    raise ConfigError(f"{include.origin}: include={name}: no such file {displayed(child)}; {hint}")


def _collect_settings(mapping: dict[str, Located], problems: list[str]) -> Layer:
    """Return a file's settings by dotted name; unknown names become problems."""
    layer: Layer = {}
    known = settings()

    def visit(section: type[Section], node: dict[str, Located], prefix: str) -> None:
        """Collect the settings of a section, or what is wrong with them."""
        for key, located in node.items():
            path = f"{prefix}{key}"
            field = section.model_fields.get(key)
            if field is None:
                problems.append(f"{located.origin}: {_unknown_key(key, located, prefix)}")
            elif path in known and is_structured(path):
                layer[path] = Located(plain_value(located), located.origin, located.text)
            elif path in known:
                layer[path] = located
            elif isinstance(located.value, dict):
                visit(field.annotation, located.value, f"{path}.")
            elif located.value is not None:  # null: `train:` with everything below it commented out
                typed = word(located.value) if located.text is None else located.text
                problems.append(
                    f"{located.origin}: {path}={typed} is not valid: {path} is a section; "
                    "write its settings below it"
                )

    visit(Config, mapping, "")
    return layer


def plain_value(value: Located | YamlValue) -> YamlValue:
    """Return a value as plain mappings, lists and scalars, without its origins."""
    if isinstance(value, Located):
        return plain_value(value.value)
    if isinstance(value, dict):
        return {key: plain_value(part) for key, part in value.items()}
    return [plain_value(part) for part in value] if isinstance(value, list) else value


def _unknown_key(key: str, located: Located, prefix: str) -> str:
    if key == "include":
        return "include is inside a section; write it at the top level of the file"
    if key in settings():
        section, _, name = key.rpartition(".")
        return (
            f"'{key}' is one key with dots; write {name}: {word(located.value)} "
            f"below {section.replace('.', ': ')}:"
        )
    by_variable = settings_by_variable()
    if key.upper() in by_variable:
        return f"'{key}' is a variable of the shell; in a file write {by_variable[key.upper()]}"
    return _unknown_setting(f"{prefix}{key}")


def settings_by_variable() -> dict[str, str]:
    """Return `{"TRAIN_BATCH_SIZE": "train.batch_size"}` for every setting."""
    return {env_name(path): path for path in settings()}


def _unknown_setting(path: str) -> str:
    suggestion = suggest(path, settings(), sections())
    hint = suggestion.clause() if suggestion else "`make config` lists every setting"
    return f"unknown setting '{path}'; {hint}"


def from_environment(environ: Mapping[str, str], problems: list[str]) -> Layer:
    """Return the settings in variables such as TRAIN_BATCH_SIZE.

    An empty variable is unset, unless its setting is a path or a name.
    """
    by_variable = settings_by_variable()
    layer: Layer = {}
    for name in sorted(environ):
        text = environ[name].strip()
        path = by_variable.get(name, "")
        if not name.startswith(PREFIXES) or not (text or is_name(path)):
            continue
        if path:
            layer[path] = _read_word(path, text, f"environment {name}", problems)
        else:  # its value is not repeated: it may be another program's secret
            problems.append(f"environment {name}: no such setting; {_variable_hint(name)}")
    return layer


def _variable_hint(name: str) -> str:
    """Return what to do about a variable that sets nothing: `TRAIN_LR` -> TRAIN_LEARNING_RATE."""
    path = name.lower().replace("_", ".", 1).replace("tuning.lora_", "tuning.lora.", 1)
    suggestion = suggest(path, settings())
    near = difflib.get_close_matches(name, settings_by_variable(), n=1, cutoff=0.85)
    if near and (suggestion is None or suggestion.is_guess):
        suggestion = Suggestion(near[0], is_guess=True)
    if suggestion is None:
        return f"unset {name} if it is another program's"
    clause = suggestion.clause(suggestion.name and env_name(suggestion.name))
    return f"{clause}. If it is another program's, unset {name}"


def from_overrides(overrides: Iterable[str], problems: list[str]) -> Layer:
    """Return the settings in words such as `train.batch_size=4`."""
    layer: Layer = {}
    for entry in overrides:
        path, equals, text = entry.partition("=")
        text = text.strip()
        if equals and text and path in settings():
            layer[path] = _read_word(path, text, f"--set {path}", problems)
        else:
            problems.append(f"--set {entry}: {_override_problem(path, has_equals=bool(equals))}")
    return layer


def _override_problem(path: str, has_equals: bool) -> str:
    """Return what is wrong with a word of --set that sets nothing."""
    if not has_equals:
        return "has no value; write --set name=value, such as --set train.batch_size=4"
    if path in sections():
        first = next(name for name in settings() if name.startswith(f"{path}."))
        return f"{path} is a section; write one of its settings, such as --set {first}=value"
    by_variable = settings_by_variable()
    if path in by_variable:
        return f"is a variable of the shell; write --set {by_variable[path]}=value"
    if path not in settings():
        return _unknown_setting(path)
    takes_null = type(None) in kinds(settings()[path].annotation)
    null = f", or --set {path}=null" if takes_null else ""
    return f"has no value; write --set {path}=value{null}"


def _read_word(path: str, text: str, origin: str, problems: list[str]) -> Located:
    """Read a word of the shell by the type of its setting; one that cannot be read is a problem."""
    try:
        return Located(_parse_word(path, text), origin, text)
    except (yaml.YAMLError, RecursionError):
        if is_structured(path):
            problems.append(
                f"{origin}: {path}={word(text)} cannot be read; write {wanted_value(path)}"
            )
            return Located(None, origin, text)
        problems.append(
            f"{origin}: {path}={text} cannot be read; "
            "write names with commas between them: q_proj,v_proj"
        )
        return Located([], origin, text)


def _parse_word(path: str, text: str) -> YamlValue:
    """Return the value of a word: a text stays as typed, a list splits at commas."""
    expected = kinds(settings()[path].annotation)
    if text in NULLS and type(None) in expected:
        return None
    if any(text in getattr(kind, "__args__", ()) for kind in expected):  # a choice of a Literal
        return text
    if is_structured(path) and text[:1] in ("{", "[") and not not_utf8(text):
        return parse_flow(text)
    if str in expected:
        return text
    return parse_names(text) if list in expected else parse_scalar(text)
