"""Files that lie in a folder or in a tar archive of it."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.errors import Code, InputError

# The largest file that is read as a whole, in bytes; a batch of CIFAR has at most 154 MB.
_MAX_BYTES = 10**9

# Returns the content of the file of that name. It raises InputError if there is none.
Read = Callable[[str], bytes]


@contextmanager
def open_files(path: Path) -> Iterator[Read]:
    """Yields a function that reads files by their last name, from a folder or an archive.

    An archive is read from its beginning; files are faster in their order in it. Nothing is
    unpacked, so no path in it matters. Raises InputError.
    """
    if path.is_dir():
        yield lambda name: _whole(path / name)
        return
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}

            def read(name: str) -> bytes:
                file = archive.extractfile(members[name]) if name in members else None
                if file is None:
                    raise InputError(
                        Code.FILE_INVALID, f"{path}: holds no file {name}. Download it again."
                    )
                _refuse_large(f"{path}: {name}", members[name].size)
                return file.read()

            yield read
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read to the end. Download it again."
        ) from None


def _whole(path: Path) -> bytes:
    try:
        _refuse_large(str(path), path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Download it again."
        ) from None


def _refuse_large(name: str, size: int) -> None:
    if size > _MAX_BYTES:
        raise InputError(
            Code.FILE_INVALID,
            f"{name}: must have at most {_MAX_BYTES:,} bytes (got {size:,}). Download it again.",
        )
