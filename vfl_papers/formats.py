"""Readers of official image files, which trust nothing that the files say about themselves."""

from __future__ import annotations

import io
import lzma
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vfl_common.errors import Code, InputError
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    Array,
    Block,
    Content,
    Rows,
    blocks_of,
    damage_error,
    split_into_blocks,
)

Pixels = npt.NDArray[np.uint8]
# Returns the content of the file of that name. Raises InputError if there is none.
ReadFile = Callable[[str], bytes]
# Images [N, …] and labels [N].
Images = tuple[Array, Array]
# The largest file that is read as a whole, in bytes. A batch of CIFAR has at most 154 MB.
_MAX_BYTES = 10**9
# The number of values of a CIFAR image: red, green and blue of 32 × 32.
_CIFAR_VALUES = 3 * 32 * 32
_ENDINGS = (".jpeg", ".jpg", ".png")
# The columns of a table of JPEG images.
_JPEG_COLUMNS = ("id", "jpeg", "label", "part")
# The largest ratio of length to width of an image, which is scaled by its shorter side.
_MAX_RATIO = 50
# PIL's modes with more than 8 bits. PIL clips their values at 255.
_DEEP_MODES = ("I", "F")


def folders_in(folder: Path) -> list[Path]:
    """Returns the subfolders of a folder, sorted by name. Raises InputError."""
    return [Path(entry.path) for entry in _list_entries(folder) if entry.is_dir()]


def images_in(folder: Path) -> list[Path]:
    """Returns the JPEG and PNG files in a folder, sorted by name; [] if the folder does not exist.
    Raises InputError if the folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    entries = (entry for entry in _list_entries(folder) if entry.name.lower().endswith(_ENDINGS))
    return [Path(entry.path) for entry in entries if entry.is_file()]


def _list_entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{folder}: cannot be listed ({error.strerror}). Make it readable."
        ) from None


@contextmanager
def open_files(path: Path) -> Iterator[ReadFile]:
    """Yields a function that reads files by name, from a folder or from a tar archive of it.

    Reading in the order of the archive is fastest. Nothing is unpacked, so the paths in the archive
    are harmless. Raises InputError.
    """
    if path.is_dir():
        yield lambda name: _read_whole(path / name)
        return
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}

            def read(name: str) -> bytes:
                file = archive.extractfile(members[name]) if name in members else None
                if file is None:
                    raise damage_error(path, f"holds no file {name}")
                _refuse_large(f"{path}: {name}", members[name].size)
                return file.read()

            yield read
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        raise damage_error(path, "cannot be read to the end") from None


def _read_whole(path: Path) -> bytes:
    try:
        _refuse_large(str(path), path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise damage_error(path, f"cannot be read ({error.strerror})") from None


def _refuse_large(name: str, size: int) -> None:
    if size > _MAX_BYTES:
        raise damage_error(name, f"must have at most {_MAX_BYTES:,} bytes (got {size:,})")


def join_splits(parts: Sequence[Images], classes: tuple[str, ...] = ()) -> Content:
    """Returns the training images and the test images as one data set.

    Args:
        parts: Images, uint8 [N, …], and labels, [N], of the training split and the test split.
        classes: The names of the classes.
    """
    labels = [own for _, own in parts]
    splits = np.repeat(np.array([TRAIN, TEST], object), [len(part) for part in labels])
    images = np.concatenate([own for own, _ in parts])
    numbers = np.concatenate(labels).astype(np.int64)
    return Content(numbers, splits, blocks_of(images), classes=classes)


def read_cifar_binary(labels: int, name: str, data: bytes) -> Images:
    """Returns images [N, 32, 32, 3] and labels [N] of a file of CIFAR's binary version.

    A row is ``labels`` bytes, the last of which is the class, and 3,072 pixels. Raises InputError.
    """
    size = labels + _CIFAR_VALUES
    if not data or len(data) % size:
        raise damage_error(name, f"must have a multiple of {size:,} bytes (got {len(data):,})")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return _arrange_cifar(rows[:, labels:]), rows[:, labels - 1].astype(np.int64)


def read_cifar_pickle(key: str, name: str, data: bytes) -> Images:
    """Returns images [N, 32, 32, 3] and labels [N] of a pickle of CIFAR's Python version, which has
    the labels under ``key``.

    Only plain values and the bytes of an array are unpickled. Raises InputError.
    """
    try:
        batch = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        pixels = batch[b"data"].array()
        classes = batch[key.encode()]
        # Nested lists could repeat the same row without end.
        if type(classes) is not list or not all(type(label) is int for label in classes):
            raise ValueError("no labels")
        labels = np.array(classes, np.int64)
        if pixels.shape != (len(labels), _CIFAR_VALUES):
            raise ValueError("shapes differ")
    # A damaged pickle may fail with any exception.
    except Exception:  # noqa: BLE001
        raise damage_error(name, "not a batch of CIFAR's Python version") from None
    return _arrange_cifar(pixels), labels


def _arrange_cifar(pixels_NP: Array) -> Array:
    """Returns images [N, 32, 32, 3] from [N, 3072], which has all red values first, then green,
    then blue.
    """
    return np.ascontiguousarray(pixels_NP.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


class _PickledArray:
    """Stands for a pickled NumPy array. Only its bytes and its shape are used."""

    _state: tuple[Any, ...]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> Array:
        """Returns the array. Raises ValueError or TypeError if it does not hold bytes."""
        _, shape, dtype, fortran, raw = self._state
        if not isinstance(dtype, _PickledType) or dtype.name not in (b"u1", "u1"):
            raise ValueError("no bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _PickledType:
    """Stands for the pickled type of an array. Only its name is used."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None: ...


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values, with our classes in place of NumPy's, which accept anything."""

    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        known = {
            "_reconstruct": lambda *_: _PickledArray(),
            "ndarray": _PickledArray,
            "dtype": _PickledType,
        }
        if root == "numpy" and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_idx_pair(images: Path, labels: Path) -> Images:
    """Returns images [N, H, W] and labels [N] of two IDX files. Raises InputError."""
    pixels, classes = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise InputError(
            Code.FILE_INVALID,
            f"{images}: holds {len(pixels):,} images, and {labels.name} {len(classes):,} labels. "
            "Download both again.",
        )
    return pixels, classes


