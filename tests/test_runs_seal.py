"""The seal of large files: a digest of each part, every damage found, older manifests read."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from sft_play.runs import seal
from sft_play.runs.files import json_text

PART = 100  # bytes of a part in these tests
SIZES = (0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 1, 7 * PART - 1)


@pytest.fixture
def parts(monkeypatch) -> None:
    """Parts that a test can look at one by one, read in blocks that do not divide them."""
    monkeypatch.setattr(seal, "PART_BYTES", PART)
    monkeypatch.setattr(seal, "READ_BYTES", 33)


def content_of(size: int) -> bytes:
    return bytes(index * 37 % 251 for index in range(size))


def sealed(folder: Path, **sizes: int) -> Path:
    """Return a sealed folder with files of these sizes."""
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(content_of(size))
    seal.seal(folder)
    return folder


def manifest(folder: Path) -> dict[str, dict]:
    return json.loads((folder / seal.NAME).read_text())["files"]


def write_manifest(folder: Path, files: dict[str, dict]) -> None:
    """Write a manifest that agrees with itself."""
    digest = hashlib.sha256(json_text(files).encode()).hexdigest()
    text = json_text({"files": files, "sha256_of_files": digest})
    (folder / seal.NAME).write_text(text)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_over_a_part_has_the_digest_of_each_and_any_other_has_its_own(tmp_path, parts, size):
    folder = sealed(tmp_path / "sealed", file=size)
    content = content_of(size)
    if size <= PART:
        expected = {"size": size, "sha256": sha256(content)}
    else:
        cut = [content[start : start + PART] for start in range(0, size, PART)]
        digests = [sha256(part) for part in cut]
        expected = {"size": size, "part_bytes": PART, "sha256_of_parts": digests}
    assert manifest(folder) == {"file": expected}
    assert seal.find_damage(folder) is None


@pytest.mark.skipif(shutil.which("split") is None, reason="no split of coreutils")
def test_split_and_sha256sum_say_what_the_manifest_says_of_a_large_file(tmp_path):
    folder = tmp_path / "sealed"
    folder.mkdir()
    with (folder / "optimizer.pt").open("wb") as file:
        file.truncate((64 << 20) + 5)
        file.write(b"begin")
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    seal.seal(folder)
    command = ["split", "-b", "64M", "--filter=sha256sum", str(folder / "optimizer.pt")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    digests = [line.split()[0] for line in said.splitlines()]
    assert manifest(folder)["optimizer.pt"]["sha256_of_parts"] == digests
    assert len(digests) == 2


@pytest.mark.parametrize("size", [size for size in SIZES if size > 0])
def test_a_flipped_bit_is_found_in_every_part_and_its_place_is_named(
    tmp_path, parts, monkeypatch, size
):
    monkeypatch.setattr(seal, "MIB", 10)
    folder = sealed(tmp_path / "sealed", after=2 * PART, file=size, small=5)
    content = content_of(size)
    for start in range(0, size, PART):
        end = min(start + PART, size)
        for position in {start, (start + end) // 2, end - 1}:
            flipped = bytearray(content)
            flipped[position] ^= 1 << position % 8
            (folder / "file").write_bytes(flipped)
            before, after = sha256(content[start:end])[:12], sha256(flipped[start:end])[:12]
            where = f" from {start // 10} MiB to " if size > PART else ""
            where += ("its end" if end == size else f"{end // 10} MiB") if where else ""
            assert seal.find_damage(folder) == (
                f"file has SHA-256 {after}{where}, and was sealed with {before}"
            )
    (folder / "file").write_bytes(content)
    assert seal.find_damage(folder) is None


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_was_cut_or_has_grown_is_found(tmp_path, parts, size):
    folder = sealed(tmp_path / "sealed", file=size)
    for other in {0, size - 1, size - PART, size + 1, size + PART} - {size}:
        if other < 0:
            continue
        (folder / "file").write_bytes(content_of(other))
        assert seal.find_damage(folder) == f"file has {other} bytes, and was sealed with {size}"


def test_a_folder_that_was_sealed_with_one_digest_for_a_large_file_is_whole(tmp_path, parts):
    folder = sealed(tmp_path / "sealed", file=5 * PART, small=3)
    content = content_of(5 * PART)
    files = manifest(folder)
    files["file"] = {"size": len(content), "sha256": sha256(content)}
    write_manifest(folder, files)
    assert seal.find_damage(folder) is None
    damaged = content[:-1] + b"\0"
    (folder / "file").write_bytes(damaged)
    assert seal.find_damage(folder) == (
        f"file has SHA-256 {sha256(damaged)[:12]}, and was sealed with {sha256(content)[:12]}"
    )


def test_a_folder_that_was_sealed_with_parts_of_another_size_is_whole(tmp_path, parts, monkeypatch):
    folder = sealed(tmp_path / "sealed", file=5 * PART)
    monkeypatch.setattr(seal, "PART_BYTES", PART // 3)
    assert seal.find_damage(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["sha256_of_parts"].pop(),
        lambda facts: facts["sha256_of_parts"].append("0" * 64),
        lambda facts: facts.update(part_bytes=0),
        lambda facts: facts.update(sha256="0" * 64),
        lambda facts: facts.clear(),
    ],
)
def test_a_manifest_that_does_not_say_what_a_file_was_is_not_used(tmp_path, parts, change):
    folder = sealed(tmp_path / "sealed", file=2 * PART + 1)
    files = manifest(folder)
    change(files["file"])
    write_manifest(folder, files)
    assert seal.find_damage(folder).startswith("MANIFEST.json cannot be used")


def test_a_file_that_ends_while_it_is_sealed_is_not_sealed(tmp_path, parts, monkeypatch):
    really = seal.digest_of

    def cut_then_read(part: seal.FileSlice) -> str:
        os.truncate(part.path, PART + 1)
        return really(part)

    monkeypatch.setattr(seal, "digest_of", cut_then_read)
    with pytest.raises(OSError, match="it ends 99 bytes early"):
        sealed(tmp_path / "sealed", file=2 * PART)
    assert not seal.is_sealed(tmp_path / "sealed")


@pytest.fixture
def two_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_the_parts_of_one_file_are_hashed_at_the_same_time(tmp_path, parts, two_cores, monkeypatch):
    together = threading.Barrier(2, timeout=10)
    really = seal.digest_of

    def digest_of(part: seal.FileSlice) -> str:
        together.wait()
        return really(part)

    monkeypatch.setattr(seal, "digest_of", digest_of)
    folder = sealed(tmp_path / "sealed", file=2 * PART)
    assert seal.find_damage(folder) is None
