"""Opens files as they lie on disk: as they are, packed by gzip or bzip2, as members of a zip
file.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from vfl_common.config.sources import divided
from vfl_party.data import checks

# What opening and reading a packed file can raise, if it is damaged.
BROKEN = (
    OSError,
    EOFError,
    pa.ArrowException,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
)
_KINDS = {".gz": "gzip", ".bz2": "bz2"}


def open_bytes(source: str) -> Any:
    """Opens a file for Arrow to read, as bytes that are unpacked while they are read.

    A name that ends in ``.gz`` or ``.bz2`` says that it is packed, also within a zip file. Raises
    InputError if a zip file has no such member, and one of ``BROKEN`` if a file is damaged.
    """
    path, member = divided(source)
    compression = _KINDS.get(Path(source).suffix.lower())
    if member is not None:
        return pa.input_stream(_open_member(source, path, member), compression=compression)
    file = Path(path).open("rb")  # noqa: SIM115 - Arrow closes it; it cannot open a name that is not UTF-8
    return pa.input_stream(file, compression=compression)


def _open_member(source: str, path: str, member: str) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = [each.filename for each in archive.infolist() if not each.is_dir()]
        if member not in names:
            what = f"the zip file has no member {member!r}; the nearest"
            raise checks.unreadable(source, f"{what}: {checks.nearest(member, names)}")
        if archive.getinfo(member).flag_bits & 1:
            raise checks.unreadable(
                source, "is locked with a password; unpack it, and give the file"
            )
        # The file stays open until the member is closed.
        return archive.open(member)
