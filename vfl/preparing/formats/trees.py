"""Lists the image files of folders whose names say what the images are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vfl_common.errors import Code, InputError

_ENDINGS = (".jpeg", ".jpg", ".png")


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder, by name. Raises InputError if it cannot be listed."""
    return [Path(each.path) for each in _listed(folder) if each.is_dir()]


def images_in(folder: Path) -> list[Path]:
    """Returns the JPEG and PNG files in a folder, by name; none if there is no such folder. Raises
    InputError if it cannot be listed.
    """
    if not folder.is_dir():
        return []
    found = (each for each in _listed(folder) if each.name.lower().endswith(_ENDINGS))
    return [Path(each.path) for each in found if each.is_file()]


def _listed(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(entries, key=lambda each: each.name)
    except OSError as error:
        text = f"{folder}: cannot be listed ({error.strerror}); make it readable"
        raise InputError(Code.FILE_INVALID, text) from None
