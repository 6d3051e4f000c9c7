"""The class of what the system refuses."""

import errno
import os

import pytest

from sft_play.errors import ExitClass, of_os_error

# What the manual pages of open, read, write, fsync, truncate, flock, rename, link, unlink, mkdir,
# rmdir and fork name, without wrong calls (EBADF, EFAULT) and what Python repeats (EINTR)
REFUSALS = """
EACCES EAGAIN EBUSY EDQUOT EEXIST EFBIG EINVAL EIO EISDIR ELOOP EMFILE EMLINK ENAMETOOLONG ENFILE
ENODEV ENOLCK ENOMEM ENOSPC ENOSYS ENOTDIR ENOTEMPTY ENOTSUP ENXIO EOVERFLOW EPERM EROFS ESTALE
ETXTBSY EXDEV
""".split()
CLASSES = {
    "EDQUOT": ExitClass.DISK_FULL,
    "ENOSPC": ExitClass.DISK_FULL,
    "ENOMEM": ExitClass.OUT_OF_MEMORY,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_system_refuses_has_a_class_and_names_its_paths(name):
    number = getattr(errno, name)
    text = os.strerror(number)
    known = of_os_error(OSError(number, text, "/run/from", None, "/run/to"))
    assert known is not None and known.exit_class == CLASSES.get(name, ExitClass.ENVIRONMENT)
    assert str(known).startswith(f"{text}: /run/from to /run/to; ")
    assert " to " not in str(of_os_error(OSError(number, text, "/run/from"))).partition(";")[0]
