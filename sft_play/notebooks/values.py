"""What an expression of a notebook is worth, as far as it can be read without running. Pure."""

import ast
import operator
from typing import Any, NamedTuple

from sft_play.notebooks.code import Code
from sft_play.notebooks.recognise import Found, Notebook

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
        for code in notebook.parsed:
            for node in ast.walk(code.tree):
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    self._note(code, node.targets[0], node.value)

    def _note(self, code: Code, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            made = Assignment(code.number, value.lineno, value, code)
            self.assignments.setdefault(target.id, []).append(made)
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
        made = self.assigned(code, node)
        if made is None:
            raise _CannotTell
        return self._value(made.code, made.value, depth + 1)

    def _unary(self, code: Code, node: ast.UnaryOp, depth: int) -> Any:
        value = self._value(code, node.operand, depth + 1)
        if isinstance(node.op, ast.USub):
            return -value
        if isinstance(node.op, ast.Not):
            return AUTO if value == AUTO else not value
        raise _CannotTell


class _CannotTell(Exception):
    """An expression that only running the notebook would tell."""
