"""sft_play.data.cache: one entry for one content, complete or absent, whoever else wants it."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from sft_play.data import cache

KEY = "k"


def fill(folder: Path, text: str = "samples") -> None:
    folder.mkdir()
    (folder / "ids.bin").write_text(text)
    (folder / cache.COMPLETE).write_text("{}")


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
    assert (folder / cache.COMPLETE).is_file()


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
