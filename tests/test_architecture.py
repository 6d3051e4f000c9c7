"""The rules of the house, read from the source of every module."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from calls import outcome_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sft_play"
CONVERTER = ROOT / "notebook_converter"
KERNELS = ROOT / "sft_kernels"

# Each package or module, lowest first, and what it may import besides itself
ALLOWED_IMPORTS = """notebook_converter:
sft_kernels:
errors:
masking:
process_id:
timeline:
reading:
stops: errors
progress: masking timeline
http_client: progress
config: errors masking reading
runs: errors timeline process_id config
plan: errors stops config runs sft_kernels
data: errors reading stops progress http_client config runs plan sft_kernels
reporting: errors timeline progress config runs plan data
models: errors timeline progress config runs plan data sft_kernels
evaluation: stops errors timeline progress config runs plan data reporting models
  sft_kernels
training: errors timeline masking stops process_id progress config runs plan data
  reporting models evaluation sft_kernels
distributed: errors config runs plan training sft_kernels
compat: errors config distributed
inference: errors masking stops progress config runs plan data reporting models evaluation
  sft_kernels
monitor: errors process_id progress http_client config runs plan reporting
commands: errors timeline masking reading http_client stops progress config runs plan data reporting
  models inference monitor notebook_converter
cli_use: progress config inference commands
cli: errors masking progress config plan data monitor commands cli_use
api: errors config reporting runs commands
__main__: cli
__init__: plan api
"""
ALLOWED = {
    name: set(below.split())
    for name, _, below in (
        line.partition(":") for line in ALLOWED_IMPORTS.replace("\n ", "").splitlines()
    )
}
READ_THE_ENVIRONMENT = {
    "config/loader.py",
    "evaluation/opener.py",  # what it forks leaves out those of a launcher
    "inference/load.py",  # sets what torch reads when it first allocates on a GPU
    "models/stored_weights.py",  # sets what transformers reads while it loads
    "training/runtime.py",
    "training/peers.py",
}
START_PROCESSES = {
    "plan/launch.py",
    "commands/early.py",
    "plan/devices.py",
    "plan/counting.py",
    "runs/seal.py",  # threads of concurrent.futures, no
    "monitor/",
    "data/tokenize.py",
    "data/limits.py",
    "commands/ask.py",
    "commands/each_gpu.py",
    "evaluation/opener.py",
    "inference/gguf_tools.py",
}
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "deepspeed",
    "unsloth",
}
LIGHT_ROOMS = (
    "errors",
    "reading",
    "stops",
    "config",
    "runs",
    "plan",
    "reporting",
    "monitor",
    "notebook_converter",
    "commands",
    "cli_use",
    "cli",
    "api",
)
# modules of sft_kernels that SFT-Play uses: its types, what finds parts of a model, and few inner ones
KERNEL_MODULES = {
    *("boundaries", "trees", "process", "training_setup", "install", "needs", "modules", "sharded"),
    *("loss.head", "loss.tokens", "e4m3.linear", "e4m3.quantize", "e4m3.rows", "expert_modules"),
    *("attention.forward", "attention.reference", "linear_attention"),
    *(
        "linears.four_bit",
        "linears.lora",
        "linears.tiles",
        "mxfp4",
        "partitioned",
        "triton_kernels",
    ),
}
FUNCTION_LINES, FILE_LINES, SCRIPT_LINES, UNDOCUMENTED_LINES = 60, 400, 30, 8

MODULES = sorted(
    path for package in (PACKAGE, CONVERTER, KERNELS) for path in package.rglob("*.py")
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removeprefix("sft_play/")


def room_of(path: Path) -> str:
    return name_of(path).partition("/")[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imported(node: ast.AST) -> Iterator[str]:
    """Names of the modules that an import statement may load: of `from a import b` both a and a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield node.module or ""
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements(node: ast.AST, only_imported: bool = False) -> Iterator[ast.AST]:
    """All statements, except what TYPE_CHECKING guards.

    With `only_imported`, those that run when the module is imported.
    """
    for child in ast.iter_child_nodes(node):
        is_guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if is_guarded or (only_imported and isinstance(child, Function | ast.Lambda)):
            continue
        yield child
        yield from statements(child, only_imported)


def test_there_are_modules_to_read() -> None:
    assert len(MODULES) > 40
    assert {room_of(path) for path in MODULES} <= set(ALLOWED), (
        "a new room: say in ALLOWED what it may import"
    )


def test_rooms_import_downward_only() -> None:
    order = list(ALLOWED)
    for number, (room, below) in enumerate(ALLOWED.items()):
        assert all(order.index(name) < number for name in below), room


def rooms_imported(path: Path) -> set[str]:
    """Return the other rooms that a module imports from."""
    names = {name for node in nodes_of(path) for name in imported(node)}
    rooms = {name.split(".")[1] for name in names if name.startswith("sft_play.")}
    rooms |= {name.split(".")[0] for name in names} & {CONVERTER.name, KERNELS.name}
    return rooms - {room_of(path), "__version__"}


def test_a_module_imports_only_what_its_room_may() -> None:
    forbidden = {path: rooms_imported(path) - ALLOWED[room_of(path)] for path in MODULES}
    assert [f"{name_of(path)} imports {rooms}" for path, rooms in forbidden.items() if rooms] == []


