"""Faults by the hundred: `make test-faults`, which writes what was seen to docs/reliability.md."""

import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import test_config_errors as bad
import torch
from faults import page
from faults.bench import EVERY_STEP, Bench, Fault, meet
from faults.files import flip
from faults.front import CANARY, PAYLOADS
from faults.table import FAULTS
from run_files import run_json
from safetensors.torch import load_file, save_file
from test_data_cache import KEY, fill

from sft_play.config.schema import env_name
from sft_play.data import cache
from sft_play.runs import seal
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[1]
MOST = int(os.environ.get("COUNT") or 10**6)


def up_to(target: int) -> range:
    return range(min(target, MOST))


def noted(name: str, counted: str, target: str, seen: str) -> None:
    page.note("counts", name, counted=counted, target=target, seen=seen)


def row(name: str) -> Fault:
    (found,) = (fault for fault in FAULTS if fault.name == name)
    return found


def test_flips_of_a_checkpoint(finished, tmp_path):
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


def test_flips_of_the_token_cache(tmp_path):
    def content(folder: Path) -> None:
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
    words = "flipped bits of tokenised rows found, and the rows made again"
    noted("cache-flips", words, "40 of 40", f"{found} of {total}")
    assert found == total


def called(words: list[str], environ: Mapping[str, str], folder: Path) -> tuple[int, str, float]:
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


def test_bad_configs(tmp_path):
    calls = bad_calls(tmp_path)[:MOST]
    slowest, refused, wrong = 0.0, 0, []
    for words, environ in calls:
        code, said, seconds = called(words, environ, tmp_path)
        slowest = max(slowest, seconds)
        if code == 10 and "Traceback" not in said and said.strip():
            refused += 1
        else:
            wrong.append((words, environ, code, said[-200:]))
    words = "bad configs refused with class 10 and without a traceback; CPU seconds of the slowest"
    seen = f"{refused} of {len(calls)}, {slowest:.2f} s"
    noted("bad-configs", words, "110 of 110, under 1 s", seen)
    assert not wrong and slowest < 1


def test_words_that_a_shell_would_run(tmp_path):
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
def bench_of(plan_run, run_worker, finished, settings_of, tmp_path) -> Callable[[int], Bench]:
    def make(number: int) -> Bench:
        folder = tmp_path / str(number)
        folder.mkdir()
        return Bench(
            folder,
            plan_run,
            run_worker,
            finished("lora"),
            settings_of({}),
            lambda: finished("lora"),
        )

    return make


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("kill-in-a-save", 80, "kills with SIGKILL inside a save, after which the run goes on"),
        ("kill", 20, "kills with SIGKILL at any other moment, after which the run goes on"),
        ("kill-a-rank", 20, "kills of one of two ranks: the other ends in 10 s with class 17"),
        ("sigterm", 20, "SIGTERM: no step is lost"),
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
    noted(f"many-{name}", words, f"{target} of {target}", seen)
    assert not wrong


SOME = {"train.max_steps": 6, "train.predict_with_generate": False}
CONFIGS: list[dict[str, Any]] = [
    {"tuning.mode": mode, "train.packing": packing, "tuning.lora.dropout": dropout, **more}
    for mode, dropout in (("lora", 0.0), ("lora", 0.2), ("full", 0.0))
    for packing in (True, False)
    for more in (
        {},
        {"train.lr_scheduler_type": "cosine", "train.warmup_steps": 2},
        {"train.optim": "adamw_torch", "train.weight_decay": 0.1},
        {"train.neftune_noise_alpha": 5.0, "train.seed": 7},
        {"train.eval_strategy": "steps", "train.eval_steps": 1, "train.data_seed": 3},
    )
]


def weights_of(folder: RunFolder, mode: str) -> dict[str, torch.Tensor]:
    (path,) = folder.weights(mode).glob("*model.safetensors")
    return load_file(path)


