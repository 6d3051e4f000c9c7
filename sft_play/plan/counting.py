"""Get counts that need torch: a model's structure, and the bytes of a step. Loads no torch.

Those of well-known models ship as data. All others are counted in another process, once.

The answers are cached under a digest of everything that they depend on. One process answers
consecutive requests, because its imports take seconds.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Self

from pydantic import TypeAdapter

from sft_kernels.needs import has_liger
from sft_play.config.backends import backend_of
from sft_play.config.loader import PACKAGE
from sft_play.config.schema import Config, ModelSection
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.config_json import find_file, load_facts
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape, shape_of
from sft_play.plan.ranks import Machine
from sft_play.plan.structure import structure_from_json
from sft_play.plan.traced import TracedStep
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import cache_folder

logger = logging.getLogger(__name__)

COUNTER = "sft_play.models.structure"  # counts weights; python -m: reads requests from stdin
TRACER = "sft_play.models.trace"
# of a step on a GPU in 16 bits, by model and by a word of KNOWN_SETTINGS: models.trace
KNOWN_TRACES = Path(__file__).parent / "known_traces.json"
KNOWN_SETTINGS = {
    "lora": {},
    "qlora": {"tuning.mode": "qlora"},
    "full": {"tuning.mode": "full"},
    "full in 16 bits": {"tuning.mode": "full", "model.dtype": "bfloat16"},
    "float8": {"tuning.base_dtype": "float8"},
    # a hyphen: only of models with experts
    "lora-shared": {"tuning.lora.experts": "shared"},
    "qlora-shared": {"tuning.mode": "qlora", "tuning.lora.experts": "shared"},
    "qlora-none": {"tuning.mode": "qlora", "tuning.lora.experts": "none"},
}
MODEL_SETTINGS = {"add_tokens", "dtype", "attn_implementation", "trust_remote_code"}
# Settings of adapters that change no byte
WEIGHTLESS = {"alpha", "use_rslora", "loraplus_lr_ratio", "encoders_learning_rate"}
# Their versions change the answers
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "fla-core",
    "flash-linear-attention",
    "triton",
)
SECONDS = 600  # timeout of a process that does not answer


class Uncounted(Exception):
    """Raised with the reason for a missing answer."""


def load_counted_shape(config: Config, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a run's model with its structure, without encoders that are dropped.

    Architectures like Llama need no structure, and well-known models have it as data. Any other
    model is built without weights in a separate process, once. If that fails, the shape has the
    reason as its `guess`, and the counts of a Llama of its sizes.

    Raises: EnvironmentFault if there is no config.json, or its code needs a missing package;
    ConfigError for a model that cannot run on text only.
    """
    shape = _counted_shape(config, environ)
    shape = shape.with_vocab(grown_vocabulary(config.model, shape.vocab, environ))
    counts, encoders = shape.structure, config.tuning.encoders
    if counts is None or encoders not in ("full", "drop"):
        return shape
    dropped = counts.encoders if encoders == "drop" else 0
    return replace(shape, structure=replace(counts.with_more(-dropped), encoders=0))


def _counted_shape(config: Config, environ: Mapping[str, str]) -> ModelShape:
    model = config.model
    facts = load_facts(model.name, model.revision, environ)
    shape = replace(shape_of(facts.config, model.name), structure=facts.structure)
    is_known = shape.model_type in LLAMA_LIKE and shape.composite is None
    if shape.structure is not None or is_known:
        return shape
    if not shape.model_type:
        return replace(shape, guess="its config.json names no model_type")
    request = {
        "model": model.model_dump(include={"name", "revision", "trust_remote_code"}),
        "config": dict(facts.config),
    }
    request["model"]["name"] = _resolved_name(model.name)
    told = f"counting the weights of {model.name} without loading them, once"
    folder = cache_folder(config) / "structures"
    try:
        counted = cached_answer(COUNTER, request, told, folder, environ)
    except Uncounted as reason:
        return replace(shape, guess=str(reason))
    if "unusable" in counted:
        raise ConfigError(counted["unusable"])
    return replace(shape, structure=structure_from_json(counted))


def grown_vocabulary(model: ModelSection, rows: int, environ: Mapping[str, str]) -> int:
    """Return the rows of a vocabulary of `rows` with model.add_tokens.

    Without a tokenizer.json that lists ids, all tokens are assumed to be new.
    """
    if not model.add_tokens:
        return rows
    path = find_file(model.name, "tokenizer.json", model.revision, environ)
    try:
        tokenizer = read_json(path) if path else {}
        ids = tokenizer["model"]["vocab"] | {
            token["content"]: token["id"] for token in tokenizer["added_tokens"]
        }
    except (ValueError, LookupError, TypeError):  # loading the tokenizer reports the reason
        return rows + len(model.add_tokens)
    new = len(set(model.add_tokens) - ids.keys())
    return max(rows, max(ids.values()) + 1 + new)


def load_trace(config: Config, machine: Machine, environ: Mapping[str, str]) -> TracedStep:
    """Return the traced step of a config.

    Raises: Uncounted with the reason why there is none.
    """
    if not backend_of(config).is_traceable:
        raise Uncounted(f"tuning.backend={config.tuning.backend} cannot be traced")
    model = config.model
    read_trace = TypeAdapter(TracedStep).validate_python
    facts = load_facts(model.name, model.revision, environ)
    if machine.is_gpu and machine.is_half and not machine.zero_stage and has_liger():
        asked = _settings(config, machine.is_half)
        for word, trace in known_traces().get(facts.name, {}).items():
            if _settings(known_setting(facts.name, word), is_half=True) == asked:
                return read_trace(trace)
    request = {
        "settings": traced_settings(config, machine.is_half),
        "config": dict(facts.config),
        "device": machine.ranks.device,
        "zero_stage": machine.zero_stage,
    }
    told = f"tracing a {config.tuning.mode} step of {model.name} without its weights, once"
    folder = cache_folder(config) / "traces"
    return read_trace(cached_answer(TRACER, request, told, folder, environ))


