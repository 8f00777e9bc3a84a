"""Whose rows the numbers of rows mean: a keyed digest for each id, so that a record holds no ids.

Only a reader with the record's key and the id finds a person in it: the record can say what left
about a person even after all files with ids are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.files import fsync_folder, lock_folder, private_file, write_error

FOLDER = "people"
TAG_BYTES = 16
# The name of a file that is being written.
_UNNAMED = "unnamed"


def tag(secret: bytes, person: str) -> bytes:
    """Returns the digest of an id, ``TAG_BYTES`` long."""
    return blake2b(person.encode(), key=secret, digest_size=TAG_BYTES).digest()


def keep(folder: Path, secret: bytes, ids: Iterable[str]) -> tuple[str, int]:
    """Writes the tags of ids, in their order. Returns the file's SHA-256, which names it, and how
    many there are. Raises InputError.
    """
    place = folder / FOLDER
    digest, count = sha256(), 0
    try:
        place.mkdir(exist_ok=True, mode=0o700)
        # One program at a time, so that what is there was left by one that was killed.
        with lock_folder(place):
            for left in place.glob(f"*{_UNNAMED}*"):
                left.unlink()
            unnamed = place / _UNNAMED
            # Written piece by piece: all tags of a large table need much memory.
            with private_file(unnamed) as file:
                for person in ids:
                    data = tag(secret, person)
                    digest.update(data)
                    file.write(data)
                    count += 1
            # An existing file is replaced, because it may be damaged.
            unnamed.replace(place / digest.hexdigest())
            fsync_folder(place)
    except OSError as error:
        raise write_error(place, error) from None
    return digest.hexdigest(), count


def rows_of(folder: Path, digest: str, wanted: bytes) -> npt.NDArray[np.int64]:
    """Returns the numbers of the rows of a person, whose tag is ``wanted``. Raises InputError if
    the file was changed.
    """
    data = read(folder / FOLDER / digest, digest)
    tags = np.frombuffer(data, f"V{TAG_BYTES}")
    return np.flatnonzero(tags == np.void(wanted)).astype(np.int64)


def read(path: Path, digest: str) -> bytes:
    """Returns the tags of a file, one after the other. Raises InputError if it was changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Restore it from a copy."
        ) from None
    if sha256(data).hexdigest() != digest:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: its SHA-256 is not the one in the record. Restore it from a copy.",
        )
    return data
