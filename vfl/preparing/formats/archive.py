"""Files that lie in a folder or in a tar archive of it."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vfl_common.errors import Code, InputError

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
                return found.read()

            yield read
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        text = f"{path}: cannot be read to its end; get it from its makers again"
        raise InputError(Code.FILE_INVALID, text) from None


def _whole(path: Path) -> bytes:
    try:
        file: IO[bytes]
        with path.open("rb") as file:
            return file.read()
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror}); get it from its makers"
        raise InputError(Code.FILE_INVALID, text) from None
