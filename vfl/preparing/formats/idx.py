"""Reads IDX files, the format of MNIST and its like, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """Returns an array of bytes of ``dims`` dimensions, whose first is the number of rows.

    A file begins with two zero bytes, the type (8: unsigned byte), the number of dimensions, and
    each dimension as four bytes, the highest first (http://yann.lecun.com/exdb/mnist). Raises
    InputError if the file is anything else, or shorter or longer than it says.
    """
    try:
        with _opened(path) as file:
            head = file.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, _UNSIGNED_BYTE, dims)):
                text = f"{path}: is no IDX file of bytes with {dims} dimensions"
                raise InputError(Code.FILE_INVALID, f"{text}; get it from its makers again")
            shape = tuple(int(n) for n in np.frombuffer(head, ">u4", offset=4))
            return _body(path, file, shape)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or "it is cut or damaged"
        text = f"{path}: cannot be read ({why}); get it from its makers again"
        raise InputError(Code.FILE_INVALID, text) from None


def _opened(path: Path) -> IO[bytes]:
    packed = path.suffix == ".gz"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _body(path: Path, file: IO[bytes], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Reads what the head announces, and no byte more, however much it announces."""
    wanted, found = math.prod(shape), bytearray()
    while len(found) <= wanted and (more := file.read(min(1 << 20, wanted + 1 - len(found)))):
        found += more
    if len(found) != wanted:
        how = "fewer" if len(found) < wanted else "more"
        what = " × ".join(map(str, shape))
        text = f"{path}: announces {what} bytes and holds {how}; get it from its makers again"
        raise InputError(Code.FILE_INVALID, text)
    return np.frombuffer(found, np.uint8).reshape(shape)
