"""Implements additively homomorphic encryption of pairs of numbers. The owner of the private key
decrypts sums that other parties have computed.

A scheme is chosen by name: ``ou`` (Okamoto-Uchiyama), ``paillier``, or ``none``, which does not
encrypt and is only for trials. This package imports neither torch nor grpc, so that worker
processes need little memory.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any, Literal

from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean
from vfl_party.homomorphic.scheme import (
    BITS,
    CIPHER_BYTES,
    Adder,
    CipherError,
    Integers,
    Keys,
    PlainAdder,
    PlainKeys,
    Wire,
    ciphers_for,
)
from vfl_party.homomorphic.sums import bucket_sums

__all__ = [
    "SCHEMES",
    "Adder",
    "CipherError",
    "Encryption",
    "Integers",
    "Keys",
    "Wire",
    "bucket_sums",
    "check",
    "cipher_bytes",
    "ciphers_for",
    "count_sums_per_cipher",
    "has_heu",
    "key_room",
    "make_adder",
    "make_keys",
]

log = logging.getLogger(__name__)

Encryption = Literal["ou", "paillier", "none"]
SCHEMES: dict[Encryption, str] = {
    "ou": "Okamoto-Uchiyama",
    "paillier": "Paillier",
    "none": "no encryption",
}
INSTALL = "pip install sf-heu==0.5.2b0"
# The number of bits of a plaintext that stay free besides its sums.
_GUARD_BITS = 8
_WITH_HEU = b"H"
_WITH_GMPY2 = b"G"
# Contains the modules of HEU once the library's threads have started.
_STARTED: list[Any] = []


def load_heu() -> Any | None:
    """Returns the modules of HEU; None if HEU cannot be imported."""
    try:
        modules = SimpleNamespace(
            numpy=importlib.import_module("heu.numpy"), phe=importlib.import_module("heu.phe")
        )
    except (ImportError, OSError):
        return None
    _start_heu_threads(modules)
    return modules


def _start_heu_threads(library: Any) -> None:
    """Lets HEU start its threads while standard output, which is reserved for events, is
    redirected.

    HEU writes a line about its threads and has no setting against that. The line goes to the log,
    which a party drops before its run begins.
    """
    if _STARTED:
        return
    sys.stdout.flush()
    stdout, (source, sink) = os.dup(1), os.pipe()
    # HEU may write nothing.
    os.set_blocking(source, False)
    try:
        os.dup2(sink, 1)
        library.numpy.setup(library.phe.SchemaType.Mock, 512).array(
            [1] * 8, library.phe.BigintEncoderParams()
        )
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(sink)
        with contextlib.suppress(BlockingIOError):
            log.info(
                "HEU says: %s",
                clean(os.read(source, LINE).decode(errors="replace")),
                extra={"event": "library"},
            )
        os.close(source)
    _STARTED.append(library)


def check(scheme: Encryption, where: str) -> None:
    """Raises InputError, with the command that installs the library, if the scheme's library is
    missing. ``where``: The key for the message.

    Also imports the library, which must happen before a party joins and several threads report
    events.
    """
    if scheme != "none" and load_heu() is None and scheme == "ou":
        raise InputError(
            Code.CONFIG_INVALID,
            f'{where}: encryption = "ou" needs HEU, which cannot be imported (it has a wheel for '
            f'Python 3.11 only). Run "{INSTALL}", or set encryption = "paillier".',
        )


def cipher_bytes(scheme: Encryption, bits: int) -> int:
    """Returns the number of bytes of a ciphertext on the wire, the same at all parties."""
    return {"ou": bits // 8 + 2, "paillier": bits // 4, "none": CIPHER_BYTES}[scheme]


def count_sums_per_cipher(scheme: Encryption, bits: int) -> int:
    """Returns the number of sums that fit into one ciphertext on the wire, the same at all
    parties.
    """
    room = {"ou": bits // 3, "paillier": bits, "none": BITS}[scheme]
    return max(1, (room - _GUARD_BITS) // BITS)


def key_room(scheme: Encryption, bits: int) -> int:
    """Returns the maximum number of bytes of a public key on the wire, including four for its
    length.
    """
    return 4 if scheme == "none" else bits // 2 + 64


def has_heu() -> bool:
    """Returns whether HEU can be imported in this process."""
    return load_heu() is not None


def make_keys(scheme: Encryption, bits: int, *, with_heu: bool) -> tuple[Keys, bytes]:
    """Makes a new private key. Returns it and the public key for ``adder``.

    ``with_heu``: whether all passive parties have HEU; otherwise gmpy2 computes Paillier.
    """
    if scheme == "none":
        return PlainKeys(), b""
    library = load_heu()
    if with_heu and library is not None:
        from vfl_party.homomorphic.heu import HeuKeys

        keys = HeuKeys(library, scheme, bits, cipher_bytes(scheme, bits))
        return keys, _WITH_HEU + keys.public
    from vfl_party.homomorphic.paillier import PaillierKeys

    paillier_keys = PaillierKeys.generate(bits)
    return paillier_keys, _WITH_GMPY2 + paillier_keys.public


def make_adder(scheme: Encryption, bits: int, public: bytes) -> Adder:
    """Makes the adder for a received public key. Raises CipherError if the key cannot be used."""
    if scheme == "none":
        return PlainAdder()
    library_mark, key, library = public[:1], public[1:], load_heu()
    if library_mark == _WITH_HEU and library is not None:
        from vfl_party.homomorphic.heu import HeuAdder

        return HeuAdder(
            library,
            scheme,
            key,
            bits,
            cipher_bytes(scheme, bits),
            count_sums_per_cipher(scheme, bits),
        )
    if library_mark == _WITH_GMPY2 and scheme == "paillier":
        from vfl_party.homomorphic.paillier import PaillierAdder

        return PaillierAdder(key, bits, count_sums_per_cipher(scheme, bits))
    raise CipherError("its public key belongs to a scheme that is not available here")
