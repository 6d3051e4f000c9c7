"""The Python of a code cell: its syntax tree, and where each node is in the cell's own text.

A cell holds more than Python: magics, shell lines and help, which IPython rewrites before it
compiles. Here they are masked line by line for the parser alone, so every node keeps its place and
the text itself is never rewritten. Pure.
"""

import ast
import re
import warnings
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
# Cell magics whose body is Python that runs in the notebook
PYTHON_CELL_MAGICS = ("capture", "time", "timeit", "prun", "memit", "mprun")
CELL_MAGIC = re.compile(r"\s*%%(\w*)")
LINE_MAGIC = re.compile(r"\s*(?:[!%?]|[,;/]\w)")
ASSIGNED_MAGIC = re.compile(r"\s*[\w.,\s*\[\]'\"]+=\s*(?:!|%[A-Za-z_])")
TIMED = re.compile(r"\s*(%time(?:it)?[ \t]+)(?=[^-\s])")  # what follows is Python
HELP = re.compile(r"\s*[%\w.*]+\?{1,2}\s*$")
# IPython takes these without a %, where no variable has the name
AUTOMAGIC = re.compile(
    r"\s*(?:pip|conda|mamba|cd|ls|cat|cp|mv|rm|mkdir|pwd)(?:\s+[-\w./\"'~$]|\s*$)"
)
# What a scan of Python's brackets and strings must tell apart on a line
LEXEME = re.compile(
    r"""(?P<comment>\#.*) | (?P<triple>'{3}|"{3}) |
        (?P<string>'(?:\\.|[^'\\\n])*(?:'|\\?$) | "(?:\\.|[^"\\\n])*(?:"|\\?$)) |
        (?P<open>[\[({]) | (?P<close>[\])}])""",
    re.VERBOSE,
)


class Edit(NamedTuple):
    """Text that takes the place of `source[start:end]`."""

    start: int
    end: int
    text: str


class Place(NamedTuple):
    """The beginning of a line, and the white space that the line begins with."""

    offset: int
    indent: str


