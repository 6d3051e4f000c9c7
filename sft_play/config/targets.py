"""The make variables that each target reads, and what an unknown one most likely means. Pure.

A new target is one line of TARGETS, and a new variable of a target is a word in its line.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from sft_play.config.invocation import SAMPLING_VARIABLES
from sft_play.config.layers import PREFIXES, settings_by_variable
from sft_play.config.loader import INSTALLED, PROJECT_ROOT
from sft_play.config.messages import refuse
from sft_play.config.schema import env_name, settings
from sft_play.config.unknown import Suggestion, names_by_meaning, suggest

# Names, not values, that the Makefile exports: a value could be a secret
GIVEN = "SFT_PLAY_VARIABLES"  # variables on make's command line
GOALS = "SFT_PLAY_TARGETS"  # targets of the same call
LISTED = "make help and make config list what there is"
TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})

SETTING_OF = settings_by_variable()
SETTINGS = frozenset(SETTING_OF)
NOTHING: frozenset[str] = frozenset()
INSTALL = frozenset({"TORCH", "TORCH_INDEX", "INSTALLER"})  # every target installs what is missing
# A name of a group stands for its variables. `look`: what looks at a run before it is started takes
# the words that will start it.
GROUPS = """
gguf: QUANT LLAMA_CPP PRE_TOKENIZER
machine: DEVICE NUM_GPUS NNODES NODE_RANK MASTER_ADDR MASTER_PORT
run: settings machine CONFIG RUN RESUME ELASTIC
look: run DEEPSPEED_CONFIG TB_PORT GPUS
images: DATA_IMAGE_FOLDER DATA_IMAGE_URLS
outputs: TRAIN_OUTPUT_DIR
limits: TRAIN_GENERATION_MAX_NEW_TOKENS TRAIN_GENERATION_NUM_BEAMS TRAIN_GENERATION_BATCH_SIZE
answers: outputs limits RUN DEVICE MODEL_NAME
drawn: answers sampling images DATA_SYSTEM_PROMPT
rows: DATA_TEST_PATH DATA_COLUMNS TRAIN_EVAL_BATCH_SIZE TRAIN_GENERATION_MAX_ROWS
scores: answers images rows TRAIN_PREDICT_WITH_GENERATE TRAIN_METRICS NUM_GPUS COMPARE TASKS
"""
TARGETS = """
train train-bnb train-unsloth train-distributed: run
train-tb train-bnb-tb train-unsloth-tb train-distributed-tb: run TB_PORT
train-deepspeed: run DEEPSPEED_CONFIG
train-deepspeed-tb: run DEEPSPEED_CONFIG TB_PORT
config: look
plan: look EXACT
data-check: look
preview: look OVERWRITE
slurm: look OUT OVERWRITE
install: install TRANSFORMERS
setup-accelerate: run GPUS
memory-check runs: outputs
doctor: outputs NUM_GPUS
init: settings machine GPUS OUT FROM OVERWRITE
convert-notebook: NB OUT OVERWRITE
check-notebook: NB
tensorboard tb-stop: outputs TB_PORT
watch report: outputs RUN
compare: outputs RUNS OUT OVERWRITE
eval: scores
infer: drawn PROMPT IMAGE IN OUT NUM_GPUS DATA_COLUMNS
chat: drawn COMPARE
merge: outputs RUN MODEL_DTYPE MODEL_NAME
export: outputs gguf RUN FORMAT OUT MODEL_DTYPE MODEL_NAME DEVICE EXPORT_MIN_GAIN
serve: outputs RUN FORMAT BIND PORT DEVICE
check-server: outputs RUN URL SERVED_NAME PARITY FORMAT
push: outputs RUN FORMAT REPO PUBLIC SIGN
bench: WORKS ARMS STEPS SECONDS
bench-plan: WORKS SECONDS
bench-scaling: WORKS GPUS STRATEGIES STEPS SECONDS
test-faults: ROWS COUNT
test-newest: TRANSFORMERS
test-gguf: LLAMA_CPP
schema gpu-info install-unsloth install-gguf embedded bench-data lint docs:
test test-fast test-long test-architectures test-gpu:
"""


def _read_table(table: str, groups: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the variables of each name of a table; `groups` may stand in its lines."""
    found: dict[str, frozenset[str]] = {}
    for line in table.split("\n")[1:-1]:
        names, words = line.split(":")
        known = {**groups, **found}
        variables = NOTHING.union(*(known.get(word, {word}) for word in words.split()))
        found.update(dict.fromkeys(names.split(), variables))
    return found