def is_same(first: RunFolder, second: RunFolder, mode: str) -> bool:
    """Return whether two runs ended with the same bits: weights and logged losses."""
    ours, theirs = (weights_of(run, mode) for run in (first, second))
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return same and run_json(first)["loss"] == run_json(second)["loss"]


def test_resumed_is_uninterrupted_bit_for_bit(plan_run, run_worker):
    assert len(CONFIGS) == 30
    same = 0
    for number in up_to(30):
        settings = {**SOME, **CONFIGS[number]}
        stop = 2 + number % 3  # in the middle of an epoch, at its end, after it
        whole, first = plan_run(settings), plan_run({**settings, "train.stop_after": stop})
        assert (run_worker(whole), run_worker(first)) == (0, 75), CONFIGS[number]
        second = plan_run({**settings, "train.resume_from": first.path})
        assert run_worker(second) == 0
        same += is_same(second, whole, settings["tuning.mode"])
    total = len(up_to(30))
    words = "configurations whose resumed run ends bit for bit as an uninterrupted one"
    noted("bit-exact", words, "30 of 30", f"{same} of {total}")
    assert same == total


def change(name: str, key: str, by: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes a value of a file that torch saved."""

    def spoil(checkpoint: Path) -> None:
        values = torch.load(checkpoint / name, weights_only=False)
        inner = values["state"][0] if name == "optimizer.pt" else values
        inner[key] = by(inner[key])
        torch.save(values, checkpoint / name)

    return spoil


def another_state() -> torch.Tensor:
    """Return a random state of torch that another seed begins with."""
    return torch.Generator().manual_seed(1).get_state()


def nudge(checkpoint: Path) -> None:
    path = checkpoint / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


CONTROLS: dict[str, Callable[[Path], None]] = {
    "a weight": nudge,
    "the first moment": change("optimizer.pt", "exp_avg", lambda old: old * 1.5),
    "the second moment": change("optimizer.pt", "exp_avg_sq", lambda old: old * 1.5),
    "the optimizer's step": change("optimizer.pt", "step", lambda old: old + 1),
    "the schedule": change("scheduler.pt", "last_epoch", lambda old: old + 1),
    "the random state of torch": change("rng_state.pth", "cpu", lambda old: another_state()),
}
OTHER: dict[str, dict[str, Any]] = {
    "the seed": {"train.seed": 8},
    "the learning rate": {"train.learning_rate": 0.02},
    "the order of the rows": {"train.data_seed": 9},
}


def test_negative_controls_differ(plan_run, run_worker):
    """What is compared would notice: a change of each part of the state ends otherwise."""
    settings = {**SOME, "tuning.lora.dropout": 0.2, "train.lr_scheduler_type": "cosine"}
    whole = plan_run(settings)
    assert run_worker(whole) == 0
    other = []
    for name, spoil in list(CONTROLS.items())[:MOST]:
        first = plan_run({**settings, "train.stop_after": 3})
        assert run_worker(first) == 75
        checkpoint = first.checkpoints / "checkpoint-3"
        spoil(checkpoint)
        seal.seal(checkpoint)
        second = plan_run({**settings, "train.resume_from": first.path})
        assert run_worker(second) == 0, name
        other.append(not is_same(second, whole, "lora"))
    for changed in list(OTHER.values())[:MOST]:
        run = plan_run({**settings, **changed})
        assert run_worker(run) == 0
        other.append(not is_same(run, whole, "lora"))
    words = "negative controls that end otherwise: one part of the state or one setting is changed"
    noted("controls", words, "9 of 9", f"{sum(other)} of {len(other)}")
    assert all(other)


def have_tokens(tokens: dict[str, str]) -> None:
    """Have tokens in the environment."""
    os.environ.update(tokens)


def test_no_file_has_the_canary(bench_of, plan_run, tmp_path):
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


def test_the_page_says_what_was_noted():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.MARK in text
    assert len(re.findall(r"^\| .* \(`[a-z0-9A-Z_.-]+`\) \|", text, re.MULTILINE)) >= 60
