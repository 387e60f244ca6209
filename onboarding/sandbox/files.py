"""Reading what confined code left behind: plain files only, up to a size. Free of torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_left_behind(path: Path, limit: int) -> bytes:
    """The content of a file that untrusted code wrote.

    A link is not followed (it would be read with the caller's rights), a pipe or device is not waited for.

    Raises:
        OSError: no such file, a link, or not a plain file.
        ValueError: larger than ``limit`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a plain file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} is larger than {limit} bytes")
    return content