OF_GROUP = {"settings": SETTINGS, "sampling": SAMPLING_VARIABLES, "install": INSTALL}
OF_GROUP |= _read_table(GROUPS, OF_GROUP)
READS = _read_table(TARGETS, OF_GROUP)
OURS = SETTINGS.union(*READS.values())

# Variables of make, of the shell and of the libraries below; they reach every process unchanged
OF_OTHERS = frozenset(
    """
    CC CXX COLUMNS CURDIR HOME LANG LINES PATH PY PYTHON SHELL TERM TMPDIR USER VENV HTTP_PROXY
    HTTPS_PROXY NO_PROXY NO_COLOR http_proxy https_proxy no_proxy RANK WORLD_SIZE LOCAL_RANK
    MFLAGS
    """.split()
)
PREFIXES_OF_OTHERS = tuple(
    """
    ACCELERATE_ BNB_ CUBLAS_ CUDA_ CUDNN_ DEEPSPEED_ DS_ FORCE_COLOR GIT_ GLOO_ GOMP_ HF_ HUGGING
    KMP_ LC_ LD_ LIGER_ MAKE MALLOC MKL_ MLFLOW_ NCCL_ NVIDIA_ OMP_ OPENBLAS_ PEFT_ PIP_ PYTEST_
    PYTHON PYTORCH_ REQUESTS_ SLURM_ SSL_ TENSORBOARD_ TOKENIZERS_ TORCH TQDM_ TRACKIO_
    TRANSFORMERS_ TRITON_ UNSLOTH_ UV_ WANDB_ XDG_
    """.split()
)

# Short words, and those for the variables that are no settings; `unknown` has the others
SYNONYMS = names_by_meaning(
    {
        "TRAIN_BATCH_SIZE": "BATCH BS",
        "CONFIG": "CFG CONFIG_FILE RECIPE YAML",
        "TRAIN_RESUME_FROM": "CHECKPOINT",
        "DATA_TRAIN_PATH": "DATA",
        "TRAIN_EPOCHS": "EPOCH",
        "RUN": "EXPERIMENT EXPERIMENT_NAME NAME RUNS RUN_ID RUN_NAME",
        "NUM_GPUS": "GPU GPUS NGPU NGPUS NPROC NPROC_PER_NODE NUM_PROCESSES N_GPUS",
        "IN": "INPUT INPUTS PROMPTS",
        "MODEL_MAX_SEQ_LEN": "MAX_LEN",
        "TRAIN_GENERATION_MAX_NEW_TOKENS": "MAX_TOKENS",
        "MODEL_NAME": "MODEL",
        "NNODES": "NODES NUM_MACHINES NUM_NODES",
        "NB": "NOTEBOOK",
        "TRAIN_OUTPUT_DIR": "OUT OUTPUT",
        "TB_PORT": "PORT",
        "PROMPT": "QUESTION",
        "TRAIN_MAX_STEPS": "STEPS",
        "TASKS": "TASK",
        "DATA_SYSTEM_PROMPT": "SYSTEM",
    }
)

# What other programs call a target
TARGET_SYNONYMS = names_by_meaning(
    {
        "train": "fine-tune finetune fit learn run sft start tune",
        "eval": "evaluate score",
        "infer": "generate inference predict",
        "plan": "dry-run estimate plan-distributed",
        "data-check": "check validate",
        "install": "deps requirements setup",
        "export": "convert gguf save",
        "push": "publish upload",
        "runs": "list ls status",
        "watch": "follow logs monitor",
    }
)


def refuse_unread_variables(environ: Mapping[str, str]) -> None:
    """Refuse tokens on make's command line, and variables that none of its targets reads.

    Raises: ConfigError that says what each most likely means, or which targets read it.
    """
    names = environ.get(GIVEN, "").split()
    goals = environ.get(GOALS, "").split()
    problems = [
        f"{name}: other users can read a command line; type hf auth login, and make that token "
        "invalid"
        for name in names
        if name in TOKENS
    ]
    found = (problem_with(name, goals) for name in sorted(names) if not is_of_others(name))
    refuse([*problems, *filter(None, found)])


