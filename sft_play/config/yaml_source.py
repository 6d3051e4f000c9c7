"""Reads YAML, and JSON with comments, so that every value knows its file and line.

Knows no schema and no environment.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sft_play import reading
from sft_play.errors import ConfigError

TAG = "tag:yaml.org,2002:"
MOST_DEPTH = 30  # a config has three levels
MOST_VALUES = 20_000  # with those that aliases repeat; a config has some 300
MAX_CONFIG_BYTES = 1 << 20
# What the standard library does not read in JSON: comments, and a comma before a closing bracket.
# A text in quotes comes first, so that nothing is found inside it; YAML takes no tab between values
COMMENT = r"//[^\n]*|/\*.*?(?:\*/|\Z)"
NOT_JSON = re.compile(
    rf'(?P<text>"(?:[^"\\]|\\.)*+(?:"|\\?\Z))|{COMMENT}|\t|,(?=(?>\s|{COMMENT})*+[}}\]])', re.DOTALL
)
# A value of a config file. Inside a mapping each value is a Located.
YamlValue = None | bool | int | float | str | list[Any] | dict[str, Any]


class Scalar(NamedTuple):
    """How one type of scalar is recognized."""

    tag: str
    pattern: str
    first_characters: list[str]  # "" is the empty scalar


# YAML 1.2 scalars: 1e-4 is a float, `no` and 2024-01-01 are texts, 010 is ten, and only true and
# false are booleans. Whole numbers over 18 digits stay text: int() refuses thousands of digits with
# an error that names no line.
SCALARS = (
    Scalar("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    Scalar("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    Scalar("int", r"[-+]?[0-9]{1,18}", list("-+0123456789")),
    Scalar(
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
        list("-+.0123456789"),
    ),
    Scalar("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    Scalar("merge", r"<<", ["<"]),
)
KNOWN_TAGS = {f"{TAG}{name}" for name in "null bool int float str seq map".split()}
ADVICE = {  # a fragment of PyYAML's sentence: what to do about it
    r"'\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "put a value that contains ': ' in quotes, or check the "
    "indentation",
    "expected <block end>": "check the indentation",
    "could not find expected ':'": "write name: value, with a space after the colon",
    "found another document": "a config is one document; delete the --- before this line",
    "aliases repeat": "write out what is needed",
    "undefined alias": "define it with & first, or put a value that begins with * in quotes",
    "cannot start any token": "put the value in quotes",
}


@dataclass(frozen=True)
class Located:
    """A value and where it was written."""

    value: YamlValue  # of a mapping: dict[str, Located]
    origin: str  # configs/a.yaml:12
    text: str | None = None  # a scalar as it was typed: 1.10 and not 1.1


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars above, for MOST_VALUES that lie MOST_DEPTH deep at most."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.values = 0  # what an alias repeats is counted each time
        self.values_of: dict[int, int] = {}  # by id(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Return the next node. Raises: RecursionError if nested too deep, MarkedYAMLError."""
        self.depth += 1
        if self.depth > MOST_DEPTH:  # a scanner takes ever longer, the deeper it is
            raise RecursionError
        before, mark = self.values, self.peek_event().start_mark
        node = super().compose_node(parent, index)  # of an alias: that of its anchor
        self.values = before + self.values_of.setdefault(id(node), self.values - before + 1)
        if self.values > MOST_VALUES:
            words = f"aliases repeat values, or the file has many: over {MOST_VALUES:,} in all"
            raise yaml.MarkedYAMLError(problem=words, problem_mark=mark)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts that YAML 1.1 or the scalars above would read differently."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.yaml_implicit_resolvers = {}
for _scalar in SCALARS:
    _regex = re.compile(f"^(?:{_scalar.pattern})$")
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{TAG}{_scalar.tag}", _regex, _scalar.first_characters)
_Loader.add_constructor(f"{TAG}int", _construct_int)


def parse_scalar(text: str) -> YamlValue:
    """Return one YAML scalar: `4`, `1e-4`, `true` or `null`; anything else is a text."""
    loader = _Loader("")
    text = text.strip()
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def parse_names(text: str) -> YamlValue:
    """Return `q_proj,v_proj` or `["q_proj", "v_proj"]` as a list. Raises yaml.YAMLError."""
    if text.lstrip().startswith("["):
        return parse_flow(text)
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_flow(text: str) -> YamlValue:
    """Return the value of `[a, b]` or `{a: 1}`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def dump(tree: Mapping[str, YamlValue]) -> str:
    """Return YAML text that `read_mapping` reads back to equal values, keys in order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_mapping(path: Path, shown: str | None = None) -> dict[str, Located]:
    """Return the top-level mapping of a YAML file, keys in order; {} for an empty file.

    `shown` is the file's name in origins and messages, by default the path.

    Raises: ConfigError with file:line for syntax errors, duplicate keys, a top level that is no
    mapping, and broken UTF-8.
    """
    shown = shown or str(path)
    return _parse_mapping(_read_text(path, shown), shown)


class JsonFile(NamedTuple):
    """The value of a JSON file, and file:line:column of each key by its dotted name."""

    value: Any
    origins: dict[str, str]


