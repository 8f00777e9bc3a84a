"""Multiplies eight points at a time by X25519, with Intel's library crypto_mb (the package
``ipp-crypto``, the extra ``ipp``).

The library uses AVX-512 IFMA, instructions that multiply eight pairs of 52-bit numbers at once. On
processors without these instructions, and without the package, OpenSSL multiplies one point at a
time.

**Only for points that no peer has chosen.** Release 2026.2 of crypto_mb computes wrong products of
a few numbers, such as 2^85 - 1 and numbers just below p. The hash of an id leads to such a number
with probability below 2^-50. But a peer could send one, and learn something about the secret from
the wrong product. So points from peers go through OpenSSL, in ``curve.mask``.

``python -m vfl_party.psi.lanes`` prints which of the two libraries this machine uses, and why.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from vfl_party.psi.curve import POINT_BYTES, hash_ids, mask

LANES = 8
_PACKAGE, _LIBRARY = "ipp-crypto", "libcrypto_mb.so"
# The libraries must be loaded in this order.
_RUNTIME, _NEEDED = "intel-cmplr-lib-rt", ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so")


def hash_and_mask(ids: Sequence[bytes], salt: bytes, secret: bytes) -> bytes:
    """Hashes and masks ids of this party, with crypto_mb if it works on this machine."""
    points, library = hash_ids(ids, salt), load_lanes()
    return mask(points, secret) if library is None else library.multiply(points, secret)


class Lanes:
    """Intel's library crypto_mb, checked to work on this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Checks the library. Raises OSError if it does not work on this processor, AttributeError
        if it lacks a function.
        """
        library.mbx_is_crypto_mb_applicable.argtypes = [ctypes.c_uint64]
        if not library.mbx_is_crypto_mb_applicable(0):
            raise OSError(
                "this processor lacks instructions that crypto_mb needs (AVX-512 IFMA among them)"
            )
        self._multiply = library.mbx_x25519_mb8
        self._multiply.argtypes = [ctypes.c_void_p] * 3
        # The status has four bits per lane, all 0 on success.
        self._multiply.restype = ctypes.c_uint32
        self._check_products()

    def multiply(self, points: bytes, secret: bytes) -> bytes:
        """Multiplies each point by the secret, as X25519 of RFC 7748. Raises ValueError if the
        library refuses a point.

        No peer may have chosen the points, see the module's docstring.
        """
        count, extra_bytes = divmod(len(points), POINT_BYTES)
        if extra_bytes or len(secret) != POINT_BYTES:
            raise ValueError(f"a point and the secret must have {POINT_BYTES} bytes each")
        if not count:
            return b""
        # The library always multiplies eight points, so the last point is repeated.
        padding = -count % LANES
        source = ctypes.create_string_buffer(
            points + points[-POINT_BYTES:] * padding, POINT_BYTES * (count + padding)
        )
        product = ctypes.create_string_buffer(POINT_BYTES * (count + padding))
        key = ctypes.create_string_buffer(secret, POINT_BYTES)
        keys = (ctypes.c_void_p * LANES)(*[ctypes.addressof(key)] * LANES)
        source_addresses, product_addresses = _list_addresses(source), _list_addresses(product)
        for offset in range(0, ctypes.sizeof(source_addresses), ctypes.sizeof(keys)):
            if status := self._multiply(
                ctypes.byref(product_addresses, offset),
                keys,
                ctypes.byref(source_addresses, offset),
            ):
                raise ValueError(f"crypto_mb cannot multiply a point (got status {status:#x})")
        return product.raw[: len(points)]

    def _check_products(self) -> None:
        """Raises OSError unless the library and OpenSSL compute the same products."""
        points, secret = (
            bytes(number % 251 for number in range(9, 9 + POINT_BYTES * LANES)),
            bytes(range(POINT_BYTES)),
        )
        try:
            is_same = self.multiply(points, secret) == mask(points, secret)
        except ValueError as error:
            raise OSError(str(error)) from None
        if not is_same:
            raise OSError("crypto_mb and OpenSSL compute different products")


@functools.cache
def load_lanes() -> Lanes | None:
    """Returns the library crypto_mb; None if it is not installed or does not work here."""
    try:
        return _load()
    except Exception:  # noqa: BLE001 - OpenSSL takes its place after any error
        return None


def _load() -> Lanes:
    """Loads the library. Raises an exception that says why the library cannot be used."""
    # The dynamic loader does not search the folders in which pip installs these libraries.
    for name in _NEEDED:
        ctypes.CDLL(_find_file(_RUNTIME, name), ctypes.RTLD_GLOBAL)
    return Lanes(ctypes.CDLL(_find_file(_PACKAGE, _LIBRARY)))


def _find_file(package: str, name: str) -> str:
    """Returns the path of a file that pip has installed. Raises ImportError if the file is missing
    or truncated.
    """
    try:
        file = next(
            entry for entry in importlib.metadata.files(package) or () if entry.name == name
        )
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed") from None
    except StopIteration:
        raise ImportError(f"{package} lists no file {name}. Install it again.") from None
    path = Path(str(file.locate()))
    # Loading a truncated file ends the process with a signal.
    if path.stat().st_size != file.size:
        raise ImportError(f"{path} does not have the size that {package} lists. Install it again.")
    return str(path)


def _list_addresses(points: ctypes.Array[ctypes.c_char]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the memory address of each point."""
    start, size = ctypes.addressof(points), ctypes.sizeof(points)
    return (ctypes.c_void_p * (size // POINT_BYTES))(*range(start, start + size, POINT_BYTES))


def main() -> None:
    """Prints which implementation this machine uses."""
    try:
        _load()
    except Exception as error:  # noqa: BLE001 - any error is printed
        print(f"one point after the other, by OpenSSL: {error}")
    else:
        print("eight points at a time, by crypto_mb")


if __name__ == "__main__":
    main()
