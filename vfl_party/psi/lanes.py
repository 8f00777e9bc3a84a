"""X25519 of eight points at a time, by Intel's crypto_mb (the package ``ipp-crypto``, the extra
``ipp``).

It uses AVX-512 IFMA, instructions that multiply eight pairs of 52-bit numbers at once. Processors
without them, and machines without the package, multiply one point after the other, by OpenSSL.

**Only for points that nobody can aim.** Release 2026.2 gives wrong products of a few numbers: of
those just below p, for example, and of 2^85 - 1. The hash of an id is such a number, or meets one
on its way, with probability below 2^-50. But a peer could send one, and learn of the secret from
the wrong product. So what peers send goes through OpenSSL, as ``curve.masked`` does it.

``python -m vfl_party.psi.lanes`` says which of the two this machine uses, and why.
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
    """Hashes and masks ids of this party: ``masked(hashed(ids, salt), secret)``, sooner if the
    library works here.
    """
    points, eight = hash_ids(ids, salt), load_lanes()
    return mask(points, secret) if eight is None else eight.multiply(points, secret)


class Lanes:
    """Intel's library, once it has been found to work here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError if it does not work on this processor, AttributeError if it has other
        functions.
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
        self._try()

    def multiply(self, points: bytes, secret: bytes) -> bytes:
        """Multiplies each point by the secret, as X25519 of RFC 7748. Raises ValueError if the
        library refuses one.

        Nobody may have been able to aim at the points: see above.
        """
        count, rest = divmod(len(points), POINT_BYTES)
        if rest or len(secret) != POINT_BYTES:
            raise ValueError(f"points and the secret must have {POINT_BYTES} bytes each")
        if not count:
            return b""
        # Spare lanes multiply the last point again.
        spare = -count % LANES
        source = ctypes.create_string_buffer(
            points + points[-POINT_BYTES:] * spare, POINT_BYTES * (count + spare)
        )
        product = ctypes.create_string_buffer(POINT_BYTES * (count + spare))
        key = ctypes.create_string_buffer(secret, POINT_BYTES)
        keys = (ctypes.c_void_p * LANES)(*[ctypes.addressof(key)] * LANES)
        from_, to = _addresses(source), _addresses(product)
        for place in range(0, ctypes.sizeof(from_), ctypes.sizeof(keys)):
            if status := self._multiply(ctypes.byref(to, place), keys, ctypes.byref(from_, place)):
                raise ValueError(f"crypto_mb cannot multiply a point: status {status:#x}")
        return product.raw[: len(points)]

    def _try(self) -> None:
        """Raises OSError unless the library multiplies as OpenSSL does."""
        points, secret = (
            bytes(number % 251 for number in range(9, 9 + POINT_BYTES * LANES)),
            bytes(range(POINT_BYTES)),
        )
        try:
            same = self.multiply(points, secret) == mask(points, secret)
        except ValueError as error:
            raise OSError(str(error)) from None
        if not same:
            raise OSError("crypto_mb gives another product than OpenSSL")


@functools.cache
def load_lanes() -> Lanes | None:
    """Returns the library; None if it is not installed, or cannot work on this machine."""
    try:
        return _load()
    except Exception:  # noqa: BLE001 - whatever is wrong with it or its installation, OpenSSL is there
        return None


def _load() -> Lanes:
    """Raises an exception that says why the library cannot be used."""
    # The dynamic loader does not search where pip installs these libraries.
    for name in _NEEDED:
        ctypes.CDLL(_file(_RUNTIME, name), ctypes.RTLD_GLOBAL)
    return Lanes(ctypes.CDLL(_file(_PACKAGE, _LIBRARY)))


def _file(package: str, name: str) -> str:
    """Returns the path of a file that pip has installed. Raises ImportError if it is not there, or
    was cut short.
    """
    try:
        listed = next(file for file in importlib.metadata.files(package) or () if file.name == name)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed") from None
    except StopIteration:
        raise ImportError(f"{package} lists no file {name}. Install it again.") from None
    path = Path(str(listed.locate()))
    # Loading a truncated file ends the process with a signal.
    if path.stat().st_size != listed.size:
        raise ImportError(f"{path} does not have the size that {package} lists. Install it again.")
    return str(path)


def _addresses(points: ctypes.Array[ctypes.c_char]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns the address of each point."""
    start, size = ctypes.addressof(points), ctypes.sizeof(points)
    return (ctypes.c_void_p * (size // POINT_BYTES))(*range(start, start + size, POINT_BYTES))


def main() -> None:
    """Prints which implementation this machine uses."""
    try:
        _load()
    except Exception as error:  # noqa: BLE001 - as in lanes()
        print(f"one point after the other, by OpenSSL: {error}")
    else:
        print("eight points at a time, by crypto_mb")


if __name__ == "__main__":
    main()
