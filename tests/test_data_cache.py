"""sft_play.data.cache: one entry for one content, whole or absent, whoever else wants it."""

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
from record_files import run_data, write_rows

from sft_play.data import cache
from sft_play.data.files import digest_files
from sft_play.errors import EnvironmentFault
from sft_play.runs import seal

KEY = "k"


def fill(folder: Path, text: str = "samples") -> None:
    folder.mkdir()
    (folder / "ids.bin").write_text(text)
    (folder / "meta.json").write_text("{}")


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
def test_a_damaged_entry_is_tokenized_again(tmp_path, tokenizer, damage, caplog):
    rows = tmp_path / "rows.jsonl"
    questions = (f"Is {number} more than 3?" for number in range(40))
    write_rows(rows, *({"question": question, "answer": "yes"} for question in questions))
    right = [sample.ids.tolist() for sample in run_data(rows, tokenizer).train]
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    names = sorted(path.name for path in folder.iterdir() if path.stat().st_size)
    assert {"ids.bin", "trained.bin", "samples.bin", "meta.json", seal.NAME} <= set(names)
    for number, name in enumerate(names):
        caplog.clear()
        damage(folder / name, 1009 * number)
        data = run_data(rows, tokenizer).train
        assert [sample.ids.tolist() for sample in data] == right, name
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"the tokenized rows in {folder} are tokenized again: {name} ")


def test_what_a_killed_build_left_is_removed(tmp_path):
    fill(tmp_path / f".{KEY}.left")
    fill(tmp_path / ".another.left")  # whose process may live
    cache.get_or_build(tmp_path, KEY, fill)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {KEY, ".another.left"}


def _slow(root: str, log: str) -> None:
    def build(aside: Path) -> None:
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        fill(aside, str(os.getpid()))

    folder = cache.get_or_build(Path(root), KEY, build)
    assert seal.find_damage(folder) is None


def test_two_runs_at_once_share_one_build(tmp_path):
    log = tmp_path / "log"
    runs = [
        multiprocessing.get_context("fork").Process(
            target=_slow, args=(str(tmp_path / "cache"), str(log))
        )
        for _ in range(2)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0, 0]
    assert len(log.read_text().split()) == 1, "the others waited"


def test_the_content_of_files_counts_and_not_their_names(tmp_path):
    one, moved = tmp_path / "a.jsonl", tmp_path / "elsewhere" / "b.jsonl"
    one.write_text("rows")
    moved.parent.mkdir()
    shutil.copy(one, moved)
    digest = digest_files([one])
    assert digest_files([moved]) == digest
    stat = one.stat()
    one.write_text("rowz")
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    assert digest_files([one]) != digest
    assert digest_files([one, moved]) != digest_files([moved, one]), (
        "the order is that of the samples"
    )


def test_a_cache_folder_that_cannot_be_made_is_said_with_what_to_type(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"Not a directory; set DATA_CACHE_DIR") as error:
        cache.get_or_build(tmp_path / "file" / "cache", "key", lambda folder: folder.mkdir())
    assert error.value.exit_class == 13