def problem_with(name: str, goals: list[str]) -> str | None:
    """Return what is wrong with a variable on the command line of these targets, None if nothing.

    A target that READS does not list may read any variable of ours.
    """
    targets = f"make {' '.join(goals)}"
    read = NOTHING.union(*(READS.get(goal, OURS) for goal in goals))
    if name in read or name in INSTALL:
        return None
    if not read:
        return f"{name}: {targets} reads no variable; leave it out"
    if name not in OURS:
        return f"{name}: {targets} has no such variable; {suggest_variable(name, read).clause()}"
    readers = [target for target, names in READS.items() if name in names]
    meant = SYNONYMS.get(name)
    advice = f"did you mean {meant}?" if meant in read else "leave it out"
    return f"{name}: {targets} does not read it, but {short_targets(readers)}; {advice}"


def unread_settings(target: str, environ: Mapping[str, str]) -> list[str]:
    """Return the settings in the environment that a target does not read.

    `target` may be a command of `python -m sft_play`, which has the name of its target.
    """
    unread = SETTINGS - READS.get(target, SETTINGS) - set(environ.get(GIVEN, "").split())
    return sorted(name for name in unread if environ.get(name, "").strip())


def is_of_others(name: str) -> bool:
    """Return whether a variable is make's, the shell's or a library's, and none of ours."""
    if name in OURS or name.startswith(PREFIXES):
        return False
    return name in OF_OTHERS or name.startswith(PREFIXES_OF_OTHERS)


def refuse_unknown_targets(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for the targets of a make call that the Makefile does not have."""
    known = {"clean", "help", *READS}
    refuse([no_such_target(goal) for goal in environ.get(GOALS, "").split() if goal not in known])


def no_such_target(name: str) -> str:
    """Return the message for an unknown target of make or command: what it most likely means."""
    near = [TARGET_SYNONYMS.get(name), *difflib.get_close_matches(name, READS, n=1)]
    meant = next(filter(None, near), None)
    return f"{name}: no such target; " + (f"did you mean {meant}?" if meant else LISTED)


def no_such_option(option: str, command: str) -> str:
    """Return the message for an unknown option of a command, such as `--model`."""
    name = option.strip("-")
    meant = suggest_variable(name, READS.get(command, OURS))
    path = SETTING_OF.get(meant.name)
    as_option = f" (or --set {path}=...)" if path else ""
    return f"{option}: {command} has no such option; {meant.clause()}{as_option}"


def suggest_variable(name: str, known: frozenset[str] = OURS) -> Suggestion:
    """Return which of the `known` variables an unknown one most likely stands for, or advice.

    In order: the same name in other case, its plural, a common word for it, the name of a setting
    without its section or in another program, the closest spelling.
    """
    upper = name.upper().replace("-", "_").replace(".", "_")
    for same in (upper, f"{upper}S", SYNONYMS.get(upper)):
        if same in known:
            return Suggestion(same)
    lowered = upper.lower()
    with_section = lowered.replace("_", ".", 1).replace("tuning.lora_", "tuning.lora.", 1)
    for path in (lowered, with_section):
        suggestion = suggest(path, settings())
        if suggestion is not None and not suggestion.is_guess:
            return suggestion._replace(name=suggestion.name and env_name(suggestion.name))
    close = difflib.get_close_matches(upper, known, n=1, cutoff=0.8)
    if close:
        return Suggestion(close[0], is_guess=True)
    return Suggestion(advice=LISTED)


def short_targets(targets: Iterable[str]) -> str:
    """Return `make train and plan do`, without `train-tb` and the like if all that train do."""
    names = list(targets)
    if "train" in names:
        names = [name for name in names if not name.startswith("train-")]
    *others, last = names
    if not others:
        return f"make {last} does"
    return f"make {', '.join(others)} and {last} do"


def as_installed(text: str) -> str:
    """Return a text with commands of the installed package in place of make's.

    >>> as_installed("make install-gguf, then make export RUN=a")
    "pip install 'sft-play[gguf]', then sft-play export RUN=a"
    """
    text = text.replace("make help", "sft-play --help")
    text = re.sub(r"\bmake install-(gguf|unsloth)\b", r"pip install 'sft-play[\1]'", text)
    return re.sub(rf"\bmake (?=({'|'.join(READS)})\b)(?!install)", "sft-play ", text)


# What is printed: the Makefile is not part of a wheel
shown = as_installed if PROJECT_ROOT == INSTALLED else None
