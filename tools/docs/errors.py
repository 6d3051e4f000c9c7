"""docs/evidence/errors.md: every error message that the code raises. No torch.

A message is a text in the source with names where values will stand. They are read from the syntax
tree, so an error that is added is in the page, and none is there that the code does not have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from notebook_converter.document import NotebookError
from sft_play.config.loader import PROJECT_ROOT
from sft_play.errors import ExitClass, SftPlayError
from tools.docs.tables import table

PACKAGES = ("notebook_converter", "sft_kernels", "sft_play")
CLASSES = {kind.__name__: kind.exit_class for kind in SftPlayError.__subclasses__()} | {
    NotebookError.__name__: ExitClass.CONFIG  # the commands raise it as a ConfigError
}
HEADINGS = {
    ExitClass.CONFIG: "A setting is wrong",
    ExitClass.DATA: "The data is wrong",
    ExitClass.CHECKPOINT: "A checkpoint is refused",
    ExitClass.ENVIRONMENT: "The machine lacks something",
    ExitClass.DIVERGED: "The loss diverged",
    ExitClass.OUT_OF_MEMORY: "Out of memory",
    ExitClass.STOPPED: "Stopped on request",
}
FEW_LETTERS = 12  # a text with fewer is put together elsewhere


class Message(NamedTuple):
    """An error's text, with names in angle brackets where values will stand."""

    text: str
    source: str  # file within the project


def messages() -> dict[ExitClass, list[Message]]:
    """Return the messages of each exit class, sorted."""
    found: dict[ExitClass, set[Message]] = {kind: set() for kind in HEADINGS}
    paths = [path for name in PACKAGES for path in (PROJECT_ROOT / name).rglob("*.py")]
    for path in sorted(paths):
        source = path.relative_to(PROJECT_ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, argument in _raised(tree):
            text = " ".join(_words(argument).split())
            if CLASSES[name] in found and len(re.sub(r"<.*?>|\W", "", text)) >= FEW_LETTERS:
                found[CLASSES[name]].add(Message(text, source))
    return {kind: sorted(texts, key=_sort_key) for kind, texts in found.items()}


def _raised(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the class and the first argument of each error that is made."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.args and node.func.id in CLASSES:
            yield node.func.id, node.args[0]


def _words(node: ast.expr) -> str:
    """Return a text as it is written, with <names> for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.IfExp):
        return _words(node.body)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return f"<{_name_of(value)}>"


def _name_of(node: ast.expr) -> str:
    """Return a word for a value: the last name in its expression."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.args and node.func.id in ("len", "str", "repr"):
            return _name_of(node.args[0])
        return _name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_").replace("_", " ")
    if isinstance(node, ast.Name):
        return node.id.strip("_").replace("_", " ")
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return "value"


def _sort_key(message: Message) -> tuple[str, str, str]:
    return re.sub(r"<.*?>|\W", "", message.text).lower(), message.source, message.text


def markdown() -> str:
    """Return a table of the messages of each exit class."""
    parts = []
    for kind, listed in messages().items():
        if listed:
            rows = [(_plain(message.text), f"`{message.source}`") for message in listed]
            heading = f"## {HEADINGS[kind]} (exit class {kind.value})"
            parts.append(f"{heading}\n\n{table(('Message', 'Raised in'), rows)}")
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Return a text whose characters are no markup."""
    text = re.sub(r"[\\*_\[\]]", r"\\\g<0>", text)
    return text.replace("<", "&lt;").replace("`", "&#96;")
