"""Faults of files: checkpoints, trained weights, tokenized rows, edited JSON, clocks that jump."""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from faults.bench import Bench, Fault, Guard, Outcome, newest
from sft_play.data import cache
from sft_play.errors import ExitClass, SftPlayError, disk_errors_in_words
from sft_play.inference.load import checked_weights
from sft_play.runs import checkpoints, lock, metrics, seal, stamp
from sft_play.runs.answer_file import AnswerShard
from sft_play.runs.files import open_in_place, write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import MetricsLine
from sft_play.runs.model_folder import refuse_unsafe_base
from sft_play.runs.publishing import FILES as FILES_OF_EXPORT
from sft_play.runs.publishing import Target
from sft_play.training.runtime import LogFile

NEWEST = "checkpoint-3"
Inject = Callable[[Bench], Outcome]
Damage = Callable[[Path], None]  # of a folder of checkpoints


def nothing(*_: object, **__: object) -> None:
    """Stand where a guard was."""


def flip(path: Path, position: int | None = None, mask: int | None = None) -> None:
    """Flip the bits of a mask in one byte of a file, by default a bit that the name decides."""
    bits = random.Random(path.name)
    position = bits.randrange(path.stat().st_size) if position is None else position
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (mask or 1 << bits.randrange(8))]))


def resumed(damage: Damage) -> Callable[[Bench], Outcome]:
    """Return an injection: the run is to continue, after its checkpoints were damaged."""

    def inject(bench):
        run = bench.copy()
        damage(run.checkpoints)
        bench.inject_now()
        said: list[str] = []
        try:
            chosen = checkpoints.choose_checkpoint(run.path, said.append)
        except SftPlayError as error:
            return Outcome(error.exit_class, str(error))
        return Outcome(0, "; ".join(said), 3, checkpoints.step_of(chosen))

    return inject


SEALED = Guard("sft_play.runs.seal:find_difference", nothing)
ASIDE = f"it is {NEWEST}.corrupt now, and the next older one is taken"


def damaged(name: str, injected: str, damage: Damage, says: str) -> Fault:
    """Return a row: the newest checkpoint is damaged, named, set aside, and the next is taken."""
    return Fault(
        name, injected, resumed(damage), ExitClass.DONE, (says, ASIDE), SEALED, 5, 1, is_quick=True
    )


def flipped(name: str) -> Fault:
    words = f"one bit of {name} in the newest checkpoint flips"
    says = f"{name} has SHA-256" if name != seal.NAME else f"{seal.NAME} cannot be used"
    return damaged(f"flip-{name}", words, lambda folder: flip(folder / NEWEST / name), says)


def swap(name: str) -> Damage:
    def damage(folder):
        shutil.copy(folder / "checkpoint-1" / name, folder / NEWEST / name)

    return damage


def edit_with_its_digest(folder: Path) -> None:
    """Change a number in a file, and the digest of the file in the manifest."""
    path, manifest = folder / NEWEST / "trainer_state.json", folder / NEWEST / seal.NAME
    before, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "global_step": 2}))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    text = manifest.read_text().replace(before, after)
    manifest.write_text(text.replace(f'"size": {size}', f'"size": {path.stat().st_size}'))


def in_the_way(folder: Path) -> None:
    (folder / NEWEST / "scheduler.pt").unlink()
    (folder / NEWEST / "scheduler.pt").mkdir()


def link_to_nothing(folder: Path) -> None:
    (folder / NEWEST / "scheduler.pt").unlink()
    (folder / NEWEST / "scheduler.pt").symlink_to("/nowhere/scheduler.pt")


def edit_state(folder: Path) -> None:
    path = folder / NEWEST / "trainer_state.json"
    path.write_text(path.read_text().replace('"global_step": 3', '"global_step": 1'))


