"""The run, device and settings of eval, infer, chat, merge and export. Loads no torch."""

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from sft_play import stops
from sft_play.commands.call import Call
from sft_play.config import layers, loader, targets
from sft_play.config.loader import LoadedConfig, RunSettings
from sft_play.config.messages import refuse
from sft_play.config.schema import env_name, settings
from sft_play.config.sections.model import ModelSection
from sft_play.config.yaml_source import Located
from sft_play.plan.config_json import load_positions
from sft_play.plan.run_plan import read_plan
from sft_play.runs import folder as run_folders
from sft_play.runs import lock, stamp
from sft_play.runs.folder import WEIGHTS, RunFolder
from sft_play.runs.model_folder import ADAPTER_CONFIG, ModelFolder, find_model

ANSWER_LIMIT = "train.generation_max_new_tokens"
IMAGE_FOLDER = "data.image_folder"
UNKNOWN_LENGTH = 8192  # tokens of a row, for a model that does not name its maximum


def chosen_run(call: Call, weights: Sequence[str] = WEIGHTS) -> RunFolder:
    """Return the run that RUN names, or the latest that has one of these folders of weights.

    The choice, and why newer runs were skipped, is printed to standard error.
    """
    if call.invocation.run:
        found = run_folders.find(call.output_dir, call.invocation.run)
    else:
        found, skipped = run_folders.latest_with_weights(call.output_dir, weights)
        for reason in skipped:
            sys.stderr.write(f"skipped: {reason}\n")
        sys.stderr.write(f"run {found.path}, the latest with weights; RUN= chooses another\n")
    return replace(found, moved_base=base_now(call))


def base_now(call: Call) -> str | None:
    """Return the base model's current path in MODEL_NAME, None if it is not set."""
    base = loader.given_value("model.name", None, call.environ, call.overrides)
    return None if base is None else str(base)


def chosen_weights(call: Call) -> RunFolder:
    """Return the run that RUN names, or the model folder or adapter; without RUN, the latest run.

    Raises: EnvironmentFault if it is none of them.
    """
    named = call.invocation.run
    model = None
    if named and run_folders.named_run(call.output_dir, named) is None:
        model = find_model(named, call.output_dir, base_now(call))
    return model or chosen_run(call)


def settings_with_given(call: Call, run: RunFolder, target: str) -> LoadedConfig:
    """Return a run's settings with the given ones on top that the target reads.

    `is_set` tells which were given. Raises: ConfigError for settings that the target does not read.
    """
    _refuse_unread(target, call.overrides)
    read = targets.READS[target]
    environ = {
        name: value
        for name, value in call.environ.items()
        if name in read or name not in targets.SETTINGS
    }
    if isinstance(run, ModelFolder):
        return loader.load_merged(
            None, environ, call.overrides, resumed=settings_of_model(run, call)
        )
    config = run.read_config()
    values = {path: attrgetter(path)(config) for path in settings()}
    own = _as_layer(values, run.path / "config.yaml")
    loaded = loader.load_merged(None, environ, call.overrides, resumed=own)
    changes = {}
    if loaded.config.train.eval_batch_size == "auto":
        changes["train.eval_batch_size"] = own.layer["train.eval_batch_size"]
    is_answered = target in ("infer", "chat")
    if is_answered and not loaded.is_set(ANSWER_LIMIT) and read_plan(run).has_auto_answer_limit:
        changes[ANSWER_LIMIT] = Located("auto", layers.displayed(own.source))
    if is_answered and not loaded.is_set(IMAGE_FOLDER):  # the run's folder was for its rows
        changes[IMAGE_FOLDER] = Located(None, layers.displayed(own.source))
    return loaded.with_values(changes)


