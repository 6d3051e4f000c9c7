"""Cells with magics and shell lines are parsed, and every node is found in the cell's own text."""

import ast

import pytest

from notebook_converter import code as codes

CELLS = (
    "%timeit -n 10 f()",
    "x = %timeit -o f()",
    "%%capture cap --no-stderr\nx=1",
    "?print",
    "print??\nx=1",
    "np.*load*?",
    "!cmd {var} $x 'unclosed",
    "%cd /content\nx=1",
    "%matplotlib inline  # it's",
    "!pip install a \\\n  b \\\n  'c\nx = 1",
    "a = !ls | grep 'x\nb=1",
    "a, b = !ls",
    "a['k'] = !ls\ny=2",
    "!!ls",
    "with x:\n    !ls\n    y=1",
    "for i in y:\n    !ls {i}\nelse:\n    %time f()",
    "total = a \\\n  % b\nx = 1",
    "s = '''\n!no\n%no\n'''\n!yes",
    "s = f'''\n{x!r}\n%s'''\n!yes",
    "x = {\n 'a': 1, # it's (\n}\n!ls",
    "def f():\n    '''doc's\n    %s\n    '''\n    !ls\n    return 1",
    "d = 'it\\'s'\n!ls",
    'd = "a\\\\"\n!ls \'a',
    "x = 1 # ''' not open\n!ls",
    "class A:\n    %time x = 1\n    y = 2",
    "if True:\n\t!ls\n\tx=1",
    "\n\n%%capture\n!ls\nx=1",
    "pip install unsloth",
    "cd /x\nx=1",
    "x = (1 +\n  2)\n%who",
    "await f()\n!ls",
    "x = '\\\n!a'\n!ls",
    "if a:\n    !ls\nelif b:\n    %cd x\nelse:\n    !rm -rf y # it's gone",
    "   %%capture\n   !ls\n   x = 1",
    "é = 'ü'\r\n!ls\r\nx = 1",
)


@pytest.mark.parametrize("cell", CELLS)
def test_cells_with_magics_are_parsed_and_nodes_keep_their_places(cell):
    indent = cell[: len(cell) - len(cell.lstrip(" "))]
    code = codes.parse(1, f"{cell}\n{indent}ü = find(\n{indent}  'é') # here")
    assert code.problem is None
    last = code.tree.body[-1]
    assert isinstance(last, ast.Assign)
    assert code.text(last.value) == f"find(\n{indent}  'é')"
    assert code.source[code.place_before(last.value).offset :].startswith(f"{indent}ü = find(")


@pytest.mark.parametrize(
    "cell",
    ["print 'a'", "f(", "x = 'a", "a = 1; !ls", "\0", "%%bash\nls", "%%R\nx <- 1", "%%html\n"],
)
def test_what_is_no_python_has_no_tree_and_a_reason(cell):
    code = codes.parse(1, cell)
    assert code.tree is None
    assert code.problem.startswith(f"a {cell.split()[0]} cell" if cell.startswith("%%") else "")


@pytest.mark.parametrize("cell", ["", "\n", "# comment", "  # comment\n"])
def test_empty_cells_are_python(cell):
    assert codes.parse(1, cell).tree.body == []