def _read_idx(path: Path, dims: int) -> Array:
    """Returns the array of an IDX file. Raises InputError unless it has bytes in ``dims``
    dimensions.
    """
    # These import torch, which a list of data sets does not need.
    from vfl_common.config.data import DataSettings
    from vfl_party.data.row_arrays import Space
    from vfl_party.data.sources.arrays import read_array

    array = read_array(str(path), Space.of(DataSettings(source=str(path))))
    if array.dtype != np.uint8 or array.ndim != dims:
        raise damage_error(
            path, f"must hold bytes in {dims} dimensions (got {array.dtype} in {array.ndim})"
        )
    return array


def read_svhn(path: Path) -> Images:
    """Returns images [N, 32, 32, 3] and digits [N] of a MAT file of SVHN, in which class 10 is the
    digit 0. Raises InputError.
    """
    # This imports torch, which a list of data sets does not need.
    from vfl_party.data.sources.arrays import read_variables

    images, labels = read_variables(str(path), ("X", "y"))
    fits = images.dtype == np.uint8 and images.shape[1:] == (32, 32, 3)
    if not fits or labels.shape != images.shape[:1]:
        raise damage_error(
            path, "`X` must be bytes [32, 32, 3, N], and `y` the class of each image"
        )
    return images, np.where(labels == 10, 0, labels).astype(np.int64)