def test_few_modules_of_the_kernels_are_used_outside_them() -> None:
    ours = [path for path in MODULES if path.is_relative_to(PACKAGE)]
    names = {name for path in ours for node in nodes_of(path) for name in imported(node)}
    inside = {
        name.removeprefix("sft_kernels.") for name in names if name.startswith("sft_kernels.")
    }
    assert {name for name in inside if (KERNELS / f"{name.replace('.', '/')}.py").exists()} == (
        KERNEL_MODULES
    )


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, too; those under TYPE_CHECKING do not."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    graph = {
        name: {
            other
            for node in statements(tree_of(path))
            for other in imported(node)
            if other in names
        }
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph[name] - {"sft_play"}):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_file_is_a_drawer() -> None:
    assert not [
        name_of(path)
        for path in MODULES
        if path.stem in ("utils", "util", "helpers", "helper", "misc", "common")
    ]


def names_of_os(nodes: list[ast.AST]) -> set[str]:
    """Return the names of `os` that a module uses or imports."""
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    names = {name for node in nodes for name in imported(node)}
    return used | {name.removeprefix("os.") for name in names if name.startswith("os.")}


def reads_environment(nodes: list[ast.AST]) -> bool:
    return bool({"environ", "getenv", "environb", "unsetenv"} & names_of_os(nodes))


def test_few_modules_read_the_environment() -> None:
    assert {
        name_of(path) for path in MODULES if reads_environment(nodes_of(path))
    } == READ_THE_ENVIRONMENT


def starts_processes(nodes: list[ast.AST]) -> bool:
    loads = {"subprocess", "multiprocessing", "pty", "concurrent.futures"} & {
        name for node in nodes for name in imported(node)
    }
    starting = ("exec", "spawn", "posix_spawn", "fork", "system", "popen")
    return bool(loads) or any(name.startswith(starting) for name in names_of_os(nodes))


def test_few_modules_start_processes() -> None:
    starting = {name_of(path) for path in MODULES if starts_processes(nodes_of(path))}
    assert "plan/launch.py" in starting
    assert not {name for name in starting if not name.startswith(tuple(START_PROCESSES))}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ['X']", (True, False)),
        ("from os import environ", (True, False)),
        ("import os\nos.getenv('X')", (True, False)),
        ("import subprocess", (False, True)),
        ("import os\nos.execvpe('x', [], {})", (False, True)),
        ("from os import path\nplan.system", (False, False)),
    ],
)
def test_the_two_rules_above_see_what_they_should(text: str, found: tuple[bool, bool]) -> None:
    nodes = list(ast.walk(ast.parse(text)))
    assert (reads_environment(nodes), starts_processes(nodes)) == found


def packages_loaded(path: Path) -> set[str]:
    """Return the packages that are loaded when a module is imported."""
    names = {
        name for node in statements(tree_of(path), only_imported=True) for name in imported(node)
    }
    return {name.split(".")[0] for name in names}


def test_the_front_end_imports_nothing_heavy_when_it_loads() -> None:
    heavy = {
        name_of(path): packages_loaded(path) & HEAVY
        for path in MODULES
        if room_of(path) in LIGHT_ROOMS
    }
    assert len(heavy) > 40
    assert {name: packages for name, packages in heavy.items() if packages} == {}


@pytest.mark.parametrize(
    ("commands", "loaded"),
    [
        (
            [
                ["config"],
                ["plan"],
                ["plan", "--gpus", "2xH200", "--distributed", "--deepspeed"],
                ["gpu-info"],
                ["runs"],
            ],
            [],
        ),
        ([["data-check"]], ["numpy", "transformers"]),
    ],
    ids=["plans", "rows"],
)
def test_commands_of_the_front_end_load_no_torch(
    commands: list[list[str]], loaded: list[str], tmp_path: Path
) -> None:
    program = f"""
import sys
from sft_play.cli import main
for command in {commands!r}:
    sys.argv = ["sft_play", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print("HEAVY", sorted({HEAVY!r} & sys.modules.keys()))
"""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TRAIN_OUTPUT_DIR": str(tmp_path / "outputs"),
        "DATA_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = outcome_of([sys.executable, "-c", program], env, 60)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("HEAVY ")]
    assert found == [f"HEAVY {loaded}"] * len(commands)


def test_a_file_is_read_in_a_sitting() -> None:
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    assert [name for name, text in texts.items() if len(text.splitlines()) > FILE_LINES] == []


def test_a_module_says_what_it_owns() -> None:
    told = [path for path in MODULES if path.name != "__init__.py"]
    assert [name_of(path) for path in told if not ast.get_docstring(tree_of(path))] == []


def long_functions(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, Function) and node.end_lineno - node.lineno >= FUNCTION_LINES:
            yield f"{name_of(path)}:{node.lineno} {node.name}"


def test_a_function_fits_a_screen() -> None:
    assert [function for path in MODULES for function in long_functions(path)] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name
)
def test_a_script_is_a_thin_entry_point(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= SCRIPT_LINES


def undocumented(node: ast.AST) -> Iterator[str]:
    """Public functions, classes and methods that are longer than a glance and say nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith(
            ("_", "on_")
        ):  # on_step_end and its like are transformers' words
            if child.end_lineno - child.lineno + 1 > UNDOCUMENTED_LINES and not ast.get_docstring(
                child
            ):
                yield f"{child.lineno} {child.name}"
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child)


def test_what_is_public_says_what_it_does() -> None:
    silent = {name_of(path): list(undocumented(tree_of(path))) for path in MODULES}
    assert {name: found for name, found in silent.items() if found} == {}
