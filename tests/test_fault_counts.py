"""Faults by the hundred: `make test-faults`, which writes what was seen to docs/evidence/reliability.md."""

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import test_config_errors as bad
from faults.bench import EVERY_STEP, QUIET, Bench, meet, processes_of
from faults.counting import MOST, noted, row, up_to
from faults.disks import called
from faults.files import flip
from faults.front import CANARY, PAYLOADS
from make_runs import Launched
from pydantic import ValidationError
from test_data_cache import KEY, fill
from test_runs_resumed import SOME_VALUES

from benchmarks import sealing
from sft_play.config.on_resume import MUST_MATCH
from sft_play.config.schema import Config, env_name, kinds, settings
from sft_play.data import cache
from sft_play.runs import seal
from sft_play.runs.resumed import QUANTIZATION

AS_UNINTERRUPTED = (
    "the run continues, and ends with the same losses and weights as one that was not"
)
pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[1]


def test_flips_are_found(finished, tmp_path):
    copy = shutil.copytree(finished("lora").checkpoints / "checkpoint-2", tmp_path / "checkpoint-2")
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    bits, found = random.Random(1), 0
    for number in up_to(300):
        path = paths[number % len(paths)]
        position, mask = bits.randrange(path.stat().st_size), 1 << bits.randrange(8)
        flip(path, position, mask)
        found += (seal.find_damage(copy) or "").startswith(path.name)
        flip(path, position, mask)
    total = len(up_to(300))
    words = f"flipped bits found, over all {len(paths)} files of a checkpoint"
    noted("flips", words, "300 of 300", f"{found} of {total}")
    assert found == total and seal.find_damage(copy) is None


def test_cache_flips_are_found(tmp_path):
    def content(folder):
        fill(folder, "samples" * 100)

    entry = cache.get_or_build(tmp_path, KEY, content)
    whole = {path.name: path.read_bytes() for path in entry.iterdir()}
    bits, found = random.Random(2), 0
    for number in up_to(40):
        name = sorted(whole)[number % len(whole)]
        flip(entry / name, bits.randrange(len(whole[name])), 1 << bits.randrange(8))
        entry = cache.get_or_build(tmp_path, KEY, content)
        found += {path.name: path.read_bytes() for path in entry.iterdir()} == whole
    total = len(up_to(40))
    words = "flipped bits of tokenized rows found, and the rows made again"
    noted("cache-flips", words, "40 of 40", f"{found} of {total}")
    assert found == total


def call(words: list[str], environ: Mapping[str, str], folder: Path) -> tuple[int, str, float]:
    """Return code, errors and CPU seconds of a call of the command line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "sft_play", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stderr, seconds


def bad_calls(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the calls with a bad config: files, variables, overrides and paths."""
    (folder / "beside.yaml").touch()
    (folder / "latin.yaml").write_bytes(b"model:\n  name: caf\xe9\n")
    (folder / "utf16.yaml").write_bytes("train:\n".encode("utf-16"))
    calls: list[tuple[list[str], dict[str, str]]] = []
    for number, (text, *_) in enumerate(bad.BAD_FILES):
        path = folder / f"bad-{number}.yaml"
        path.write_text(text)
        calls.append((["config"], {"CONFIG": path.name}))
    calls += [
        (["config"], {"CONFIG": bad.EMPTY, name: text}) for name, text, _ in bad.BAD_VARIABLES
    ]
    calls += [(["config", "--set", word], {"CONFIG": bad.EMPTY}) for word, _ in bad.BAD_OVERRIDES]
    calls += [(["config"], {"CONFIG": name}) for name, _ in bad.BAD_PATHS if "\0" not in name]
    for path in bad.NUMBERS[:24]:
        calls.append((["plan"], {"CONFIG": bad.EMPTY, env_name(path): "many"}))
    return calls


def test_bad_configs_are_refused(tmp_path):
    calls = bad_calls(tmp_path)[:MOST]
    slowest, refused, wrong = 0.0, 0, []
    for words, environ in calls:
        code, said, seconds = call(words, environ, tmp_path)
        slowest = max(slowest, seconds)
        if code == 10 and "Traceback" not in said and said.strip():
            refused += 1
        else:
            wrong.append((words, environ, code, said[-200:]))
    words = "bad configs refused with class 10 and without a traceback; CPU seconds of the slowest"
    seen = f"{refused} of {len(calls)}, {slowest:.2f} s"
    noted("bad-configs", words, f"{len(calls)} of {len(calls)}, under 1 s", seen)
    assert not wrong and slowest < 1


