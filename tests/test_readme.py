"""Every command of README.md and docs/ is one that the program takes; those for a CPU work.

A command that is added to README.md or to another page of TRIED goes into RUN, RUN_CHANGED or
NOT_RUN below.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.testing import CliRunner

from sft_play.cli import app
from sft_play.config import invocation, loader, targets
from sft_play.errors import ConfigError

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted(DOCS.glob("*.md")))
# The pages whose commands a long test types, in this order
NAMES = ("install", "index", "first-run", "several-gpus", "models", "using-a-run", "export")
TRIED = (README, *(DOCS / f"{name}.md" for name in NAMES))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):.*## ", MAKEFILE, re.MULTILINE))

# A block of commands, any other block, or a command within a sentence
COMMAND_PLACES = re.compile(r"```bash\n(?P<block>.*?)```|```.*?```|`(?P<inline>[^`]+)`", re.DOTALL)
STARTS = ("make ", "python ", "python3 ", ".venv/bin/python ", "export ")

# Examples of what is refused
REFUSED = ("make train LR=1e-4", "make eval TRAIN_EPOCHS=3")
# What stands for a reader's own value, and one that can be read
PLACEHOLDERS = {"GPUS=...": "GPUS=2xH200", "outputs/<run>": "outputs/name"}

# What a long test runs, in the order of TRIED: a command as it is written there,
RUN = (
    "make init DATA_TRAIN_PATH=my.jsonl MODEL_NAME=Qwen/Qwen2.5-1.5B-Instruct OUT=config.yaml",
    "make plan GPUS=1x4090 MODEL_NAME=Qwen/Qwen2.5-7B",
    "make plan MODEL_NAME=Qwen/Qwen2.5-7B-Instruct GPUS=1xH100",
    "make config CONFIG=small TRAIN_BATCH_SIZE=4",
    "make plan GPUS=2xH200 CONFIG=configs/multi_gpu_config.yaml",
    "make data-check CONFIG=config.yaml",
    "make preview CONFIG=config.yaml",
    "make plan DATA_TRAIN_PATH=my.jsonl MODEL_NAME=Qwen/Qwen2.5-1.5B-Instruct",
    "make data-check DATA_TRAIN_PATH=my.jsonl MODEL_NAME=Qwen/Qwen2.5-1.5B-Instruct",
    "make plan",
    "make train CONFIG=base",
    "make data-check",
    "python -m sft_play data-check --json",
    "make preview",
    "python -m sft_play preview --rows 10",
    "make watch",
    "make memory-check",
    "make gpu-info",
    "make plan MODEL_NAME=Qwen/Qwen3-30B-A3B GPUS=1xH200",
    "make train-distributed DEVICE=cpu NUM_GPUS=2",
    "make convert-notebook NB=in.ipynb OUT=out.ipynb",
    "make slurm NNODES=2 GPUS=8xH100 CONFIG=medium OUT=job.sh",
    "make train-bnb",
    "make compare RUNS=a,b",
    "for rate in 1e-4 2e-4; do make train RUN=rate-$rate TRAIN_LEARNING_RATE=$rate || break; done",
    "make compare RUNS=rate-1e-4,rate-2e-4",
    "make eval RUN=name DATA_TEST_PATH=held.jsonl",
    "make merge RUN=name",
    "make export RUN=name",
    "make export RUN=name FORMAT=adapter",
    "make export RUN=name FORMAT=vllm-adapter",
    "make export RUN=name FORMAT=int4",
    "make runs",
    "make eval RUN=name COMPARE=1",
    "make eval RUN=name TRAIN_METRICS=exact_match,rouge1",
)
# or one that differs in names of files and runs, in the device, and in what is piped into it.
RUN_CHANGED = {
    "make train": "make train RUN=name",
    "make train DATA_TRAIN_PATH=my.jsonl MODEL_NAME=Qwen/Qwen2.5-1.5B-Instruct": (
        "make train DATA_TRAIN_PATH=my.jsonl MODEL_NAME=Qwen/Qwen2.5-1.5B-Instruct RUN=a"
    ),
    "make train CONFIG=config.yaml": "make train CONFIG=config.yaml RUN=b",
    "make train CONFIG=configs/run_bnb.yaml MODEL_NAME=/models/llama-8b": (
        "make train CONFIG=configs/run_bnb.yaml MODEL_NAME=models/llama-8b"
    ),
    "make setup-accelerate": "make setup-accelerate DEVICE=cpu",
    "make train MODEL_NAME=outputs/name/merged DATA_TRAIN_PATH=more.jsonl": (
        "make train MODEL_NAME=outputs/name/merged DATA_TRAIN_PATH=my.jsonl RUN=further"
    ),
    "make train TRAIN_RESUME_FROM=outputs/<run>": (
        "rm -r outputs/name/checkpoints/checkpoint-2; make train TRAIN_RESUME_FROM=outputs/name"
    ),
    "make eval RUN=path/to/model DATA_TEST_PATH=held.jsonl": (
        "make eval RUN=outputs/name/merged DATA_TEST_PATH=held.jsonl"
    ),
    "make infer RUN=name PROMPT='...'": "make infer RUN=name PROMPT='When does the bank open?'",
    "make chat RUN=name": "printf 'Hello\\n/exit\\n' | make chat RUN=name",
    "make eval RUN=name TRAIN_METRICS=own.py:near DATA_TEST_PATH=held.jsonl": (
        "printf 'def near(answer, expected):\\n    return len(answer)\\n' > own.py && "
        "make eval RUN=name TRAIN_METRICS=own.py:near DATA_TEST_PATH=held.jsonl"
    ),
    "make train TRAIN_EVAL_STRATEGY=steps TRAIN_METRIC_FOR_BEST_MODEL=eval_rougeL "
    "TRAIN_EARLY_STOPPING_PATIENCE=3": (
        "make train TRAIN_EVAL_STRATEGY=steps TRAIN_METRIC_FOR_BEST_MODEL=eval_rougeL "
        "TRAIN_EARLY_STOPPING_PATIENCE=3 TRAIN_EVAL_STEPS=1 TRAIN_MAX_STEPS=2"
    ),
    "make infer RUN=name IN=asked.jsonl OUT=answers.jsonl": (
        "echo 'When does the bank open?' > asked.txt && "
        "make infer RUN=name IN=asked.txt OUT=answers.jsonl"
    ),
    "make chat RUN=name COMPARE=1": "printf 'Hello\\n' | make chat RUN=name COMPARE=1",
    "make chat": "printf 'Hello\\n/exit\\n' | make chat",
    "make doctor": "make doctor || [ $? = 2 ]",  # make's code where doctor found something
    "make tensorboard": "make tensorboard TB_PORT=16006 && make tb-stop",
}
# next to a small server of the run's export, whose address takes the place of this one
ADDRESS = "http://127.0.0.1:8000"
WITH_SERVER = (f"make check-server RUN=name URL={ADDRESS}",)
# or where llama-cpp-python is installed
WITH_LLAMA_CPP = ("make export RUN=name FORMAT=gguf QUANT=Q4_K_M",)
# The commands of TRIED that no test runs, by the reason
NOT_RUN = {
    "installs or downloads, from the network": (
        "git clone <address of this repository> sft-play && cd sft-play",
        "make install",
        "make install TORCH=cpu",
        "make install TRANSFORMERS=newest",
        "make install TRANSFORMERS=5.24.0",
        "make train MODEL_NAME=HuggingFaceTB/SmolLM2-135M-Instruct TRAIN_MAX_STEPS=10",
        "make test-newest",
        "make install TORCH=cu126",
        "make install TORCH=cu130",
        "make install-unsloth",
        "make install-gguf",
        "docker build -t sft-play .",
        "docker build -t sft-play --build-arg TORCH=cpu .",
        "docker run --rm -it --gpus all --ipc=host "
        '-v "$PWD/outputs:/sft-play/outputs" sft-play train',
        ".venv/bin/python -m pip install model-signing pyOpenSSL",
        "model_signing verify key --signature model.sig --ignore-paths model.sig "
        "--public_key public.pem .",
        "make eval RUN=name TASKS=hellaswag,arc_easy",
    ),
    "test_wheel.py runs the package": (
        "pip install .",
        "cd /any/folder",
        "sft-play train",
        "sft-play train-distributed MODEL_NAME=<model> DATA_TRAIN_PATH=rows.jsonl NUM_GPUS=2",
    ),
    "needs a GPU": (
        "make train-distributed CONFIG=configs/run_bnb.yaml",
        "make train-deepspeed CONFIG=configs/run_bnb.yaml",
        "make train-distributed TRAIN_STRATEGY=fsdp",
        "make train-distributed TRAIN_STRATEGY=ep",
        "make train MODEL_DEVICE_MAP=auto",
        "make train-distributed TRAIN_STRATEGY=zero3",
        "make train-deepspeed DEEPSPEED_CONFIG=configs/deepspeed_zero3.json",
        "make train-distributed-tb CONFIG=configs/run_bnb.yaml",
        "make train-unsloth",
        "make bench",
        "make bench-scaling",
        "make train MODEL_NAME=Qwen/Qwen2.5-3B TUNING_MODE=qlora",
        "make train MODEL_NAME=Qwen/Qwen2.5-7B TUNING_MODE=qlora",
        "make train MODEL_NAME=Qwen/Qwen2.5-32B TUNING_MODE=qlora",
        "make train MODEL_NAME=meta-llama/Llama-3.1-70B TUNING_MODE=qlora",
        "make train MODEL_NAME=google/gemma-3-27b-it TUNING_MODE=qlora",
        "make train MODEL_NAME=/models/llama-8b",
        "make train-deepspeed",
        "make train MODEL_NAME=meta-llama/Llama-3.1-8B TUNING_MODE=qlora",
        "make train MODEL_NAME=meta-llama/Llama-3.1-8B",
        "make train-distributed MODEL_NAME=meta-llama/Llama-3.1-8B TRAIN_STRATEGY=fsdp",
        "make train-distributed MODEL_NAME=meta-llama/Llama-3.1-70B TRAIN_STRATEGY=fsdp",
    ),
    "has tests of its own": (
        "make train CONFIG=configs/gsm8k.yaml TRAIN_DELIVER_AS=int4",
        "make infer RUN=name PROMPT='What is it?' IMAGE=oak.jpg",
        "make init FROM=axolotl.yml OUT=config.yaml",
        "make train MODEL_ADAPTER=outputs/<run> DATA_TRAIN_PATH=more.jsonl",
        "make train RUN=longer TRAIN_RESUME_FROM=outputs/<run> TRAIN_EXTEND=true TRAIN_EPOCHS=6",
        "make train RUN=mine CONFIG=configs/small.yaml",
    ),
    "needs a server's packages, or a hub": (
        "make serve",
        "make serve RUN=name",
        "make check-server",
        "make push",
        "make push RUN=name REPO=me/model",
    ),
    "these tests": ("make test",),
    "another test builds the site": ("make docs", "python -m tools.docs"),
    "takes twenty minutes": ("python -m benchmarks.delivered",),
}

OWN_METRIC = "def near(answer, expected):\n    return len(answer)\n"
# So small that each run takes seconds
SMALL = {
    "TRAIN_MAX_STEPS": "2",
    "TRAIN_GENERATION_MAX_ROWS": "2",
    "TRAIN_GENERATION_MAX_NEW_TOKENS": "8",
    "TRAIN_SAVE_STRATEGY": "steps",
    "TRAIN_SAVE_STEPS": "1",
}


@dataclass(frozen=True)
class Command:
    """A command of a page, without its comment."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        text = self.text
        for placeholder, value in PLACEHOLDERS.items():
            text = text.replace(placeholder, value)
        return shlex.split(text)

    @property
    def goals(self) -> list[str]:
        return [word for word in self.words[1:] if "=" not in word]

    @property
    def variables(self) -> dict[str, str]:
        pairs = (word.partition("=") for word in self.words[1:] if "=" in word)
        return {name: value for name, _, value in pairs}


