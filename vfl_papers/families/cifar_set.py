"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in all forms in which they are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from vfl_papers.dataset import TEST, TRAIN, Array, Content, Files, Form, Need, Request, blocks_of
from vfl_papers.formats.archive import Read, open_files
from vfl_papers.formats.cifar import read_binary, read_python

ROWS = {TRAIN: 50_000, TEST: 10_000}

_ReadOne = Callable[[str, bytes], tuple[Array, Array]]


@dataclass(frozen=True)
class CifarVersion:
    """A version as it is published: an archive and the folder in it.

    ``train``: the files of training rows; ``read``: reads one.
    """

    archive: Need
    folder: str
    train: tuple[str, ...]
    test: str
    read: _ReadOne


def python_version(
    archive: Need, folder: str, train: Sequence[str], test: str, key: str
) -> CifarVersion:
    """Returns the Python version, whose pickles have their labels under ``key``."""
    return CifarVersion(archive, folder, tuple(train), test, partial(_python, key))


def binary_version(
    archive: Need, folder: str, train: Sequence[str], test: str, labels: int
) -> CifarVersion:
    """Returns the binary version, whose rows begin with so many labels."""
    return CifarVersion(archive, folder, tuple(train), test, partial(_binary, labels))


def forms(versions: Sequence[CifarVersion], classes: tuple[str, ...]) -> tuple[Form, ...]:
    """Returns the forms of the versions, as archives and unpacked."""
    result = []
    for version in versions:
        for need in (version.archive, Need(version.folder, folder=True)):
            result.append(Form((need,), partial(_read, version, need.name, classes), ROWS))
    return tuple(result)


def _python(key: str, name: str, data: bytes) -> tuple[Array, Array]:
    return read_python(name, data, key)


def _binary(labels: int, name: str, data: bytes) -> tuple[Array, Array]:
    return read_binary(name, data, labels)


def _read(
    version: CifarVersion, need: str, classes: tuple[str, ...], files: Files, _: Request
) -> Content:
    with open_files(files[need]) as read:
        return contents(
            [_some(read, version, version.train), _some(read, version, (version.test,))], classes
        )


def _some(read: Read, version: CifarVersion, names: Sequence[str]) -> tuple[Array, Array]:
    pairs = [version.read(name, read(name)) for name in names]
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def contents(parts: Sequence[tuple[Array, Array]], classes: tuple[str, ...]) -> Content:
    """Returns images and labels of training and of testing as one."""
    labels = [own for _, own in parts]
    splits = np.repeat(np.array([TRAIN, TEST], object), [len(part) for part in labels])
    images = np.concatenate([own for own, _ in parts])
    return Content(np.concatenate(labels), splits, blocks_of(images), classes=classes)