def test_shell_words_are_not_run(tmp_path):
    names = ("CONFIG", "RUN", "TRAIN_RUN_NAME", "DATA_TRAIN_PATH", "NUM_GPUS", "DEVICE", "PY")
    names += ("PYTHON", "SFT", "CHECK", "ENV", "DEEPSPEED_CONFIG", "TB_PORT", "MODEL_NAME", "GIVEN")
    tried = 0
    for payload in PAYLOADS:
        for name in names:
            if tried == MOST:
                break
            target = tmp_path / str(tried)
            words = [f"{name}={payload.format(target)}"]
            python = [] if name == "PY" else [f"PY={shutil.which('true')}"]
            subprocess.run(["make", "config", *python, *words], cwd=ROOT, capture_output=True)
            tried += 1
    run = len(os.listdir(tmp_path))
    words = f"words of {len(names)} make variables that were run"
    noted("shell-words", words, "0 of 120", f"{run} of {tried}")
    assert run == 0


@pytest.fixture
def bench_of(plan_run, run_worker, finished, settings_of, uninterrupted, tmp_path):
    def make(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        saved, settings = finished("lora"), settings_of({})
        taught = partial(finished, "lora")
        return Bench(
            folder, plan_run, run_worker, saved, settings, taught, uninterrupted, number=number
        )

    return make


@pytest.mark.parametrize(
    "name, target, words",
    [
        ("kill-in-a-save", 80, f"kills with SIGKILL inside a save; {AS_UNINTERRUPTED}"),
        ("kill", 20, f"kills with SIGKILL at any other moment; {AS_UNINTERRUPTED}"),
        (
            "kill-a-rank-and-go-on",
            20,
            "kills of one of two ranks: the other ends in 10 s with class 17; both continue, and end "
            "with the same losses and weights as two that were not killed",
        ),
        ("sigterm", 20, "SIGTERM: no step is lost"),
        ("sigterm-one-rank", 20, "SIGTERM to one of two ranks: no step is lost"),
    ],
)
def test_many(bench_of, name, target, words):
    met, slowest, wrong = 0, 0.0, []
    for number in up_to(target):
        problems, _, seconds = meet(row(name), bench_of(number))
        slowest = max(slowest, seconds)
        met += not problems
        wrong += problems
    seen = f"{met} of {len(up_to(target))}, the slowest {slowest:.1f} s"
    noted(name, words, f"{target} of {target}", seen)
    assert not wrong


def test_front_ends_that_are_killed_begin_anew(bench_of):
    """At any moment of its work; the same command, typed again, comes to its launch."""
    goes_on, wrong = 0, []
    for number in up_to(40):
        outcome = row("killed-front-end").inject(bench_of(number))
        goes_on += outcome.exit_class == 0
        wrong += [outcome.said] if outcome.exit_class else []
    words = "kills of the front end at any moment, after which the same command starts the run"
    noted("front-ends", words, "40 of 40", f"{goes_on} of {len(up_to(40))}")
    assert not wrong


VICTIMS = ("make", "its child", "rank 0", "rank 1")
MOMENTS = ("plan ", "data train rows=", "step 2/", "step 9/")


def victim_of(run: Launched, number: int) -> psutil.Process:
    """Return the process to kill; ranks may have to start first."""
    which = VICTIMS[number % len(VICTIMS)]
    make = psutil.Process(run.make.pid)
    if which == "make":
        return make
    if which == "its child":  # the front end, which becomes the launcher
        return make.children()[0]
    deadline = time.monotonic() + 60
    while len(ranks := run.ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    run.everyone += ranks
    return ranks[int(which[-1])]


def test_orphans_are_not_left(settings_of, tmp_path):
    settings = settings_of({**EVERY_STEP, "train.save_steps": 50, "train.max_steps": 3000})
    left, slowest = [], 0.0
    for number in up_to(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Launched(folder, "train-distributed", settings)
        run.wait_for(MOMENTS[number // len(VICTIMS) % len(MOMENTS)])
        victim = victim_of(run, number)
        killed_at = time.monotonic()
        victim.kill()
        psutil.wait_procs(run.everyone, timeout=60)
        run.make.wait(60)
        slowest = max(slowest, time.monotonic() - killed_at)
        below = [process for process in processes_of(folder) if process.is_running()]
        left += [(number, " ".join(process.cmdline())) for process in below]
        for process in below:
            process.kill()
    words = "processes left of launched runs of two ranks: make, launcher or a rank was killed"
    seen = f"{len(left)} after {len(up_to(40))} kills, the slowest end {slowest:.0f} s"
    noted("orphans", words, "0 after 40", seen)
    assert not left


def test_sealing_costs_little(tmp_path):
    added = sealing.added(sealing.measure(tmp_path, gigabytes=1.5, repeats=min(25, MOST)))
    words = (
        "time that sealing adds to a save of 1.5 GB that reaches the disk (benchmarks/sealing.py)"
    )
    middle = statistics.median(added)  # of pairs: the disk is now fast, now slow
    seen = f"{middle:+.0%}, of {len(added)} saves {min(added):+.0%} to {max(added):+.0%}"
    noted("sealing", words, "at most +15 %", seen)
    assert middle <= 0.15


def other_value(config: Config, path: str) -> Any:
    """Return another valid value of a setting."""
    words = [word for kind in kinds(settings()[path].annotation) for word in get_args(kind)]
    for value in (*words, *SOME_VALUES):
        values = config.model_dump()
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = value
        try:
            changed = Config.model_validate(values)
        except ValidationError:
            continue
        if changed != config:
            return value
    raise AssertionError(f"no other value of {path}")


COSINE = {"train.max_steps": 3, "train.lr_scheduler_type": "cosine", **QUIET}
YARN = {"model.rope_scaling.rope_type": "yarn", "model.rope_scaling.factor": 4}
LLAMA3 = {
    "model.rope_scaling.rope_type": "llama3",
    "model.rope_scaling.factor": 4,
    "model.rope_scaling.low_freq_factor": 1,
    "model.rope_scaling.high_freq_factor": 4,
    "model.rope_scaling.original_max_position_embeddings": 128,
}


def with_companions(path: str, value: Any) -> dict[str, Any]:
    """Return a changed setting with those that it needs to be valid."""
    if path.startswith("model.rope_scaling."):
        return (LLAMA3 if path in LLAMA3.keys() - YARN.keys() else YARN) | {path: value}
    if path == "train.effective_batch_size":
        return {path: value, "train.grad_accum": "auto", "train.batch_size": 1}
    return {path: value}


def another_base(config: Config, folder: Path) -> Path:
    """Return a copy of the base model with another bit."""
    base = shutil.copytree(config.model.name, folder / "base")
    flip(base / "model.safetensors", (base / "model.safetensors").stat().st_size - 100, 1)
    return base


def test_must_match_or_it_is_refused(train_run, bench_of):
    """Each is changed alone; the front end refuses it, and nothing is launched."""
    saved = train_run({**EVERY_STEP, **COSINE})
    config = saved.read_config()
    # max_steps overrides the epochs; how qlora quantizes is nothing to lora
    paths = sorted({*MUST_MATCH} - {"train.epochs"} - QUANTIZATION)[:MOST]
    refused, wrong = 0, []
    for number, path in enumerate(paths):
        bench = bench_of(number)
        changed = with_companions(path, other_value(config, path))
        if path == "model.name":
            changed = {path: another_base(config, bench.folder)}
        words = {
            name: value if isinstance(value, str | Path) else json.dumps(value)
            for name, value in changed.items()
        }
        outcome = called(bench, {**COSINE, "train.resume_from": saved.path, **words})
        # without a GPU Unsloth is refused at once
        named = ("Unsloth needs",) if path == "tuning.backend" else (path, "base_digest")
        is_refused = outcome.exit_class in (12, 13) and any(n in outcome.said for n in named)
        refused += is_refused
        wrong += [] if is_refused else [(path, changed, outcome)]
    words = "settings that must match: one is changed, and the resume is refused before a launch"
    noted("must-match", words, f"{len(paths)} of {len(paths)}", f"{refused} of {len(paths)}")
    assert not wrong


def have_tokens(tokens: dict[str, str]) -> None:
    """Have tokens in the environment."""
    os.environ.update(tokens)


def test_canary_is_in_no_file(bench_of, plan_run, tmp_path):
    """A token in the environment of a whole run, from its plan to its report."""
    bench = bench_of(0)
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(name, CANARY)
        out, rows = tmp_path / "out", tmp_path / "cache"
        places = {"train.output_dir": out, "data.cache_dir": rows}
        folder = plan_run({**EVERY_STEP, **places, "train.max_steps": 3})
        tokens = dict.fromkeys(names, CANARY)
        ranks = bench.start(folder, 1, have_tokens, tokens)
        assert bench.ends(ranks) == [0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    found = [path for path in files if CANARY.encode() in path.read_bytes()]
    words = f"files of a run, its cache and its output that hold a token of {len(names)} variables"
    noted("canary", words, "0", f"{len(found)} of {len(files)}")
    assert len(files) > 30 and not found
