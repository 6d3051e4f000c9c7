"""The Python of a code cell: its syntax tree, and where each node is in the cell's own text.

A cell holds more than Python: magics, shell lines and help, which IPython rewrites before it
compiles. Here they are masked line by line for the parser alone, so every node keeps its place and
the text itself is never rewritten. Pure.
"""

import ast
import itertools
import re
import warnings
from dataclasses import dataclass
from typing import NamedTuple

from notebook_converter.document import LINE

# Cell magics whose body is Python that runs in the notebook
PYTHON_CELL_MAGICS = "capture time timeit prun memit mprun".split()
CELL_MAGIC = re.compile(r"\s*%%(\w*)")
TIMED = re.compile(r"\s*(%time(?:it)?[ \t]+)(?=[^-\s])")  # what follows is Python
INDENT = re.compile(r"[ \t\f]*")
LINE_END = re.compile(r"[\r\n]|\Z")
MAX_MAGICS = 300  # of a cell, which is parsed again after each
# A magic, a shell line or one of IPython's calls; either assigned; help; and the magics that
# IPython takes without a %, if no variable has the name
MAGIC = re.compile(
    r"""\s*(?:
        [!%?] | [,;/]\w |
        [\w.,\s*\[\]'"]+=\s*(?:!|%[A-Za-z_]) |
        [%\w.*]+\?{1,2}\s*$ |
        (?:pip|conda|mamba|cd|ls|cat|cp|mv|rm|mkdir|pwd)(?:\s+[-\w./"'~$]|\s*$)
    )""",
    re.VERBOSE,
)


class Place(NamedTuple):
    """The beginning of a line, and the white space that the line begins with."""

    offset: int
    indent: str


@dataclass(frozen=True)
class Code:
    """A code cell; `tree` is None if it is no Python, and `problem` says why."""

    number: int
    source: str
    tree: ast.Module | None
    problem: str | None = None
    masked: frozenset[int] = frozenset()  # lines that are no Python, from 1
    starts: tuple[int, ...] = ()  # offset in `source` at which the parser's line begins
    lines: tuple[str, ...] = ()  # as the parser saw them

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in `source`."""
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        """Return a node as it is written."""
        start, end = self.span(node)
        return self.source[start:end]

    @property
    def newline(self) -> str:
        """What ends a line of this cell."""
        return "\r\n" if "\r\n" in self.source else "\n"

    @property
    def magics(self) -> str:
        """The lines that are no Python, as they are written."""
        written = LINE.findall(self.source)
        return "".join(written[number - 1] for number in sorted(self.masked))

    def place_before(self, node: ast.AST) -> Place:
        """Return the line before which a statement can stand that runs before `node`."""
        path = path_to(self.tree, node)
        # of several statements on one line only the first begins it
        earlier = [part for part in self.tree.body if part.lineno <= path[0].lineno]
        first = next(filter(self.begins_its_line, reversed([*earlier, *path])))
        return self.line_at(self._offset(_first_line(first), first.col_offset))

    def line_at(self, offset: int) -> Place:
        """Return the line that a place is in."""
        start = max(self.source.rfind(end, 0, offset) for end in "\r\n") + 1
        return Place(start, INDENT.match(self.source, start).group())

    def end_of_line(self, offset: int) -> int:
        """Return where the line of a place ends, before its newline."""
        return LINE_END.search(self.source, offset).start()

    def _offset(self, line: int, column: int) -> int:
        """Return the place in `source` of a position of the tree, whose columns count bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def begins_its_line(self, statement: ast.stmt) -> bool:
        """Return whether a statement is the first on its line, so lines can be inserted there."""
        line = _first_line(statement)
        before = self.lines[line - 1].encode()[: statement.col_offset]
        is_continued = line > 1 and self.lines[line - 2].endswith("\\")
        is_elif = isinstance(statement, ast.If) and self.text(statement).startswith("elif")
        return not before.strip() and not is_continued and not is_elif


def parse(number: int, source: str) -> Code:
    """Return the code of a cell, with or without a tree."""
    texts = LINE.findall(source)
    starts = list(itertools.accumulate(map(len, texts), initial=0))
    lines = [text.rstrip("\r\n") for text in texts]
    first = next(filter(str.strip, lines), "")
    magic = CELL_MAGIC.match(first)
    if magic and magic[1] not in PYTHON_CELL_MAGICS:
        return Code(
            number, source, None, f"a %%{magic[1]} cell, which is no Python of the notebook"
        )
    indent = first[: len(first) - len(first.lstrip())]
    for index, line in enumerate(lines):  # IPython takes the first line's indent from all
        if line.startswith(indent):
            lines[index] = line.removeprefix(indent)
            starts[index] += len(indent)
    masked: set[int] = set()
    for _ in range(MAX_MAGICS + 1):
        tree, problem, failed = _parse_lines(lines)
        if not failed or not _mask_magic(lines, starts, masked, failed):
            break
    return Code(number, source, tree, problem, frozenset(masked), tuple(starts), tuple(lines))


def _parse_lines(lines: list[str]) -> tuple[ast.Module | None, str | None, int]:
    """Return the tree, or why there is none and the line where Python gives up."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\\d" in the notebook's strings
            return ast.parse("\n".join(lines)), None, 0
    except SyntaxError as error:
        return None, f"line {error.lineno}: {error.msg}", min(error.lineno or 0, len(lines))
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deep
        return None, str(error) or type(error).__name__, 0


def _mask_magic(lines: list[str], starts: list[int], masked: set[int], failed: int) -> bool:
    """Make Python of the line that failed; return whether it is a magic, and Python may continue.

    Of `%time f()` the magic alone is taken away; else the line becomes `pass`.
    """
    index = failed - 1
    while index > 0 and lines[index - 1].endswith("\\"):
        index -= 1
    line = lines[index]
    timed = TIMED.match(line)
    if timed:
        lines[index] = line[: timed.start(1)] + line[timed.end(1) :]
        starts[index] += len(timed[1])
        return True
    if not MAGIC.match(line):
        return False
    lines[index] = line[: len(line) - len(line.lstrip())] + "pass"
    masked.add(index + 1)
    while line.endswith("\\") and index + 1 < len(lines):  # a shell line continues
        index += 1
        line, lines[index] = lines[index], "#"
        masked.add(index + 1)
    return True


def _first_line(statement: ast.stmt) -> int:
    """Return the line at which a statement begins, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min(part.lineno for part in (statement, *decorators))


def path_to(tree: ast.AST, node: ast.AST) -> list[ast.stmt]:
    """Return the statements that hold a node, from the outermost to the innermost."""
    statements = (part for part in ast.walk(tree) if isinstance(part, ast.stmt))
    return [part for part in statements if node in ast.walk(part)]


def nodes_outside_strings(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes except those in f-strings, whose positions Python 3.11 gets wrong."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    inside = {part for string in strings for part in ast.walk(string)}
    return [node for node in ast.walk(tree) if node not in inside]
