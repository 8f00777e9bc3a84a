"""Tables of people: keyed digests (tags) of the ids to which the row numbers of a record refer.

A record has no ids. Only a reader who has the record's key and a person's id can find the person.
So the record shows what was sent about a person even after all files with ids have been deleted.
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
# The name of an incomplete file.
_UNNAMED = "unnamed"


def tag(secret: bytes, person: str) -> bytes:
    """Returns the tag of a person's id, which has ``TAG_BYTES`` bytes."""
    return blake2b(person.encode(), key=secret, digest_size=TAG_BYTES).digest()


def keep(folder: Path, secret: bytes, ids: Iterable[str]) -> tuple[str, int]:
    """Writes a file with the tags of ids, in the order of the ids.

    Returns the SHA-256 of the file, which is its name, and the number of ids. Raises InputError if
    the file cannot be written.
    """
    place = folder / FOLDER
    digest, count = sha256(), 0
    try:
        place.mkdir(exist_ok=True, mode=0o700)
        # Only one program writes at a time, so a killed program left the incomplete files.
        with lock_folder(place):
            for incomplete in place.glob(f"*{_UNNAMED}*"):
                incomplete.unlink()
            unnamed = place / _UNNAMED
            # The tags are written one by one, because those of a large table need much memory.
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
    """Returns the numbers of the rows that have the tag ``wanted``.

    ``digest``: The name of the file with the table of people. Raises InputError if the file was
    changed.
    """
    content = read(folder / FOLDER / digest, digest)
    tags = np.frombuffer(content, f"V{TAG_BYTES}")
    return np.flatnonzero(tags == np.void(wanted)).astype(np.int64)


def read(path: Path, digest: str) -> bytes:
    """Returns the concatenated tags in a file. Raises InputError if the file was changed."""
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
