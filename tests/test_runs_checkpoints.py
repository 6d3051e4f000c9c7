"""Sealed checkpoints: published whole, every damage found and named, rotated by step."""

import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError, ExitClass
from sft_play.runs import checkpoints, seal

FILES = {
    "adapter_model.safetensors": b"weights" * 500,
    "optimizer.pt": b"moments" * 900,
    "scheduler.pt": b"schedule",
    "rng_state.pth": b"random",
    "trainer_state.json": b'{"global_step": 5}\n',
    "stamp.json": b'{"backend": "bnb"}\n',
    "divided_optimizer/.metadata": b"parts",
    "divided_optimizer/__0_0.distcp": b"part" * 100,
}


def publish(folder: Path, step: int, content: bytes = b"") -> Path:
    """Publish a checkpoint as a run does."""
    staged = folder / checkpoints.STAGING / f"checkpoint-{step}"
    for name, text in FILES.items():
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text + content)
    checkpoints.publish(staged, folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{step}"


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    """Two checkpoints of a run, the older one first."""
    return publish(tmp_path / "checkpoints", 20), publish(tmp_path / "checkpoints", 40)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_whole_checkpoint_is_chosen(two, tmp_path):
    (tmp_path / "checkpoints" / "checkpoint-x").mkdir()
    said: list[str] = []
    for path in (tmp_path, tmp_path / "checkpoints", two[1]):
        assert checkpoints.choose_checkpoint(path, said.append) == two[1]
    assert checkpoints.choose_checkpoint(two[0], said.append) == two[0]
    assert not said and names_in(two[1].parent) == [
        "checkpoint-20",
        "checkpoint-40",
        "checkpoint-x",
    ]


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", [*FILES, seal.NAME])
def test_every_flipped_bit_is_found_and_named_and_the_older_checkpoint_is_taken(
    two, tmp_path, name
):
    older, newest = two
    path = newest / name
    content = path.read_bytes()
    bits = random.Random(name)
    for _ in range(8):
        bit = bits.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        said: list[str] = []
        assert checkpoints.choose_checkpoint(tmp_path, said.append) == older
        assert len(said) == 1 and said[0].startswith(f"{newest}: {name} "), said
        assert said[0].endswith(
            "; it is checkpoint-40.corrupt now, and the next older one is taken"
        )
        aside = newest.with_name("checkpoint-40.corrupt")
        assert (aside / name).read_bytes() == flipped, "nothing is deleted"
        aside.rename(newest)
    path.write_bytes(content)
    assert checkpoints.choose_checkpoint(tmp_path, said.append) == newest


def edit_the_list(newest: Path) -> None:
    """Change a file and its digest in the manifest."""
    path = newest / "scheduler.pt"
    manifest = newest / seal.NAME
    before = digest_of(path)
    path.write_bytes(b"Schedule")
    manifest.write_text(manifest.read_text().replace(before, digest_of(path)))


SPOILED = {
    "optimizer.pt has 100 bytes, and was sealed with 6300": (
        lambda newest: os.truncate(newest / "optimizer.pt", 100)
    ),
    "rng_state.pth is missing": lambda newest: (newest / "rng_state.pth").unlink(),
    "MANIFEST.json is missing": lambda newest: (newest / seal.NAME).unlink(),
    "optimizer.pt has SHA-256 ": lambda newest: (newest / "optimizer.pt").write_bytes(b"M" * 6300),
    "scaler.pt is not in MANIFEST.json": lambda newest: (newest / "scaler.pt").touch(),
    "MANIFEST.json cannot be used (it is not as it was written)": edit_the_list,
}


@pytest.mark.parametrize("damage", SPOILED)
def test_a_file_that_is_not_the_one_that_was_sealed_is_named(two, tmp_path, damage):
    SPOILED[damage](two[1])
    said: list[str] = []
    assert checkpoints.choose_checkpoint(tmp_path, said.append) == two[0]
    assert said[0].startswith(f"{two[1]}: {damage}"), said


def test_large_files_are_measured_alone_where_they_are_not_to_be_read(tmp_path):
    staged = tmp_path / checkpoints.STAGING / "checkpoint-1"
    staged.mkdir(parents=True)
    (staged / "large").write_bytes(bytes(seal.SMALL_BYTES + 1))
    (staged / "small").write_bytes(bytes(seal.SMALL_BYTES))
    checkpoints.publish(staged, tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "large").write_bytes(b"x" * (seal.SMALL_BYTES + 1))
    assert seal.find_damage(tmp_path / "checkpoint-1", reads_all=False) is None
    assert seal.find_damage(tmp_path / "checkpoint-1").startswith("large has SHA-256")
    (tmp_path / "checkpoint-1" / "small").write_bytes(b"x" * seal.SMALL_BYTES)
    damage = seal.find_damage(tmp_path / "checkpoint-1", reads_all=False)
    assert damage.startswith("small has SHA-256")


def test_a_damaged_checkpoint_that_was_named_is_refused_with_the_one_to_take(two):
    (two[1] / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.choose_checkpoint(two[1], print)
    assert caught.value.exit_class == ExitClass.CHECKPOINT
    assert str(caught.value).startswith(f"{two[1]}: scheduler.pt is missing")
    assert str(caught.value).endswith(f"TRAIN_RESUME_FROM={two[0]}")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    two, tmp_path, monkeypatch, is_named
):
    def refuse(part: seal.FileSlice) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(part.path))

    monkeypatch.setattr(seal, "digest_of", refuse)  # root may read everything
    with pytest.raises(PermissionError, match="adapter_model"):
        checkpoints.choose_checkpoint(two[1] if is_named else tmp_path, print)
    assert names_in(two[1].parent) == ["checkpoint-20", "checkpoint-40"], "nothing is set aside"
    damage = seal.find_damage(two[1])
    assert damage == "adapter_model.safetensors cannot be read (Permission denied)"