FILES = (
    "adapter_model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "stamp.json",
    seal.NAME,
)
DAMAGED = (
    *map(flipped, FILES),
    damaged(
        "cut-weights",
        "the weights in the newest checkpoint are cut off after half",
        lambda folder: os.truncate(folder / NEWEST / "adapter_model.safetensors", 9000),
        "adapter_model.safetensors has 9000 bytes, and was sealed with",
    ),
    damaged(
        "empty-optimizer",
        "optimizer.pt is empty",
        lambda folder: os.truncate(folder / NEWEST / "optimizer.pt", 0),
        "optimizer.pt has 0 bytes",
    ),
    damaged(
        "no-optimizer",
        "optimizer.pt is deleted",
        lambda folder: (folder / NEWEST / "optimizer.pt").unlink(),
        "optimizer.pt is missing",
    ),
    damaged(
        "no-stamp",
        "stamp.json is deleted",
        lambda folder: (folder / NEWEST / "stamp.json").unlink(),
        "stamp.json is missing",
    ),
    damaged(
        "no-manifest",
        "the manifest is deleted",
        lambda folder: (folder / NEWEST / seal.NAME).unlink(),
        f"{seal.NAME} is missing",
    ),
    damaged(
        "other-optimizer",
        "optimizer.pt is that of another step",
        swap("optimizer.pt"),
        "optimizer.pt has ",
    ),
    damaged(
        "other-weights",
        "the weights are those of another step",
        swap("adapter_model.safetensors"),
        "adapter_model.safetensors has SHA-256",
    ),
    damaged(
        "one-more-file",
        "a file is put into a checkpoint",
        lambda folder: (folder / NEWEST / "pytorch_model.bin").write_bytes(b"x"),
        "pytorch_model.bin is not in MANIFEST.json",
    ),
    damaged("edited-state", "trainer_state.json is edited", edit_state, "trainer_state.json has"),
    damaged(
        "edited-with-digest",
        "trainer_state.json is edited, and its digest in the manifest, too",
        edit_with_its_digest,
        "MANIFEST.json cannot be used (it is not as it was written)",
    ),
    damaged("folder-for-file", "a folder stands for a file", in_the_way, "scheduler.pt is missing"),
    damaged("dead-link", "a link to nothing stands for a file", link_to_nothing, "scheduler.pt is"),
)


def half_written(folder: Path) -> None:
    half = folder / "checkpoint-4"
    half.mkdir()
    shutil.copy(folder / NEWEST / "trainer_state.json", half)


def leftovers(bench: Bench) -> Outcome:
    run = bench.copy()
    staged = run.checkpoints / checkpoints.STAGING / "checkpoint-4"
    staged.mkdir(parents=True)
    said: list[str] = []
    checkpoints.remove_leftovers(run.checkpoints, said.append)
    assert not staged.exists()
    return Outcome(0, "; ".join(said), 3, newest(run))


def jumped(years: int) -> Callable[[Bench], Outcome]:
    """Return an injection: the clock jumps between two saves, then old checkpoints are removed."""

    def inject(bench):
        run = bench.copy()
        for step in (1, 2, 3):
            path = run.checkpoints / f"checkpoint-{step}"
            seconds = path.stat().st_mtime + years * 31_536_000 * step
            for file in (path, *path.iterdir()):
                os.utime(file, (seconds, seconds))
        checkpoints.rotate(run.checkpoints, 1)
        return Outcome(0, "", 3, newest(run))

    return inject


