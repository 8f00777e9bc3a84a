"""Opens plain files, files compressed by gzip or bzip2, and members of zip and tar archives. Also
detects that a file is written or replaced while it is read.
"""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from vfl_common.config.sources import split_member
from vfl_party.data import checks

# The exceptions that opening or reading a damaged file can raise.
BROKEN = (
    OSError,
    EOFError,
    pa.ArrowException,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
)
_KINDS = {".gz": "gzip", ".bz2": "bz2"}


def open_bytes(source: str) -> Any:
    """Opens a file for Arrow. Its bytes are decompressed while they are read.

    Files whose names end in ``.gz`` or ``.bz2`` are decompressed, including members of archives.
    Raises InputError if an archive lacks the member, and an exception of ``BROKEN`` if a file is
    damaged.
    """
    path, member = split_member(source)
    compression = _KINDS.get(Path(source).suffix.lower())
    if member is not None:
        return pa.input_stream(_open_member(source, path, member), compression=compression)
    file = Path(path).open("rb")  # noqa: SIM115 - Arrow closes it, but cannot open names that are not UTF-8
    return pa.input_stream(file, compression=compression)


def _open_member(source: str, path: str, member: str) -> Any:
    if not path.lower().endswith(".zip"):
        return _open_tar_member(source, path, member)
    with zipfile.ZipFile(path) as archive:
        names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        if member not in names:
            raise _make_member_error(source, member, names)
        if names.count(member) > 1:
            raise checks.unreadable(
                source, f"the archive has several members {member!r}. Unpack the right one."
            )
        if archive.getinfo(member).flag_bits & 1:
            raise checks.unreadable(
                source, "is protected by a password. Unpack it, and give the unpacked file."
            )
        # The file stays open until the member is closed.
        return archive.open(member)


def _open_tar_member(source: str, path: str, member: str) -> Any:
    """Reads a tar archive from its beginning to the member, without unpacking it to the disk."""
    archive = tarfile.open(path, "r|*")  # noqa: SIM115 - it ends with its member
    names = []
    for entry in archive:
        name = entry.name.removeprefix("./")
        if entry.isfile() and name == member:
            return archive.extractfile(entry)
        if name == member:
            raise checks.unreadable(
                source, f"the member {member!r} is a link, a folder or a device. Name a file."
            )
        names.append(name)
    raise _make_member_error(source, member, names)


def _make_member_error(source: str, member: str, names: list[str]) -> Exception:
    return checks.unreadable(
        source,
        f"the archive has no member {member!r} (the nearest: {checks.nearest(member, names)}). "
        "Correct the member's name.",
    )


def members(path: str) -> list[str]:
    """Returns the names of the files in an archive. Raises an exception of ``BROKEN`` if it is
    damaged.
    """
    if path.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            return [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    with tarfile.open(path) as tar:
        return [entry.name.removeprefix("./") for entry in tar if entry.isfile()]


State = tuple[int, int, int]


def state_of(source: str) -> State:
    """Returns the inode, the size and the modification time of a file. Raises InputError if the
    file does not exist.
    """
    try:
        state = Path(split_member(source)[0]).stat()
    except OSError:
        raise checks.unreadable(
            source, "was deleted while it was read. Restore it, and start again."
        ) from None
    return state.st_ino, state.st_size, state.st_mtime_ns


@contextmanager
def require_unchanged(source: str, before: State) -> Iterator[None]:
    """Raises InputError if a file has changed before the block or during the block."""
    require_same(source, before)
    yield
    require_same(source, before)


def require_same(source: str, before: State) -> None:
    """Raises InputError if the state of a file differs from ``before``."""
    if state_of(source) != before:
        raise checks.unreadable(
            source, "was changed while it was read. Start again when nobody writes to it."
        )
