"""The model types and classes of the installed transformers, read without its import.

That would take seconds; its tables are tuples of words in two of its files.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
TABLE = "_MAPPING_NAMES"  # at the end of a table's name
GENERATING = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
)


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the class of each model type in each of transformers' tables; {} without transformers.

    A table that begins with another one has only what it adds.
    """
    package = find_spec("transformers")
    folders = package.submodule_search_locations if package else None
    found: dict[str, dict[str, str]] = {}
    for file in FILES if folders else ():
        path = Path(folders[0]) / "models" / "auto" / file
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign | ast.Expr):
                name = _table(statement)
                found[name] = found.get(name, {}) | dict(_pairs(statement))
    return found


def is_known(model_type: str) -> bool:
    """Return whether transformers has a model type."""
    return any(model_type in table for table in tables().values())


def classes(*names: str, model_type: str | None = None) -> set[str]:
    """Return the classes in some tables, of one model type or of all."""
    found = set()
    for name in names:
        for key, model_class in tables().get(name, {}).items():
            if model_type in (None, key):
                found.add(model_class)
    return found


def _table(statement: ast.stmt) -> str:
    """Return the table that a statement fills: the first that it names."""
    names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
    return next((name.removesuffix(TABLE) for name in names if name.endswith(TABLE)), "")


def _pairs(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    for node in ast.walk(statement):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(key)), ast.Constant(value=str(name))]):
                yield key, name
            case ast.Dict(keys=keys, values=values):
                for key, name in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(name, ast.Constant):
                        yield key.value, name.value