@dataclass(frozen=True)
class Code:
    """A code cell; `tree` is None where it is no Python, and `problem` says why."""

    number: int
    source: str
    tree: ast.Module | None
    problem: str | None = None
    masked: frozenset[int] = frozenset()  # lines that are no Python, from 1
    starts: tuple[int, ...] = ()  # offset in `source` at which the parser's line begins
    lines: tuple[str, ...] = ()  # as the parser saw them

    def offset(self, line: int, column: int) -> int:
        """Return the place in `source` of a position of the tree, whose columns count bytes."""
        characters = len(self.lines[line - 1].encode()[:column].decode())
        return self.starts[line - 1] + characters

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in `source`."""
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def text(self, node: ast.AST) -> str:
        """Return a node as it is written."""
        start, end = self.span(node)
        return self.source[start:end]

    @property
    def newline(self) -> str:
        """What ends a line of this cell."""
        return "\r\n" if "\r\n" in self.source else "\n"

    def place_before(self, node: ast.AST) -> Place:
        """Return the line before which a statement can stand that runs before `node`."""
        path = list(path_to(self.tree, node))
        for statement in reversed(path):
            if self._begins_its_line(statement):
                return self._line_of(statement)
        # several statements on one line: before the first of them
        earlier = [statement for statement in self.tree.body if statement.lineno <= path[0].lineno]
        begins = [statement for statement in earlier if self._begins_its_line(statement)]
        return self._line_of(begins[-1])

    def end_of_line(self, offset: int) -> int:
        """Return where the line of a place ends, before its newline."""
        found = re.compile(r"[\r\n]|\Z").search(self.source, offset)
        return found.start()

    def _begins_its_line(self, statement: ast.stmt) -> bool:
        line = first_line(statement)
        before = self.lines[line - 1].encode()[: statement.col_offset].decode()
        is_continued = line > 1 and self.lines[line - 2].endswith("\\")
        is_elif = isinstance(statement, ast.If) and self.text(statement).startswith("elif")
        return not before.strip() and not is_continued and not is_elif

    def _line_of(self, statement: ast.stmt) -> Place:
        start = self.offset(first_line(statement), statement.col_offset)
        begin = max(self.source.rfind("\n", 0, start), self.source.rfind("\r", 0, start)) + 1
        return Place(begin, re.compile(r"[ \t\f]*").match(self.source, begin).group())


def parse(number: int, source: str) -> Code:
    """Return the code of a cell, with or without a tree."""
    texts = LINE.findall(source)
    starts = []
    offset = 0
    for text in texts:
        starts.append(offset)
        offset += len(text)
    lines = [text.rstrip("\r\n") for text in texts]
    magic = _cell_magic(lines)
    if magic is not None and magic not in PYTHON_CELL_MAGICS:
        return Code(number, source, None, f"a %%{magic} cell, which is no Python of the notebook")
    removed = _remove_indent(lines)
    starts = [start + width for start, width in zip(starts, removed, strict=True)]
    masked: frozenset[int] = frozenset()
    tree, problem = _tree(lines)
    if tree is None:
        _remove_timing(lines, starts)
        masked = frozenset(_mask(lines))
        tree, problem = _tree(lines)
    return Code(number, source, tree, problem, masked, tuple(starts), tuple(lines))


def apply(source: str, edits: Iterable[Edit]) -> str:
    """Return a text with edits that do not overlap; those at one place keep their order."""
    ordered = sorted(enumerate(edits), key=lambda pair: (pair[1].start, pair[0]), reverse=True)
    for _, edit in ordered:
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def first_line(statement: ast.stmt) -> int:
    """Return the line at which a statement begins, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def path_to(tree: ast.AST, node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that hold a node, from the outermost to the innermost."""
    holder = tree
    while holder is not node:
        children = ast.iter_child_nodes(holder)
        holder = next(part for part in children if any(inner is node for inner in ast.walk(part)))
        if isinstance(holder, ast.stmt):
            yield holder


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node, but for those in f-strings: Python 3.11 misplaces them."""
    strings = {node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
    return (node for node in nodes_without(tree, strings) if isinstance(node, ast.Call))


def nodes_without(tree: ast.AST, left_out: Container[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, but for some and all below them."""
    # no recursion: a long sum of strings is as deep as it is long
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if node not in left_out:
            yield node
            waiting += ast.iter_child_nodes(node)


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements that stand one after the other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _tree(lines: list[str]) -> tuple[ast.Module | None, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\\d" in the notebook's strings
            return ast.parse("\n".join(lines)), None
    except SyntaxError as error:
        return None, f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deep
        return None, str(error) or type(error).__name__


def _cell_magic(lines: list[str]) -> str | None:
    """Return the name of the magic that a cell begins with."""
    first = next((line for line in lines if line.strip()), "")
    found = CELL_MAGIC.match(first)
    return found.group(1) if found else None


def _remove_indent(lines: list[str]) -> list[int]:
    """Take the first line's indent from all lines that have it, as IPython does; return widths."""
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    widths = []
    for index, line in enumerate(lines):
        has_it = bool(indent) and line.startswith(indent)
        widths.append(len(indent) if has_it else 0)
        lines[index] = line[widths[-1] :]
    return widths


def _remove_timing(lines: list[str], starts: list[int]) -> None:
    """Take `%time` from the front of statements, and move the beginnings of their lines."""
    for index, line in enumerate(lines):
        found = TIMED.match(line)
        if found:
            lines[index] = line[: found.start(1)] + line[found.end(1) :]
            starts[index] += len(found.group(1))


def _mask(lines: list[str]) -> Iterator[int]:
    """Put `pass` in place of lines that are no Python; yield their numbers."""
    scan = Scan()
    is_continued = False
    for index, line in enumerate(lines):
        if is_continued:  # of a shell line
            lines[index] = "#"
        elif scan.is_between_statements and _is_magic(line):
            lines[index] = line[: len(line) - len(line.lstrip())] + "pass"
        else:
            scan.read(line)
            continue
        is_continued = line.endswith("\\")
        yield index + 1


def _is_magic(line: str) -> bool:
    patterns = (LINE_MAGIC, ASSIGNED_MAGIC, HELP, AUTOMAGIC)
    return any(pattern.match(line) for pattern in patterns)


class Scan:
    """Knows, after each line of Python, whether a string or a bracket is still open."""

    def __init__(self) -> None:
        self.depth = 0
        self.quote: str | None = None  # of the string that is open
        self.is_joined = False  # the line ended with a backslash

    @property
    def is_between_statements(self) -> bool:
        """Whether a statement may begin on the next line."""
        return self.depth == 0 and self.quote is None and not self.is_joined

    def read(self, line: str) -> None:
        """Take in one line, without its newline."""
        at = 0
        self.is_joined = False
        while True:
            if self.quote is not None:
                end = re.compile(rf"(?:\\.|[^\\])*?{self.quote}").match(line, at)
                if end is None:
                    return
                at, self.quote = end.end(), None
            found = LEXEME.search(line, at)
            if found is None:
                break
            at = found.end()
            self._take(found)
        self.is_joined = line.endswith("\\")

    def _take(self, found: re.Match[str]) -> None:
        if found["triple"]:
            self.quote = found["triple"]
        elif found["open"]:
            self.depth += 1
        elif found["close"]:
            self.depth = max(0, self.depth - 1)
        elif found["string"] and found["string"].endswith("\\"):
            self.quote = found["string"][0]
