"""Numbers and texts that a notebook writes, as far as they are known without running it. Pure."""

import ast
import operator
from collections import defaultdict
from typing import Any, NamedTuple

from notebook_converter.code import Code
from notebook_converter.recognize import Found, Notebook, variable

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
ANY_KEY = ...  # what `a.update(...)` may set
MAX_DEPTH = 20  # of variables that are made of others


class Written(NamedTuple):
    """An expression, and the cell that it is in."""

    code: Code
    value: ast.expr

    @property
    def place(self) -> tuple[int, int]:
        """Cell and line: the order in which expressions run."""
        return self.code.number, self.value.lineno


class Values:
    """The values of a notebook's variables, by their last assignment before a use."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        # what is assigned to a variable, and in a class: by the class, if any, and the name
        self.assigned: defaultdict[tuple[str | None, str], list[Written]] = defaultdict(list)
        self.changed: set[tuple[str | None, Any]] = set()  # `a.b = ...` and `a["b"] = ...`
        for code, node in notebook.nodes(ast.Assign):
            if len(node.targets) == 1:
                self._take(code, None, node.targets[0], node.value)
        for code, node in notebook.nodes(ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
                    target = getattr(part, "target", None) or part.targets[0]
                    self._take(code, node.name, target, part.value)
        for found in notebook.methods("update") + notebook.methods("setdefault"):
            self.changed.add((found.receiver, ANY_KEY))

    def _take(self, code: Code, owner: str | None, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self.assigned[owner, name].append(Written(code, value))
            case ast.Attribute(attr=key) | ast.Subscript(slice=ast.Constant(value=key)):
                self.changed.add((variable(target.value), key))
            case ast.Tuple() if isinstance(value, ast.Tuple):
                for part, part_value in zip(target.elts, value.elts, strict=False):
                    self._take(code, owner, part, part_value)

    def argument(self, found: Found, name: str) -> Any:
        """Return the value of a call's argument, None if it is not given or cannot be read."""
        node = found.argument(name)
        try:
            return None if node is None else self._value(Written(found.code, node))
        except (LookupError, ArithmeticError, TypeError, RecursionError):
            return None

    def _item(self, code: Code, node: ast.expr, key: Any) -> Written:
        """Return what a written-out dict has for a key that is not assigned again later."""
        name = variable(node)
        code, written = self._written(code, node)
        is_changed = {(name, ANY_KEY), (name, key)} & self.changed
        if not isinstance(written, ast.Dict) or is_changed:
            raise LookupError
        keys = [getattr(part, "value", None) for part in written.keys]
        return Written(code, dict(zip(keys, written.values, strict=True))[key])

    def _written(self, code: Code, node: ast.expr) -> Written:
        """Return what a variable was given last before its use in a cell; else the expression."""
        use = Written(code, node)
        made = self.assigned.get((None, variable(node)), [])
        earlier = [part for part in made if part.place < use.place]
        return max(earlier, key=lambda part: part.place, default=use)

    def _value(self, written: Written, depth: int = 0) -> Any:
        """Return the value of an expression.

        Raises: LookupError if only running tells it, RecursionError if it is nested too deep.
        """
        if depth > MAX_DEPTH:
            raise RecursionError
        code, node = written

        def value(part: ast.expr) -> Any:
            return self._value(Written(code, part), depth + 1)

        match node:
            case ast.Constant():
                return node.value
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Attribute():
                return self._value(self._attribute(code, node), depth + 1)
            case ast.Subscript():
                item = self._item(code, node.value, value(node.slice))
                return self._value(item, depth + 1)
        given = self._written(code, node)
        if given.value is node:
            raise LookupError
        return self._value(given, depth + 1)

    def _attribute(self, code: Code, node: ast.Attribute) -> Written:
        """Return what a class gives `Config.rate` or `config.rate`, if it does so once."""
        made = self._written(code, node.value).value
        is_made_plainly = isinstance(made, ast.Call) and not made.args and not made.keywords
        owner = self.notebook.name_of(made.func if is_made_plainly else node.value)
        found = self.assigned[owner, node.attr]
        if len(found) != 1 or (variable(node.value), node.attr) in self.changed:
            raise LookupError
        return found[0]
