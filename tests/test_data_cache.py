"""sft_play.data.cache: one entry for one content, whole or absent, whoever else wants it."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.config.schema import Config
from sft_play.data import cache
from sft_play.data.pipeline import build_run_data
from sft_play.errors import EnvironmentFault
from sft_play.runs import seal

KEY = "k"


def fill(folder: Path, text: str = "samples") -> None:
    folder.mkdir()
    (folder / "ids.bin").write_text(text)
    (folder / "meta.json").write_text("{}")


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    built = []
    for _ in range(2):
        folder = cache.get_or_build(tmp_path, KEY, lambda aside: (built.append(aside), fill(aside)))
        assert (folder / "ids.bin").read_text() == "samples"
    assert len(built) == 1 and built[0] != folder


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(aside: Path) -> None:
        fill(aside)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        cache.get_or_build(tmp_path, KEY, broken)
    assert [path.name for path in tmp_path.iterdir()] == [f".{KEY}.lock"]
    assert cache.get_or_build(tmp_path, KEY, fill).is_dir()


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file; its size and times stay."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(path: Path, bit: int) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def huge(path: Path, bit: int) -> None:
    """A token id of 2^31 - 1, for which an embedding would be asked."""
    path.write_bytes(b"\xff\xff\xff\x7f" + path.read_bytes()[4:])


def remove(path: Path, bit: int) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, huge, remove])
def test_a_damaged_entry_is_tokenised_again(
    tmp_path: Path, tokenizer, damage: Callable[[Path, int], None], caplog
) -> None:
    rows = tmp_path / "rows.jsonl"
    questions = (f"Is {number} more than 3?" for number in range(40))
    rows.write_text("".join(json.dumps({"question": q, "answer": "yes"}) + "\n" for q in questions))
    settings = {"train_path": str(rows), "cache_dir": str(tmp_path / "cache")}
    config = Config.model_validate({"model": {"max_seq_len": 64}, "data": settings})
    right = [sample.ids.tolist() for sample in build_run_data(config, tokenizer).train]
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    names = sorted(path.name for path in folder.iterdir() if path.stat().st_size)
    assert {"ids.bin", "trained.bin", "samples.bin", "meta.json", seal.NAME} <= set(names)
    for number, name in enumerate(names * 2):
        caplog.clear()
        damage(folder / name, 1009 * number)
        data = build_run_data(config, tokenizer).train
        assert [sample.ids.tolist() for sample in data] == right, name
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"the tokenised rows in {folder} are tokenised again: {name} ")


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    fill(tmp_path / f".{KEY}.left")
    fill(tmp_path / ".another.left")  # whose process may live
    cache.get_or_build(tmp_path, KEY, fill)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {KEY, ".another.left"}


def test_an_entry_that_is_not_complete_is_built_anew(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir(parents=True)
    (tmp_path / KEY / "ids.bin").write_text("half")
    assert (cache.get_or_build(tmp_path, KEY, fill) / "ids.bin").read_text() == "samples"


def _slow(root: str, log: str) -> None:
    def build(aside: Path) -> None:
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        fill(aside, str(os.getpid()))

    folder = cache.get_or_build(Path(root), KEY, build)
    assert seal.find_damage(folder) is None


def test_two_runs_at_once_share_one_build(tmp_path: Path) -> None:
    log = tmp_path / "log"
    runs = [
        multiprocessing.get_context("spawn").Process(
            target=_slow, args=(str(tmp_path / "cache"), str(log))
        )
        for _ in range(3)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert len(log.read_text().split()) == 1, "the others waited"


def test_a_run_that_is_killed_leaves_neither_an_entry_nor_a_lock_that_holds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = multiprocessing.get_context("spawn").Process(
        target=_slow, args=(str(tmp_path / "cache"), str(log))
    )
    run.start()
    while not log.exists():
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.join(60)
    assert not (tmp_path / "cache" / KEY).exists()
    assert (cache.get_or_build(tmp_path / "cache", KEY, fill) / "ids.bin").read_text() == "samples"


def test_the_content_of_files_counts_and_not_their_names(tmp_path: Path) -> None:
    one, moved = tmp_path / "a.jsonl", tmp_path / "elsewhere" / "b.jsonl"
    one.write_text("rows")
    moved.parent.mkdir()
    shutil.copy(one, moved)
    digest = cache.digest_files([one])
    assert cache.digest_files([moved]) == digest
    stat = one.stat()
    one.write_text("rowz")
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    assert cache.digest_files([one]) != digest
    assert cache.digest_files([one, moved]) != cache.digest_files([moved, one]), (
        "the order is that of the samples"
    )


def test_the_tokenizer_its_template_and_the_policy_are_in_the_key(tokenizer) -> None:
    plain = cache.digest_tokenizer(tokenizer, "a")
    assert cache.digest_tokenizer(tokenizer, "b") != plain
    keys = {
        cache.entry_key("rows", plain, {"max_seq_len": 8}),
        cache.entry_key("rows", plain, {"max_seq_len": 9}),
        cache.entry_key("other", plain, {"max_seq_len": 8}),
    }
    assert len(keys) == 3


def test_a_cache_folder_that_cannot_be_made_is_said_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"Not a directory; set DATA_CACHE_DIR") as error:
        cache.get_or_build(tmp_path / "file" / "cache", "key", lambda folder: folder.mkdir())
    assert error.value.exit_class == 13
