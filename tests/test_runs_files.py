"""Writes and renames on disks that refuse: network shares, FUSE, what is busy for a moment."""

import errno
import os
from typing import Any

import pytest

from sft_play.errors import EnvironmentFault, disk_errors_in_words, of_os_error
from sft_play.runs import files


def refusing(number: int, times: int, then: Any = lambda *given: None) -> Any:
    """Return a system call that fails with this number so many times."""
    left = [number] * times

    def call(*given: Any) -> None:
        if left:
            raise OSError(left.pop(), os.strerror(number))
        return then(*given)

    return call


@pytest.mark.parametrize("number", files.CANNOT_SYNC)
def test_a_disk_that_cannot_sync_is_written_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refusing(number, 9))
    files.write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"


def test_an_error_of_a_write_names_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO, 9))
    told = pytest.raises(EnvironmentFault, match=rf"^Input/output error: {tmp_path}/")
    with told, disk_errors_in_words():
        files.write_text(tmp_path / "a.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_busy_for_a_moment_is_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BUSY_SECONDS", 0.0)
    replace = os.replace
    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "replace", refusing(errno.EBUSY, 1, replace))
    files.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists()
    monkeypatch.setattr(os, "replace", refusing(errno.EBUSY, 2, replace))
    with pytest.raises(OSError, match="busy"):
        files.rename(tmp_path / "b", tmp_path / "c")


def test_an_error_of_a_socket_is_not_taken_for_one_of_a_disk():
    for number in (errno.ETIMEDOUT, errno.ENOTCONN, errno.EINVAL):
        assert of_os_error(OSError(number, os.strerror(number))) is None
        said = str(of_os_error(OSError(number, os.strerror(number), "/runs/a")))
        assert said.startswith(f"{os.strerror(number)}: /runs/a; ")