def by_time(folder: Path) -> list[Path]:
    """List checkpoints as transformers does with use_mtime: the latest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: -path.stat().st_mtime)


def by_age(folder: Path) -> list[Path]:
    return by_time(folder)[::-1]


def damage_all(folder: Path) -> None:
    for step in (1, 2, 3):
        flip(folder / f"checkpoint-{step}" / "optimizer.pt")


def named(bench: Bench) -> Outcome:
    run = bench.copy()
    flip(run.checkpoints / NEWEST / "optimizer.pt")
    return refused(lambda: checkpoints.choose_checkpoint(run.checkpoints / NEWEST, print))


def refused(call: Callable[[], object]) -> Outcome:
    """Return what a call says that is to be refused."""
    try:
        call()
    except SftPlayError as error:
        return Outcome(error.exit_class, str(error))
    return Outcome(0, "")


def without_a_fact(bench: Bench) -> Outcome:
    run = bench.copy()
    checkpoint = run.checkpoints / NEWEST
    facts = json.loads((checkpoint / "stamp.json").read_text())
    write_json(checkpoint / "stamp.json", {**facts, "data_digest": ""})
    seal.seal(checkpoint)
    return refused(lambda: stamp.read_stamp(checkpoint))


def weights(damage: Damage) -> Callable[[Bench], Outcome]:
    """Return an injection: trained weights are damaged, and are to be used."""

    def inject(bench):
        run = bench.copy()
        damage(run.weights("lora"))
        return refused(lambda: checked_weights(run, run.read_config()))

    return inject


def replaced(name: str, write: Callable[[Path], object]) -> Inject:
    """Return an injection: a file of a run is a link to one of the user."""

    def inject(bench):
        notes, path = bench.folder / "notes.txt", bench.folder / "run" / name
        notes.write_text("mine\n" * 1000)
        path.parent.mkdir(parents=True)
        path.symlink_to(notes)

        def written():
            with disk_errors_in_words():
                write(path)

        outcome = refused(written)
        assert notes.read_text() == "mine\n" * 1000, "a file of the user was written"
        return outcome

    return inject


def take_lock(path: Path) -> None:
    lock.take(path.parent, print)
    lock.release(path.parent)


def two_exports(bench: Bench) -> Outcome:
    """Two exports write one folder at once."""
    target = Target(bench.folder / "out", "export adapter", is_named=True)

    def second():
        with target.staged() as work:
            (work / FILES_OF_EXPORT).mkdir(exist_ok=True)

    with target.staged() as work:
        (work / FILES_OF_EXPORT).mkdir()
        (work / FILES_OF_EXPORT / "weights").write_text("of the first")
        outcome = refused(second)
    assert (bench.folder / "out" / "weights").exists(), "sealed without its weights"
    return outcome


def open_anything(path: Path, flags: int) -> int:
    return os.open(path, flags, 0o666)


LINKED = Guard("sft_play.runs.files:open_descriptor", open_anything)
LOCKED = Guard("sft_play.runs.lock:open_descriptor", open_anything)
IN_PLACE = tuple(
    Fault(
        f"link-{Path(name).name}",
        f"{name} in the folder of a run is a link to a file of the user",
        replaced(name, write),
        ExitClass.ENVIRONMENT,
        ("Too many levels of symbolic links", name, "put the file or folder itself there"),
        guard,
        5,
        is_quick=True,
    )
    for name, write, guard in (
        (lock.NAME, take_lock, LOCKED),
        ("metrics.jsonl", lambda path: metrics.append(path, MetricsLine(1, 2)), LINKED),
        ("logs/rank-0.log", lambda path: LogFile(path).close(), LINKED),
        ("logs/rank-0.stacks", lambda path: open_in_place(path, "w").close(), LINKED),
        ("a.jsonl.parts/0.jsonl", lambda path: AnswerShard(path).close(), LINKED),
    )
)
OTHERS = (
    *IN_PLACE,
    Fault(
        "two-exports",
        "two exports write one folder at once",
        two_exports,
        ExitClass.ENVIRONMENT,
        ("another command writes it now", "name another OUT="),
        Guard("sft_play.runs.lock:_lock", lambda *_: True),
        5,
        is_quick=True,
    ),
    Fault(
        "half-written",
        "a folder checkpoint-4 has only some of its files",
        resumed(half_written),
        ExitClass.DONE,
        ("checkpoint-4: MANIFEST.json is missing", "the next older one is taken"),
        SEALED,
        5,
        0,
        True,
    ),
    Fault(
        "leftovers",
        "a killed save has left its staging folder",
        leftovers,
        ExitClass.DONE,
        ("was half written", "it is removed now"),
        Guard("sft_play.runs.checkpoints:remove_leftovers", nothing),
        5,
        0,
        True,
    ),
    Fault(
        "clock-back",
        "the clock is set back by a year between saves; old checkpoints are removed",
        jumped(-1),
        ExitClass.DONE,
        (),
        Guard("sft_play.runs.checkpoints:listing", by_time),
        5,
        0,
        True,
    ),
    Fault(
        "clock-forward",
        "the clock jumps forward by years between saves; old checkpoints are removed",
        jumped(20),
        ExitClass.DONE,
        (),
        Guard("sft_play.runs.checkpoints:listing", by_age),
        5,
        0,
        True,
    ),
    Fault(
        "all-damaged",
        "every checkpoint has a flipped bit",
        resumed(damage_all),
        ExitClass.CHECKPOINT,
        ("has no complete checkpoint", "choose another run or start again"),
        SEALED,
        5,
        None,
        True,
    ),
    Fault(
        "named-damaged",
        "a checkpoint that is named itself has a flipped bit",
        named,
        ExitClass.CHECKPOINT,
        ("optimizer.pt has SHA-256", "continue with TRAIN_RESUME_FROM="),
        SEALED,
        5,
        None,
        True,
    ),
    Fault(
        "stamp-without-fact",
        "the stamp is edited: a fact is empty, and the folder sealed again",
        without_a_fact,
        ExitClass.CHECKPOINT,
        ("has no data_digest", "choose another checkpoint"),
        Guard("sft_play.runs.stamp:_lacking", lambda _: []),
        5,
        None,
        True,
    ),
    Fault(
        "flip-trained-weights",
        "one bit of the trained weights flips before they are used",
        weights(lambda folder: flip(folder / "adapter_model.safetensors")),
        ExitClass.CHECKPOINT,
        ("adapter_model.safetensors has SHA-256",),
        SEALED,
        5,
        None,
        True,
    ),
    Fault(
        "cut-trained-weights",
        "the trained weights are cut off",
        weights(lambda folder: os.truncate(folder / "adapter_model.safetensors", 100)),
        ExitClass.CHECKPOINT,
        ("adapter_model.safetensors has 100 bytes",),
        SEALED,
        5,
        None,
        True,
    ),
)


def fill_cache(folder: Path) -> None:
    folder.mkdir()
    for name in ("ids.bin", "trained.bin", "samples.bin"):
        (folder / name).write_bytes(bytes(range(256)) * 4)
    (folder / "meta.json").write_text('{"rows": 10}\n')


def cached(damage: Damage) -> Callable[[Bench], Outcome]:
    """Return an injection: tokenized rows are damaged, and a run asks for them again."""

    def inject(bench):
        root = bench.folder / "cache"
        entry = cache.get_or_build(root, "key", fill_cache)
        whole = {path.name: path.read_bytes() for path in entry.iterdir()}
        damage(entry)
        said: list[str] = []
        with patch.object(cache.logger, "warning", lambda text, *words: said.append(text % words)):
            entry = cache.get_or_build(root, "key", fill_cache)
        found = {path.name: path.read_bytes() for path in entry.iterdir()}
        assert found == whole, "a damaged entry is used"
        return Outcome(0, "; ".join(said))

    return inject


def huge_id(entry: Path) -> None:
    path = entry / "ids.bin"
    path.write_bytes(b"\xff\xff\xff\x7f" + path.read_bytes()[4:])


def of_cache(name: str, injected: str, damage: Damage, says: str) -> Fault:
    inject = cached(damage)
    says_all = (says, "are tokenized again")
    return Fault(name, injected, inject, ExitClass.DONE, says_all, SEALED, 5, None, True)


CACHE = (
    of_cache(
        "cache-flip-ids",
        "one bit of the tokenized rows flips",
        lambda entry: flip(entry / "ids.bin"),
        "ids.bin has SHA-256",
    ),
    of_cache(
        "cache-flip-mask",
        "one bit of the loss mask flips",
        lambda entry: flip(entry / "trained.bin"),
        "trained.bin has SHA-256",
    ),
    of_cache(
        "cache-huge-id", "a token id of 2^31 - 1 stands in the rows", huge_id, "ids.bin has SHA-256"
    ),
    of_cache(
        "cache-cut",
        "the records are cut off",
        lambda entry: os.truncate(entry / "samples.bin", 10),
        "samples.bin has 10 bytes",
    ),
    of_cache(
        "cache-no-meta",
        "a file of the entry is deleted",
        lambda entry: (entry / "meta.json").unlink(),
        "meta.json is missing",
    ),
    of_cache(
        "cache-edited",
        "the JSON of the entry is edited",
        lambda entry: (entry / "meta.json").write_text('{"rows": 11}\n'),
        "meta.json has SHA-256",
    ),
)


def pickled(bench: Bench) -> Outcome:
    folder = bench.folder / "base"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    config = RunFolder(bench.saved.path).read_config()
    model = config.model.model_copy(update={"name": str(folder)})
    return refused(lambda: refuse_unsafe_base(config.model_copy(update={"model": model})))


def pinned_code(bench: Bench) -> Outcome:
    config = RunFolder(bench.saved.path).read_config()
    changes = {"name": "org/name", "trust_remote_code": True, "revision": "main"}
    model = config.model.model_copy(update=changes)
    return refused(lambda: refuse_unsafe_base(config.model_copy(update={"model": model})))


BASE = (
    Fault(
        "pickled-base",
        "the base model's weights are a pickle",
        pickled,
        ExitClass.CONFIG,
        ("can run any code", "MODEL_ALLOW_PICKLED_WEIGHTS=true"),
        Guard("sft_play.runs.model_folder:pickled_weights", lambda _: []),
        5,
        None,
        True,
    ),
    Fault(
        "code-of-a-branch",
        "the base model brings code, at a branch that may move",
        pinned_code,
        ExitClass.CONFIG,
        ("may be other code tomorrow", "set MODEL_REVISION to the commit"),
        Guard("sft_play.runs.model_folder:COMMIT", re.compile("main")),
        5,
        None,
        True,
    ),
)
ROWS = (*DAMAGED, *OTHERS, *CACHE, *BASE)