@cache
def known_traces() -> dict[str, dict[str, Any]]:
    """Return the traces that ship, by model and by a word of KNOWN_SETTINGS."""
    return json.loads(KNOWN_TRACES.read_text(encoding="utf-8"))


def known_setting(name: str, word: str) -> Config:
    """Return the config of a well-known model with some of KNOWN_SETTINGS."""
    return Config().changed({"model.name": name, **KNOWN_SETTINGS[word]})


def traced_settings(config: Config, is_half: bool) -> dict[str, object]:
    """Return the settings that a trace depends on."""
    model = {"name": _resolved_name(config.model.name), "revision": config.model.revision}
    settings = _settings(config, is_half)
    return {**settings, "model": {**settings["model"], **model}}


def _settings(config: Config, is_half: bool) -> dict[str, dict[str, object]]:
    """Return the settings that change the bytes of a model's step beyond its rows."""
    unread = {"lora": config.tuning.mode == "full" or WEIGHTLESS, "allow_untrained_tokens": True}
    return {
        "model": config.model.model_dump(mode="json", include=MODEL_SETTINGS),
        "tuning": config.tuning.model_dump(mode="json", exclude=unread),
        "train": {
            "fast_path": config.train.fast_path,
            "batch_size": 2,  # so that there is a mask if attention needs one
            "packing": False,
            "bf16": is_half,
            "fp16": False,
        },
    }


def _resolved_name(name: str) -> str:
    """Return the name of a model: the same files in another folder are the same model."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def cached_answer(
    module: str, request: Mapping[str, object], told: str, folder: Path, environ: Mapping[str, str]
) -> Any:
    """Return the result of `module.answer` for a request, from the cache if it is there.

    `told` is one line about the work, logged if the cache had no answer. Refusals by a model's
    code are cached too, because they would recur.

    Raises: Uncounted with the reason if there is no answer; EnvironmentFault for a missing
    package.
    """
    name = fingerprint(module=module, request=request, versions=counting_versions())
    path = folder / f"{name}.json"
    kept = _read(path)
    if kept is None:
        logger.warning("%s", told)
        kept = _ask(module, request, environ)
        if "missing" in kept:  # once it is installed, the model is counted
            raise EnvironmentFault(kept["missing"])
        write_json(path, kept)
    if "refused" in kept:
        raise Uncounted(kept["refused"])
    return kept["answer"]


@dataclass(frozen=True)
class _Counter:
    """A process that counts. It sees no GPU and ends by itself if nothing is requested."""

    process: subprocess.Popen[str]
    errors: IO[str]  # its stderr
    owner: int  # process id: a fork must not share the pipes

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> Self:
        """Start a process, whose imports take seconds."""
        paths = [str(PACKAGE.parent)]
        if environ.get("PYTHONPATH"):  # packages may be installed only there
            paths.append(environ["PYTHONPATH"])
        env = {**environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        # a file, because a pipe that is not read would fill up
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen([sys.executable, "-m", COUNTER], env=env, text=True, **pipes)
        return cls(process, errors, os.getpid())

    def ask(self, line: str) -> str:
        """Return the line that answers a line; "" if the process has ended.

        Raises: Uncounted after SECONDS.
        """
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            if timer.finished.is_set():
                raise Uncounted(f"the process that counts took more than {SECONDS} seconds")
            timer.cancel()

    def ending(self) -> str:
        """Return how the process ended, with the last line of its output."""
        code = self.process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["no output"])[-1]
        return f"the process that counts ended with {code}: {last}"


_counters: dict[frozenset[tuple[str, str]], _Counter] = {}  # by their environment


def _ask(module: str, request: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return {"answer": ...} or {"refused": reason} of `module.answer`, in another process.

    A process that answered before and still runs is asked first.
    """
    line = json.dumps([module, request])
    key = frozenset(environ.items())
    counter = _counters.pop(key, None)
    found = counter.ask(line) if counter and counter.owner == os.getpid() else ""
    if not found:
        counter = _Counter.start(environ)
        found = counter.ask(line)
    if not found:
        raise Uncounted(counter.ending())
    _counters[key] = counter
    return json.loads(found)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the cached answer, None if there is none or if its file is damaged."""
    try:
        kept = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s: cannot be read (%s); counting again", path, error)
        return None
    return kept if isinstance(kept, dict) and kept.keys() & {"answer", "refused"} else None


def fingerprint(**facts: Any) -> str:
    """Return the SHA-256 of plain facts: what was found under equal ones is valid."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def counting_versions() -> list[str]:
    """Return the versions of the libraries, and a digest of the code that counts models."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(name)
    return [*found, digest_of_code("sft_play/models/**/*.py", "sft_kernels/**/*.py")]


def digest_of_code(*patterns: str) -> str:
    """Return the SHA-256 of the sources that match patterns."""
    total = hashlib.sha256()
    root = PACKAGE.parent
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        text = path.read_bytes()
        total.update(f"{path.relative_to(root)}:{len(text)}:".encode() + text)
    return total.hexdigest()