def settings_of_model(model: ModelFolder, call: Call) -> RunSettings:
    """Return the facts of weights without a run: base, length, and a dtype for this machine."""
    hardware = call.machine
    is_bf16 = hardware.supports_bf16
    is_fp16 = hardware.kind == "cuda" and not is_bf16
    base = ModelSection(name=model.base or str(model.path), revision=model.revision)
    values = {
        "model.name": base.name,
        "model.revision": base.revision,
        "model.dtype": "bfloat16" if is_bf16 else "float16" if is_fp16 else "float32",
        "model.max_seq_len": load_positions(base, call.environ, may_fetch=True) or UNKNOWN_LENGTH,
        "tuning.mode": model.mode,
        "train.bf16": is_bf16,
        "train.fp16": is_fp16,
    }
    if (model.path / stamp.NAME).is_file():
        values["model.add_tokens"] = stamp.read_stamp(model.path).config["model"].get("add_tokens")
    return _as_layer(values, model.path / ("config.json" if model.base is None else ADAPTER_CONFIG))


def _as_layer(values: dict[str, object], source: Path) -> RunSettings:
    """Return values of a file as the layer of settings below the given ones."""
    shown = layers.displayed(source)
    layer = {path: Located(value, shown) for path, value in values.items()}
    return RunSettings(layer, source, frozenset(layer))


def _refuse_unread(target: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for values of --set that a target does not read."""
    problems = []
    read = sorted(path for path in settings() if env_name(path) in targets.READS[target])
    for entry in overrides:
        path = entry.partition("=")[0]
        if path in settings() and path not in read:
            problems.append(f"--set {path}: {target} does not read it; it reads {', '.join(read)}")
    refuse(problems)


def asked_dtype(call: Call, run: RunFolder, target: str = "merge") -> str | None:
    """Return the dtype in which merged weights are stored, None for the base model's."""
    asked = settings_with_given(call, run, target)
    dtype = asked.config.model.dtype
    return dtype if asked.is_set("model.dtype") and dtype != "auto" else None


def lm_eval_lines(run: RunFolder, tasks: str) -> list[str]:
    """Return the commands that score a run's merged model, or a folder, on tasks of lm-eval."""
    lines = ["# pip install lm-eval   (in a separate environment)"]
    if isinstance(run, ModelFolder):
        model = f"{run.base},peft={run.path}" if run.base else str(run.path)
    elif run.weights("full").is_dir():
        model = str(run.weights("full"))
    else:
        model = str(run.path / "merged")
        if not Path(model).is_dir():
            lines.append(shlex.join(["make", "merge", f"RUN={run.name}"]))
    command = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    command += ["--tasks", tasks.replace(" ", ","), "--batch_size", "auto"]
    command += ["--output_path", str(run.evaluation / "lm_eval")]
    return [*lines, shlex.join(command)]


@contextmanager
def used_alone(run: RunFolder, command: str) -> Iterator[None]:
    """Lock a run folder against other commands that write to it, until a signal ends this one.

    Raises: EnvironmentFault, StoppedOnRequest.
    """
    stopped = f"{command} was stopped; nothing was published"
    with lock.keeping_lock(run.path), stops.stopped_with(stopped):
        yield


def compares(call: Call, run: RunFolder) -> bool:
    """Return whether COMPARE requests the base model in addition to the trained model.

    Raises: ConfigError if a folder names no base.
    """
    words = call.words
    answer = words.choice("COMPARE", ("0", "1")) == "1"
    if answer and isinstance(run, ModelFolder) and run.base is None:
        words.problems.append(
            f"COMPARE=1: {run.path} is a complete model whose base is not known. Score the base "
            "separately, with RUN=<its folder>"
        )
    refuse(words.problems)
    return answer


def prompts(call: Call, given: str | None) -> Iterable[str]:
    """Return the questions of `infer`: the argument, PROMPT, or the lines of standard input."""
    asked = given or call.environ.get("PROMPT")
    return [asked] if asked else (line.strip() for line in sys.stdin if line.strip())


def images(call: Call) -> str | list[str]:
    """Return the images of `infer` in IMAGE, separated by commas or as a list."""
    given = call.words.text("IMAGE") or ""
    if given.startswith("["):
        return given
    return [str(Path(path.strip()).expanduser()) for path in given.split(",") if path.strip()]
