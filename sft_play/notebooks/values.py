"""What an expression of a notebook is worth, as far as it can be read without running. Pure."""

import ast
import operator
from collections import defaultdict
from typing import Any, NamedTuple

from sft_play.notebooks.code import Code
from sft_play.notebooks.recognise import Found, Notebook, variable

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
# Calls that ask whether a GPU computes in bfloat16: `auto` here
ASKS_FOR_BF16 = ("is_bfloat16_supported", "is_bf16_supported")
AUTO = "auto"
MAX_DEPTH = 20  # of variables that are made of others


class Unknown(NamedTuple):
    """A value that only running the notebook would tell."""

    text: str


class Assignment(NamedTuple):
    """Where a variable gets a value."""

    code: Code
    value: ast.expr

    @property
    def place(self) -> tuple[int, int]:
        return self.code.number, self.value.lineno


class Values:
    """The values of a notebook's variables, by their last assignment before a use."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.assignments: defaultdict[str, list[Assignment]] = defaultdict(list)
        # by class and name
        self.attributes: defaultdict[tuple[str, str], list[Assignment]] = defaultdict(list)
        self.changed: set[tuple[str | None, Any]] = set()  # `a.b = ...` and `a["b"] = ...`
        self.updated = {  # `a.update(...)`
            variable(found.call.func.value)
            for found in notebook.functions(["update", "setdefault"])
            if found.owner is not None
        }
        for code, node in notebook.nodes(ast.Assign):
            if len(node.targets) == 1:
                self._take(code, node.targets[0], node.value)
        for code, node in notebook.nodes(ast.ClassDef):
            for part in node.body:
                if not isinstance(part, ast.Assign | ast.AnnAssign) or part.value is None:
                    continue
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        made = Assignment(code, part.value)
                        self.attributes[node.name, target.id].append(made)

    def _take(self, code: Code, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name():
                self.assignments[target.id].append(Assignment(code, value))
            case ast.Attribute():
                self.changed.add((variable(target.value), target.attr))
            case ast.Subscript(slice=ast.Constant()):
                self.changed.add((variable(target.value), target.slice.value))
            case ast.Tuple() if isinstance(value, ast.Tuple):
                for part, part_value in zip(target.elts, value.elts, strict=False):
                    self._take(code, part, part_value)

    def read(self, code: Code, node: ast.expr) -> Any:
        """Return the value of an expression of a cell, an Unknown where it cannot be read."""
        try:
            return self._value(code, node)
        except (_CannotTell, ArithmeticError, TypeError, RecursionError):
            return Unknown(" ".join(code.text(node).split()))

    def keyword(self, found: Found, name: str) -> Any:
        """Return the value of a call's keyword, None where it is not given."""
        node = found.keyword(name)
        return None if node is None else self.read(found.code, node)

    def mapping(self, code: Code, node: ast.expr) -> dict[str, Any] | None:
        """Return what `**node` gives a call, None where that cannot be read."""
        name = variable(node)
        code, written = self._written(code, node)
        if not isinstance(written, ast.Dict) or not written.keys or name in self.updated:
            return None
        if any(owner == name for owner, _ in self.changed):
            return None
        keys = [getattr(key, "value", None) for key in written.keys]
        if not all(isinstance(key, str) for key in keys):
            return None
        values = (self.read(code, value) for value in written.values)
        return dict(zip(keys, values, strict=True))

    def _written(self, code: Code, node: ast.expr) -> tuple[Code, ast.expr]:
        """Return what a variable was given last before its use in a cell; else the expression."""
        made = self.assignments.get(node.id, []) if isinstance(node, ast.Name) else []
        earlier = [part for part in made if part.place < (code.number, node.lineno)]
        return max(earlier, key=lambda part: part.place, default=(code, node))

    def _value(self, code: Code, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression. Raises: _CannotTell."""
        if depth > MAX_DEPTH:
            raise _CannotTell

        def value(part: ast.expr) -> Any:
            return self._value(code, part, depth + 1)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [value(part) for part in node.elts]
            case ast.Dict() if all(node.keys):
                items = zip(node.keys, node.values, strict=True)
                return {value(key): value(part) for key, part in items}
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                operand = value(node.operand)
                return AUTO if operand == AUTO else not operand
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Call() if self.notebook.name_of(node.func) in ASKS_FOR_BF16:
                return AUTO
            case ast.Attribute(attr="float16" | "bfloat16" | "float32"):
                return node.attr
            case ast.Attribute():
                return self._value(*self._attribute(node), depth + 1)
            case ast.Subscript():
                return self._value(*self._item(code, node, value(node.slice)), depth + 1)
        code, written = self._written(code, node)
        if written is node:
            raise _CannotTell
        return self._value(code, written, depth + 1)

    def _attribute(self, node: ast.Attribute) -> Assignment:
        """Return what a class gives `Config.rate` or `config.rate`, where it does so once."""
        name = variable(node.value)
        classes = {name}
        for made in self.assignments.get(name or "", []):
            call = made.value
            if isinstance(call, ast.Call) and not call.args and not call.keywords:
                classes.add(self.notebook.name_of(call.func))
        found = [part for each in classes for part in self.attributes.get((each, node.attr), [])]
        if len(found) != 1 or (name, node.attr) in self.changed:
            raise _CannotTell
        return found[0]

    def _item(self, code: Code, node: ast.Subscript, key: Any) -> Assignment:
        """Return what a written-out dict gives `config["rate"]`, where nothing sets it anew."""
        name = variable(node.value)
        code, written = self._written(code, node.value)
        if isinstance(written, ast.Dict) and name not in self.updated:
            for made, value in zip(written.keys, written.values, strict=True):
                is_key = isinstance(made, ast.Constant) and made.value == key
                if is_key and (name, key) not in self.changed:
                    return Assignment(code, value)
        raise _CannotTell


class _CannotTell(Exception):
    """An expression that only running the notebook would tell."""