def test_a_file_on_a_broken_place_of_the_disk_makes_way_for_the_older_checkpoint(
    two, tmp_path, monkeypatch
):
    really = seal.digest_of

    def break_off(part: seal.FileSlice) -> str:
        if part.path == two[1] / "optimizer.pt":
            raise OSError(errno.EIO, "Input/output error", str(part.path))
        return really(part)

    monkeypatch.setattr(seal, "digest_of", break_off)
    said: list[str] = []
    assert checkpoints.choose_checkpoint(tmp_path, said.append) == two[0]
    assert said[0].startswith(f"{two[1]}: optimizer.pt cannot be read (Input/output error); it is ")


def test_where_every_checkpoint_is_damaged_all_are_named(two, tmp_path):
    for path in two:
        (path / "scheduler.pt").unlink()
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoints.choose_checkpoint(tmp_path / "missing", print)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        checkpoints.choose_checkpoint(tmp_path, said.append)
    assert len(said) == 2
    assert names_in(tmp_path / "checkpoints") == ["checkpoint-20.corrupt", "checkpoint-40.corrupt"]


def test_what_is_published_again_replaces_what_was_there_and_leaves_nothing(two):
    publish(two[1].parent, 40, b"again")
    assert (two[1] / "scheduler.pt").read_bytes() == b"scheduleagain"
    assert seal.find_damage(two[1]) is None
    assert names_in(two[1].parent) == ["checkpoint-20", "checkpoint-40"]


def test_leftovers_of_a_killed_save_are_removed_with_a_line(two):
    folder = two[0].parent
    staged = folder / checkpoints.STAGING / "checkpoint-60"
    staged.mkdir(parents=True)
    (staged / "optimizer.pt").write_bytes(b"half")
    said: list[str] = []
    checkpoints.remove_leftovers(folder, said.append)
    assert said[0].startswith(f"{staged} ")
    assert names_in(folder) == ["checkpoint-20", "checkpoint-40"]
    checkpoints.remove_leftovers(folder, said.append)
    assert len(said) == 1


# Rotation


@pytest.mark.parametrize(
    ("limit", "best", "pinned", "kept"),
    [
        (None, None, None, [9, 10, 100, 200]),
        (1, None, None, [200]),
        (2, None, None, [100, 200]),
        (9, None, None, [9, 10, 100, 200]),
        (2, 10, None, [10, 200]),
        (1, 10, None, [10, 200]),
        (3, 9, None, [9, 100, 200]),
        (1, None, 9, [9, 200]),
        (2, 10, 9, [9, 10, 200]),
    ],
)
def test_rotation_counts_steps_and_keeps_the_newest_the_best_and_the_pinned(
    tmp_path, limit, best, pinned, kept
):
    for age, step in enumerate((200, 100, 10, 9)):
        path = publish(tmp_path, step)
        moment = 2_000_000_000 - 1_000_000 * (4 - age)  # the clock went back: 200 is the oldest
        os.utime(path, (moment, moment))
    if pinned is not None:
        (tmp_path / f"checkpoint-{pinned}" / "pinned").touch()
    checkpoints.rotate(tmp_path, limit, best)
    assert names_in(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


def test_rotation_leaves_what_was_set_aside_and_what_is_not_sealed(two, tmp_path):
    folder = two[0].parent
    (folder / "checkpoint-10.corrupt").mkdir()
    (folder / "checkpoint-99").mkdir()
    (folder / "notes").mkdir()
    assert checkpoints.rotate(folder, 1) == [two[0]]
    assert names_in(folder) == ["checkpoint-10.corrupt", "checkpoint-40", "checkpoint-99", "notes"]