def read_commented_json(path: Path) -> JsonFile:
    """Return what a JSON file with comments and trailing commas has.

    Raises: ConfigError with file:line:column for syntax errors and duplicate keys, with file:line
    for broken UTF-8.
    """
    shown = str(path)

    def refuse(name: str) -> None:
        """Refuse what Python reads, but the JSON standard does not define."""
        raise ConfigError(f"{shown}: {name} is no JSON value; write a finite number, or null")

    def blank(found: re.Match[str]) -> str:
        """Return spaces in place of all but a text, so that lines and columns stay."""
        if found[0].startswith("/*") and not found[0][2:].endswith("*/"):
            return found[0]  # it is never closed
        return found["text"] or re.sub(r"[^\n]", " ", found[0])

    text = NOT_JSON.sub(blank, _read_text(path, shown))
    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{shown}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply to read") from None
    if not isinstance(value, dict):
        return JsonFile(value, {})
    # escaped, because YAML breaks lines at some characters at which JSON does not
    text = text.encode("ascii", "backslashreplace").decode()
    return JsonFile(value, dict(_origins(_parse_mapping(text, shown, with_columns=True), "")))


def _origins(mapping: dict[str, Located], prefix: str) -> Iterator[tuple[str, str]]:
    for key, located in mapping.items():
        yield f"{prefix}{key}", located.origin
        if isinstance(located.value, dict):
            yield from _origins(located.value, f"{prefix}{key}.")


def _parse_mapping(text: str, shown: str, with_columns: bool = False) -> dict[str, Located]:
    """Return the top-level mapping of a YAML text; origins have columns, too, if asked.

    Raises: ConfigError with file:line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        located = _Reading(loader, shown, with_columns).located(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{shown}:{line}: not valid YAML: character {error.character:#06x} is not allowed; "
            "delete it"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(error, shown)) from None
    except RecursionError:
        raise ConfigError(
            f"{shown}: nested too deeply to read; a config has three levels"
        ) from None
    if not isinstance(located.value, dict):
        wrong = "a list" if located.text is None else located.text
        raise ConfigError(
            f"{located.origin}: a config is a mapping of sections (model:, tuning:, train:, "
            f"data:), not {wrong}"
        )
    return located.value


def _read_text(path: Path, shown: str) -> str:
    try:
        return reading.read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{shown}: no such config file; see configs/ for the ones that ship"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{shown}: is a folder; name a .yaml file in it") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{shown}:{line}: not UTF-8: byte 0x{byte:02x}; save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None


def _syntax_error(error: yaml.MarkedYAMLError, shown: str) -> str:
    mark = error.problem_mark or error.context_mark
    if error.context == "while scanning a simple key":
        mark = error.context_mark  # the key without a colon; the problem is found a line later
    line = mark.line + 1 if mark else 1
    sentence = " ".join(filter(None, (error.context, error.problem)))
    advice = next((f"; {words}" for fragment, words in ADVICE.items() if fragment in sentence), "")
    return f"{shown}:{line}: not valid YAML: {sentence}{advice}"


class _Reading:
    """Converts the nodes of one file to values; a node that aliases repeat is converted once."""

    def __init__(self, loader: _Loader, shown: str, with_columns: bool) -> None:
        self.loader = loader
        self.shown = shown
        self.with_columns = with_columns
        # by id(node); None while the node is being converted
        self.done: dict[int, Located | None] = {}

    def located(self, node: yaml.Node) -> Located:
        """Return a node's value: mappings keep Located values, sequences become plain lists."""
        if id(node) not in self.done:
            self.done[id(node)] = None
            self.done[id(node)] = self._convert(node)
        located = self.done[id(node)]
        if located is None:
            raise ConfigError(
                f"{self._at(node)}: an alias that contains itself; write the values out"
            )
        return located

    def _convert(self, node: yaml.Node) -> Located:
        origin = self._at(node)
        if node.tag not in KNOWN_TAGS:
            raise ConfigError(
                f"{origin}: the tag {_short_tag(node)} has no meaning in a config; delete it"
            )
        if isinstance(node, yaml.SequenceNode):
            return Located([self.located(child).value for child in node.value], origin)
        if isinstance(node, yaml.ScalarNode):
            return Located(self._scalar(node), origin, node.value)
        values = {}
        for key, child in self._pairs(node):
            located = self.located(child)
            values[key.value] = Located(located.value, self._at(key), located.text)
        return Located(values, origin)

    def _scalar(self, node: yaml.ScalarNode) -> YamlValue:
        try:
            return self.loader.construct_object(node)
        except ValueError:  # `!!int two`
            raise ConfigError(
                f"{self._at(node)}: {node.value!r} does not fit its tag {_short_tag(node)}; "
                "delete the tag"
            ) from None

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        """Return a mapping's pairs, those merged in (`<<: *defaults`) first: later ones win."""
        self._refuse_bad_keys(node)
        merged: list[tuple[yaml.ScalarNode, yaml.Node]] = []
        own = []
        for key, child in node.value:
            if key.tag != f"{TAG}merge":
                own.append((key, child))
                continue
            sources = child.value if isinstance(child, yaml.SequenceNode) else [child]
            for source in reversed(sources):  # of several the first one wins
                if not isinstance(source, yaml.MappingNode):
                    raise ConfigError(
                        f"{self._at(key)}: << merges mappings; write <<: *name of one, "
                        "or a list of them"
                    )
                merged += self._pairs(source)
        return merged + own

    def _refuse_bad_keys(self, node: yaml.MappingNode) -> None:
        first_line: dict[str, int] = {}
        problems = []
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{self._at(key)}: a setting's name is a word, not a list or a mapping"
                )
            if key.value in first_line:
                problems.append(
                    f"{self._at(key)}: key '{key.value}' is given twice, "
                    f"first on line {first_line[key.value]}; keep one of them"
                )
            first_line.setdefault(key.value, line)
        if problems:
            raise ConfigError("\n".join(problems))

    def _at(self, node: yaml.Node) -> str:
        mark = node.start_mark
        column = f":{mark.column + 1}" if self.with_columns else ""
        return f"{self.shown}:{mark.line + 1}{column}"


def _short_tag(node: yaml.Node) -> str:
    return node.tag.replace(TAG, "!!")
