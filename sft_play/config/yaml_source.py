"""YAML with line numbers: text in, values that know the line they stand on. Pure: no schema, no environment."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft_play.errors import ConfigError

MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars: 1e-4 is a float, `no` is a string, only true/false are booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class Located:
    """A value and where it was written: `configs/a.yaml:12`. A mapping's value is `dict[str, Located]`."""

    value: Any
    origin: str


def parse_scalar(text: str) -> Any:
    """Return what `text` means as one YAML value (`4`, `1e-4`, `true`, `[q_proj, v_proj]`); raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_mapping(path: Path) -> dict[str, Located]:
    """Return the top-level mapping of a YAML file, keys in order; an empty file is an empty mapping.

    Raises: ConfigError with file:line for syntax errors, duplicate keys, a top level that is no mapping, broken UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path}: no such config file; see configs/ for the ones that ship") from None
    except PermissionError:
        raise ConfigError(f"{path}: permission denied; try chmod u+r {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        located = _located(loader, node, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()
    if not isinstance(located.value, dict):
        raise ConfigError(f"{located.origin}: a config is a mapping of sections (model:, tuning:, train:, data:), not {located.value!r}")
    return located.value


def _located(loader: _Loader, node: yaml.Node, path: Path, depth: int = 0) -> Located:
    """Turn a node into values; mappings keep Located leaves, sequences become plain lists."""
    origin = f"{path}:{node.start_mark.line + 1}"
    if depth > MAX_DEPTH:
        raise ConfigError(f"{origin}: nested more than {MAX_DEPTH} deep; an alias that contains itself?")
    if not isinstance(node, yaml.MappingNode):
        return Located(loader.construct_object(node, deep=True), origin)
    _refuse_duplicate_keys(node, path)
    loader.flatten_mapping(node)  # YAML merge keys (<<: *defaults) come first, the mapping's own keys override them
    mapping = {}
    for key_node, value_node in node.value:
        value = _located(loader, value_node, path, depth + 1).value
        mapping[str(loader.construct_object(key_node, deep=True))] = Located(value, f"{path}:{key_node.start_mark.line + 1}")
    return Located(mapping, origin)


def _refuse_duplicate_keys(node: yaml.MappingNode, path: Path) -> None:
    first_line: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        if key in first_line:
            raise ConfigError(f"{path}:{line}: key '{key}' is given twice, first on line {first_line[key]}; keep one of them")
        first_line[key] = line
