"""Plain file reading whose failures are sentences.

Does: opens a regular file, reads exact byte ranges with `pread`, and turns every way that this can fail (missing,
no permission, a directory, a device, a file that ends early, a full disk) into one `UserError`. Nothing is memory
mapped: a mapped page counts as resident memory, and a mapped file that somebody shortens kills the process.
Assumes: a local POSIX file system.
Leaves to others: what the bytes mean.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from equarx_serve.errors import UserError


@dataclass(frozen=True)
class OpenFile:
    """An open regular file: its path, descriptor and size in bytes at the time of opening."""

    path: Path
    descriptor: int
    size: int

    def read_into(self, offset: int, out: UInt8[np.ndarray, "bytes"]) -> None:
        """Fill `out` with the bytes from `offset` on; a file that ends before that is a `UserError`."""
        view = memoryview(out)
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise UserError(f"{self.path}: reading failed ({error.strerror}).") from error
            if got == 0:
                raise UserError(
                    f"{self.path}: the file ends early: {len(view)} bytes were expected from byte {offset} on, "
                    f"{done} are there (was it shortened while in use?)."
                )
            done += got

    def read(self, offset: int, count: int) -> UInt8[np.ndarray, "bytes"]:
        """`count` bytes from `offset` on. The caller has checked `count` against `size`."""
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out


@contextmanager
def open_regular(path: Path, expected: str) -> Iterator[OpenFile]:
    """Open `path` for reading; `expected` ("a GGUF file") ends the sentence when there is nothing to read.

    Raises `UserError` for a missing file, a directory, a device or pipe, a file without permission, and an empty one.
    """
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UserError(_why_not_opened(path, expected, error)) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path}: this is a directory; {expected} was expected.")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: this is a device or a pipe, not a regular file; {expected} was expected.")
        if status.st_size == 0:
            raise UserError(f"{path}: the file is empty; {expected} was expected.")
        yield OpenFile(path, descriptor, status.st_size)
    finally:
        os.close(descriptor)


def _why_not_opened(path: Path, expected: str, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path}: there is no such file; {expected} was expected."
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read this file."
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return f"{str(path)!r}: can't be opened ({reason}); {expected} was expected."


def why_not_cached(path: Path, error: OSError) -> str:
    """The sentence for a cache folder that failed: a full disk, a quota, a permission, or what the system said."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: no room is left on this disk (or in your quota): free some, or name another cache folder."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path}: no permission to use this cache folder: name another one."
    return f"{path}: this cache folder can't be used ({error.strerror or error})."