def read_npz(path: Path) -> Content:
    """Reads the arrays ``images``, uint8 [N, H, W] or [N, H, W, C], and ``labels``, integers [N].
    Raises InputError.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not an NPZ file of plain arrays `images` and `labels`. Write it again.",
        ) from None
    fits = images.dtype == np.uint8 and images.ndim in (3, 4) and labels.shape == images.shape[:1]
    if not fits or labels.dtype.kind not in "iu":
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: `images` must be bytes [N, H, W] or [N, H, W, C], and `labels` [N] "
            "classes. Write it again.",
        )
    return Content(labels.astype(np.int64), None, blocks_of(images))


def read_jpegs(path: Path, size: int) -> Content:
    """Reads a Parquet table with the columns ``id``, ``jpeg`` (bytes of an RGB image), ``label``
    (0, 1, …) and ``part`` (train or test), as images [N, size, size, 3]. Raises InputError.
    """
    try:
        table = pq.read_table(path, columns=list(_JPEG_COLUMNS))
        ids, jpegs, labels, parts = (table[name].to_pylist() for name in _JPEG_COLUMNS)
    except (OSError, pa.ArrowException):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a Parquet table with {', '.join(_JPEG_COLUMNS)}. Write it again.",
        ) from None
    typed = ((jpegs, bytes), (labels, int), (parts, str))
    is_complete = all(type(value) is kind for column, kind in typed for value in column)
    if not is_complete or not {TRAIN, TEST}.issuperset(parts):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: a row lacks its jpeg, its label, or its part (train or test). Write it "
            "again.",
        )
    decoder = PictureDecoder(size)

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in split_into_blocks(rows, decoder.bytes):
            names = [f"{path}: row {row + 1}" for row in some]
            yield decoder.decode([jpegs[row] for row in some], names)

    texts = np.array([str(id_).encode() for id_ in ids])
    classes, splits = np.array(labels, np.int64), np.array(parts, object)
    return Content(classes, splits, blocks, texts, afterwards=decoder.notes)


class PictureRows:
    """Collects rows of image files. The images are decoded when a block is read.

    Args:
        size: The height and width of the images, in pixels.
        single: Whether a row is one image instead of several views.
    """

    def __init__(self, size: int, *, single: bool = False) -> None:
        self._rows: list[tuple[Sequence[Path], int, str, bytes]] = []
        self._decoder, self._single = PictureDecoder(size), single

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, files: Sequence[Path], label: int, split: str, name: str) -> None:
        """Adds a row, whose id is ``name``."""
        self._rows.append((files, label, split, name.encode()))

    def content(
        self,
        classes: Sequence[str],
        split_says: str,
        notes: Sequence[str] = (),
        differs: Sequence[str] = (),
    ) -> Content:
        """Returns the rows as ``Content``, whose arguments these are."""
        return Content(
            labels=np.array([label for _, label, _, _ in self._rows], np.int64),
            splits=np.array([split for _, _, split, _ in self._rows], object),
            blocks=self._blocks,
            ids=np.array([id_ for _, _, _, id_ in self._rows]),
            classes=tuple(classes),
            notes=tuple(notes),
            differs=tuple(differs),
            split_says=split_says,
            afterwards=self._decoder.notes,
        )

    def _blocks(self, rows: Rows) -> Iterator[Block]:
        """Yields blocks [n, H, W, 3], or [n, V, H, W, 3] of rows with V views."""
        for some in split_into_blocks(rows, len(self._rows[0][0]) * self._decoder.bytes):
            paths = [path for row in some for path in self._rows[row][0]]
            pixels = self._decoder.decode(paths, paths)
            yield pixels if self._single else pixels.reshape(len(some), -1, *pixels.shape[1:])


class PictureDecoder:
    """Decodes images to RGB of ``size`` × ``size``, and counts those that had another size.

    An image is scaled with PIL's bilinear filter, so that its shorter side is ``size``, and cropped
    to the centre. Several threads decode at a time, because PIL releases Python's lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.resized = 0
        # The size of a decoded image.
        self.bytes = 3 * size * size
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def decode(self, sources: Sequence[Path | bytes], names: Sequence[object]) -> Pixels:
        """Decodes images.

        Args:
            sources: The files, or their contents.
            names: The names of the images in error messages.

        Returns the images, uint8 [n, size, size, 3]. Raises InputError.
        """
        pixels = np.empty((len(sources), self._size, self._size, 3), np.uint8)
        into = partial(self._decode_one, pixels, sources, names)
        self.resized += sum(self._threads.map(into, range(len(sources))))
        return pixels

    def notes(self) -> tuple[str, ...]:
        """Returns a note about the images of other sizes; () if there were none."""
        if not self.resized:
            return ()
        size = self._size
        return (f"{self.resized:,} images had another size, and were scaled to {size} × {size}.",)

    def _decode_one(
        self, into: Pixels, sources: Sequence[Path | bytes], names: Sequence[object], place: int
    ) -> bool:
        """Writes an image into its place. Returns whether it had another size."""
        source = sources[place]
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                self._refuse(image, names[place])
                other = image.size != (self._size, self._size)
                into[place] = np.asarray(self._fit(image.convert("RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise damage_error(names[place], "not a readable image") from None
        return other

    def _refuse(self, image: Image.Image, name: object) -> None:
        """Raises InputError if an image has more than 8 bits, or is too long."""
        from vfl_party.data.pixels import is_shortened

        if image.mode.startswith(_DEEP_MODES) or is_shortened(image):
            raise damage_error(name, "has pixels of more than 8 bits")
        if max(image.size) > _MAX_RATIO * min(image.size):
            raise damage_error(
                name,
                f"must be at most {_MAX_RATIO} times as long as wide (got {image.width} × "
                f"{image.height})",
            )

    def _fit(self, image: Image.Image) -> Image.Image:
        size, (width, height) = self._size, image.size
        if (width, height) == (size, size):
            return image
        scale = size / min(width, height)
        wide, high = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (wide - size) // 2, (high - size) // 2
        scaled = image.resize((wide, high), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, left + size, top + size))
