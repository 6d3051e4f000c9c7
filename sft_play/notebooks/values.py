"""What an expression of a notebook is worth, as far as it can be read without running. Pure."""

import ast
import operator
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


Item = tuple[ast.expr | None, ast.expr]  # of a dict; `**other` has no key


class Unknown(NamedTuple):
    """A value that only running the notebook would tell."""

    text: str


class Assignment(NamedTuple):
    """Where a variable gets a value."""

    cell: int
    line: int
    value: ast.expr
    code: Code


class Values:
    """The values of a notebook's variables, by their last assignment before a use."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.assignments: dict[str, list[Assignment]] = {}
        self.attributes: dict[tuple[str, str], list[Assignment]] = {}  # by class and name
        self.changed: set[tuple[str | None, Any]] = set()  # `a.b = ...` and `a["b"] = ...`
        self.updated: set[str | None] = {  # `a.update(...)`
            variable(call.func.value)
            for _, call in notebook.calls()
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("update", "setdefault")
        }
        for code in notebook.parsed:
            for node in ast.walk(code.tree):
                if isinstance(node, ast.ClassDef):
                    self._note_class(code, node)
                elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                    self._note(code, node.targets[0], node.value)

    def _note_class(self, code: Code, node: ast.ClassDef) -> None:
        for part in node.body:
            targets = part.targets if isinstance(part, ast.Assign) else []
            if isinstance(part, ast.AnnAssign) and part.value is not None:
                targets = [part.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    made = Assignment(code.number, part.lineno, part.value, code)
                    self.attributes.setdefault((node.name, target.id), []).append(made)

    def _note(self, code: Code, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            made = Assignment(code.number, value.lineno, value, code)
            self.assignments.setdefault(target.id, []).append(made)
        elif isinstance(target, ast.Attribute):
            self.changed.add((variable(target.value), target.attr))
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            self.changed.add((variable(target.value), target.slice.value))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, of_part in zip(target.elts, value.elts, strict=False):
                self._note(code, part, of_part)

    def of(self, code: Code, node: ast.expr) -> Any:
        """Return the value of an expression of a cell, an Unknown where it cannot be read."""
        try:
            return self._value(code, node, depth=0)
        except (_CannotTell, ArithmeticError, TypeError, RecursionError):
            return Unknown(" ".join(code.text(node).split()))

    def keyword(self, found: Found, name: str) -> Any:
        """Return the value of a call's keyword, None where it is not given."""
        node = found.keyword(name)
        return None if node is None else self.of(found.code, node)

    def assigned(self, code: Code, node: ast.expr) -> Assignment | None:
        """Return what a variable was given last before its use in a cell."""
        if not isinstance(node, ast.Name):
            return None
        place = (code.number, node.lineno)
        made = self.assignments.get(node.id, [])
        earlier = [part for part in made if (part.cell, part.line) < place]
        return max(earlier, key=lambda part: (part.cell, part.line), default=None)

    def _value(self, code: Code, node: ast.expr, depth: int) -> Any:
        if depth > 20:
            raise _CannotTell
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(code, part, depth + 1) for part in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            keys = [self._value(code, part, depth + 1) for part in node.keys]
            return dict(
                zip(keys, (self._value(code, part, depth + 1) for part in node.values), strict=True)
            )
        if isinstance(node, ast.UnaryOp):
            return self._unary(code, node, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left = self._value(code, node.left, depth + 1)
            right = self._value(code, node.right, depth + 1)
            return OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Call) and self.notebook.name_of(node.func) in ASKS_FOR_BF16:
            return AUTO
        if isinstance(node, ast.Attribute) and node.attr in ("float16", "bfloat16", "float32"):
            return node.attr
        if isinstance(node, ast.Attribute):
            return self._of_class(node, depth)
        if isinstance(node, ast.Subscript):
            return self._of_mapping(code, node, depth)
        made = self.assigned(code, node)
        if made is None:
            raise _CannotTell
        return self._value(made.code, made.value, depth + 1)

    def _of_class(self, node: ast.Attribute, depth: int) -> Any:
        """Return the value of `Config.rate` or `config.rate`, where a class sets `rate` once."""
        name = variable(node.value)
        made = self.assignments.get(name or "", [])
        classes = {name, *(self._class_of(part.value) for part in made)} - {None}
        found = [part for owner in classes for part in self.attributes.get((owner, node.attr), [])]
        if len(found) != 1 or (name, node.attr) in self.changed:
            raise _CannotTell
        return self._value(found[0].code, found[0].value, depth + 1)

    def _class_of(self, value: ast.expr) -> str | None:
        is_instance = isinstance(value, ast.Call) and not value.args and not value.keywords
        return self.notebook.name_of(value.func) if is_instance else None

    def _of_mapping(self, code: Code, node: ast.Subscript, depth: int) -> Any:
        """Return the value of `config["rate"]`, where nothing sets it anew."""
        key = self._value(code, node.slice, depth + 1)
        name = variable(node.value)
        if (name, key) in self.changed or name in self.updated:
            raise _CannotTell
        holder, items = self._items(code, node.value)
        for written, value in items:
            if isinstance(written, ast.Constant) and written.value == key:
                return self._value(holder, value, depth + 1)
        raise _CannotTell

    def mapping(self, code: Code, node: ast.expr) -> dict[str, Any] | None:
        """Return what `**node` gives a call, None where that cannot be read."""
        name = variable(node)
        holder, items = self._items(code, node)
        if not items or name in self.updated or any(owner == name for owner, _ in self.changed):
            return None
        read: dict[str, Any] = {}
        for key, value in items:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return None
            read[key.value] = self.of(holder, value)
        return read

    def _items(self, code: Code, node: ast.expr) -> tuple[Code, list[Item]]:
        """Return the items of a dict that is written out, here or where a variable got it."""
        made = self.assigned(code, node)
        holder, written = (code, node) if made is None else (made.code, made.value)
        if not isinstance(written, ast.Dict):
            return holder, []
        return holder, list(zip(written.keys, written.values, strict=True))

    def _unary(self, code: Code, node: ast.UnaryOp, depth: int) -> Any:
        value = self._value(code, node.operand, depth + 1)
        if isinstance(node.op, ast.USub):
            return -value
        if isinstance(node.op, ast.Not):
            return AUTO if value == AUTO else not value
        raise _CannotTell


class _CannotTell(Exception):
    """An expression that only running the notebook would tell."""