def without_comment(line: str) -> str:
    """Return a line of a block without its comment."""
    return " ".join(re.split(r"(?:^|\s)#", line)[0].split())


def spelled_out(text: str) -> list[str]:
    """Return `make a X=1` and `make b X=1` for `make a|b X=1`."""
    targets_of_make = re.match(r"make ([a-z|-]+\|[a-z-]+)(.*)", text)
    if targets_of_make is None:
        return [text]
    names, rest = targets_of_make.groups()
    return [f"make {name}{rest}" for name in names.split("|")]


def lines_of(place: re.Match[str]) -> list[str]:
    """Return the commands of a block, or the one within a sentence."""
    if place["block"] is not None:
        lines = [without_comment(line) for line in place["block"].splitlines()]
        return [line for line in lines if line]
    line = " ".join((place["inline"] or "").split())
    return [line] if line.startswith(STARTS) else []


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page, each once, in its order."""
    places = COMMAND_PLACES.finditer(page.read_text(encoding="utf-8"))
    lines = [line for place in places for line in lines_of(place)]
    texts = [text for line in lines for text in spelled_out(line)]
    return [Command(page.name, text) for text in dict.fromkeys(texts)]


ALL = [command for page in PAGES for command in commands_of(page)]
OF_MAKE = [command for command in ALL if command.words[0] == "make"]
ACCEPTED = [command for command in OF_MAKE if command.text not in REFUSED]
PLANS = [
    command for command in ACCEPTED if command.goals == ["plan"] and "GPUS" in command.variables
]


def named(commands: list[Command]) -> list[object]:
    return [pytest.param(command, id=f"{command.page}: {command.text}") for command in commands]


def problem_with_variables(command: Command) -> str:
    """Return what the program says of a make command's variables, "" where it takes them."""
    given = command.variables
    call = {targets.GIVEN: " ".join(given), targets.GOALS: " ".join(command.goals)}
    try:
        targets.refuse_unread_variables(call)
        called = invocation.read_invocation(given)
        if targets.READS.get(command.goals[0], targets.NOTHING) & targets.SETTINGS:
            loader.load_merged(called.config, given)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def users_folder(tmp_path, monkeypatch) -> Path:
    """The working directory of a user who has written a config.yaml next to configs/."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "config.yaml").write_text("train:\n  epochs: 1\n")
    (tmp_path / "own.py").write_text(OWN_METRIC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried_commands() -> list[str]:
    """Return the commands of TRIED, each once, in their order."""
    texts = [command.text for page in TRIED for command in commands_of(page)]
    return list(dict.fromkeys(texts))


def test_a_command_of_the_readme_is_run_or_listed_with_the_reason():
    listed = [*RUN, *RUN_CHANGED, *WITH_SERVER, *WITH_LLAMA_CPP]
    listed += [text for texts in NOT_RUN.values() for text in texts]
    written = tried_commands()
    assert set(written) - set(listed) == set(), "new in a page: list it above"
    assert set(listed) - set(written) == set(), "no longer in a page: remove it here"


@pytest.mark.parametrize("command", named(OF_MAKE))
def test_the_target_and_its_variables_exist(command, users_folder):
    assert command.goals, "no target"
    assert set(command.goals) <= TARGETS
    problem = problem_with_variables(command)
    if command.text in REFUSED:
        assert problem
    else:
        assert not problem


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_that_a_page_names_as_variables_exist(page):
    text = page.read_text(encoding="utf-8")
    variables = set(re.findall(r"`((?:MODEL|DATA|TRAIN|TUNING)_[A-Z0-9_]*[A-Z0-9])[=`]", text))
    assert variables <= targets.SETTINGS


@pytest.mark.parametrize("command", named(ALL))
def test_the_files_of_this_repository_that_a_command_names_exist(command):
    for word in command.words:
        value = word.partition("=")[2] or word
        if value.startswith(("configs/", "benchmarks/", "data/", "tests/")):
            assert (ROOT / value).exists()


@pytest.mark.parametrize("command", named([each for each in ALL if "python" in each.words[0]]))
def test_the_module_and_its_options_exist(command):
    words = command.words[1:]
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    arguments = words[2:] if words[0] == "-m" else words[1:]
    if module == "sft_play":
        subcommand = typer.main.get_command(app).commands[arguments[0]]
        subcommand.make_context(arguments[0], arguments[1:])  # parses, and calls nothing
    elif module != "pip":
        path = ROOT / module.replace(".", "/")
        entry = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        if path.parent == ROOT / "examples":  # whose options are read in one place
            entry = path.parent / "example_setup.py"
        shared = ROOT / "benchmarks" / "command_line.py"  # has the options of all benchmarks
        source = entry.read_text(encoding="utf-8")
        if path.parent.name == "benchmarks":
            source += shared.read_text(encoding="utf-8")
        for option in (word for word in arguments if word.startswith("--")):
            assert f'"{option}"' in source


# hardware of README's table of cards
CARDS = {
    "8 GiB": "1x8GiB",
    "12 GiB": "1x12GiB",
    "16 GiB": "1x16GiB",
    "4090": "1x4090",
    "32 GiB": "1x32GiB",
    "40 GiB": "1x40GiB",
    "48 GiB": "1x48GiB",
    "two": "2x4090",
    "H100": "1xH100",
    "eight": "8xH100",
}


def row_of_card(card: str) -> list[str]:
    row = re.search(rf"^\| {card}.*\|$", README.read_text(), re.MULTILINE)
    return [cell.strip().strip("`") for cell in row[0].split("|")[2:-1]]


def plan_of_card(card: str, environ: dict[str, str]) -> str:
    environ |= {"GPUS": CARDS[card], "MODEL_MAX_SEQ_LEN": "2048"}
    result = CliRunner().invoke(app, ["plan"], env=environ)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("card", CARDS)
def test_what_the_readme_names_for_a_card_fits_it(card):
    command = row_of_card(card)[0].partition("`")[0]
    printed = plan_of_card(card, dict(word.split("=") for word in command.split()[2:]))
    assert "memory        fits: " in printed


@pytest.mark.parametrize("card", [card for card in CARDS if row_of_card(card)[1]])
def test_the_largest_model_that_the_readme_names_for_a_card_fits_it(card):
    printed = plan_of_card(card, {"MODEL_NAME": row_of_card(card)[1], "TUNING_MODE": "qlora"})
    assert "memory        fits: " in printed
    assert re.search(r"[0-9]+ of [0-9]+ layers in [0-9.]+ GiB of\s+host\s+memory", printed)


@pytest.mark.parametrize("card", [card for card in CARDS if row_of_card(card)[2]])
def test_the_experts_that_the_readme_names_for_a_card_fit_it(card):
    printed = plan_of_card(card, {"MODEL_NAME": row_of_card(card)[2], "TUNING_MODE": "qlora"})
    assert "memory        fits: " in printed and "experts" in printed


@pytest.mark.parametrize("command", named(PLANS))
def test_a_plan_for_other_hardware_is_printed(command):
    environ = {name: value for name, value in command.variables.items() if name != "EXACT"}
    environ[targets.GIVEN] = " ".join(environ)
    environ[targets.GOALS] = "plan"
    result = CliRunner().invoke(app, ["plan"], env=environ)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "\nstart         make train" in result.output


def copied_project(folder: Path) -> Path:
    """Copy this project, with rows and a model where the commands of README.md name them."""
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "outputs", "tests", "docs", "mlruns")
    project = shutil.copytree(ROOT, folder / "project", ignore=leave_out)
    rows = (ROOT / "data" / "desk" / "train.jsonl").read_text(encoding="utf-8").splitlines(True)
    (project / "my.jsonl").write_text("".join(rows[:80]), encoding="utf-8")
    (project / "held.jsonl").write_text("".join(rows[80:90]), encoding="utf-8")
    shutil.copy(ROOT / "tests" / "notebooks" / "tiny.ipynb", project / "in.ipynb")
    for name in ("Qwen/Qwen2.5-1.5B-Instruct", "models/llama-8b"):
        shutil.copytree(ROOT / "data" / "tiny_llama", project / name)
    return project


def run_in(project: Path, typed: str) -> str:
    """Run a command in a project; return "" or how it failed. Its output goes to this test's."""
    python = shlex.quote(sys.executable)
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in targets.OURS and not name.startswith(("MAKE", "MFLAGS", "PYTEST_"))
    }
    environ |= SMALL | {"CUDA_VISIBLE_DEVICES": "", "PY": sys.executable}
    script = f'make() {{ command make PY={python} "$@"; }}\npython() {{ {python} "$@"; }}\n{typed}'
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=project,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    print(f"$ {typed}\n{done.stdout}({time.monotonic() - start:.1f} s, code {done.returncode})\n")
    if done.returncode == 0:
        return ""
    return f"{typed}: code {done.returncode}\n{done.stdout[-1500:]}"


@pytest.mark.long
def test_the_commands_of_the_readme_work_on_a_cpu_in_its_order(tmp_path):
    from tiny_server import TinyServer, serving  # brings torch

    project = copied_project(tmp_path)
    written = tried_commands()
    tried = {*RUN, *RUN_CHANGED, *WITH_SERVER}
    if importlib.util.find_spec("llama_cpp"):
        tried |= set(WITH_LLAMA_CPP)
    failures = []
    for text in (text for text in written if text in tried):
        if text in WITH_SERVER:
            with serving(
                TinyServer(project / "outputs" / "name" / "export" / "safetensors")
            ) as url:
                failures.append(run_in(project, text.replace(ADDRESS, url)))
        else:
            failures.append(run_in(project, RUN_CHANGED.get(text, text)))
    assert not any(failures), "\n\n".join(filter(None, failures))
