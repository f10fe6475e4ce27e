"""Small files that are only ever replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Make `data` the content of `path`; after a crash it holds either the old or the new bytes, whole.

    Args:
        path: may be there or not; its directory must be.
        data: is small: it is written, and waited for, at once.
        mode: of the file, less what the process masks.
        durable: wait for the disk. Without it a crash of the machine, not one of the process, may lose old and new.

    Raises:
        OSError: the disk refuses; `path` is whole all the same, and nothing is left beside it.
    """
    temporary = path.with_name(f".partial-{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
