"""Lists the image files of folders whose names are the images' classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vfl_common.errors import Code, InputError

_ENDINGS = (".jpeg", ".jpg", ".png")


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder, by name. Raises InputError if it cannot be listed."""
    return [Path(entry.path) for entry in _entries(folder) if entry.is_dir()]


def images_in(folder: Path) -> list[Path]:
    """Returns the JPEG and PNG files in a folder, by name; none if there is no such folder. Raises
    InputError if it cannot be listed.
    """
    if not folder.is_dir():
        return []
    entries = (entry for entry in _entries(folder) if entry.name.lower().endswith(_ENDINGS))
    return [Path(entry.path) for entry in entries if entry.is_file()]


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{folder}: cannot be listed ({error.strerror}). Make it readable."
        ) from None
