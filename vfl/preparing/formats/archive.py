"""Files that lie in a folder or in a tar archive of it."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.errors import Code, InputError

# Bytes of a file that is read as a whole; a batch of CIFAR has 154 MB at most.
_MOST = 10**9

# The content of the file of that name. It raises InputError if there is none.
Read = Callable[[str], bytes]


@contextmanager
def opened(path: Path) -> Iterator[Read]:
    """Yields what reads files by their last name, from a folder or from the files of an archive.

    An archive is read from its beginning for files in their order in it; nothing is unpacked, so
    no path in it matters. Raises InputError.
    """
    if path.is_dir():
        yield lambda name: _whole(path / name)
        return
    try:
        with tarfile.open(path) as archive:
            members = {Path(each.name).name: each for each in archive if each.isfile()}

            def read(name: str) -> bytes:
                found = archive.extractfile(members[name]) if name in members else None
                if found is None:
                    text = f"{path}: holds no file {name}; get it from its makers again"
                    raise InputError(Code.FILE_INVALID, text)
                _refuse_large(f"{path}: {name}", members[name].size)
                return found.read()

            yield read
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        text = f"{path}: cannot be read to its end; get it from its makers again"
        raise InputError(Code.FILE_INVALID, text) from None


def _whole(path: Path) -> bytes:
    try:
        _refuse_large(str(path), path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror}); get it from its makers"
        raise InputError(Code.FILE_INVALID, text) from None


def _refuse_large(name: str, size: int) -> None:
    if size > _MOST:
        text = f"{name}: has {size:,} bytes, more than any file of the data set"
        raise InputError(Code.FILE_INVALID, f"{text}; get it from its makers again")
