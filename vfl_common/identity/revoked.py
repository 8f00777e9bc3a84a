"""The list of revoked certificates: a text file that the CA's keeper gives to the server and to every party.

One serial number a line, in hexadecimal digits, with or without colons; ``#`` begins a comment. The list lies beside
the CA as ``revoked.txt``, unless ``tls.revoked`` or ``--revoked`` names another file.
"""

from __future__ import annotations

import re
from pathlib import Path

from cryptography import x509

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError, PeerError

FILE = "revoked.txt"
_SERIAL = re.compile(r"[0-9a-fA-F]{1,64}")


def read_revoked(tls: TlsSettings) -> frozenset[int]:
    """Reads the serial numbers: none if no list is named and none lies beside the CA. Raises InputError."""
    path = Path(tls.revoked) if tls.revoked is not None else Path(tls.ca).with_name(FILE)
    try:
        content = path.read_bytes()
    except OSError as error:
        if tls.revoked is None and isinstance(error, FileNotFoundError):
            return frozenset()
        raise InputError(Code.CERTIFICATE_INVALID, f"{path} cannot be read: {error.strerror}") from None
    return frozenset(parse(content, path))


def parse(content: bytes, path: Path) -> list[int]:
    """Parses the list. Raises InputError with the first line that is no serial number."""
    found = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        text = line.partition("#")[0].strip().replace(":", "")
        if text and not _SERIAL.fullmatch(text):
            what = "is no serial number in hexadecimal digits; correct it, or put # before a comment"
            raise InputError(Code.CERTIFICATE_INVALID, f"{path}: line {number} {what}")
        if text:
            found.append(int(text, 16))
    return found


def require_unrevoked(name: str, certificate: x509.Certificate, revoked: frozenset[int]) -> None:
    """Raises PeerError (CERTIFICATE_INVALID) if the certificate of the peer ``name`` is revoked."""
    if certificate.serial_number in revoked:
        text = f"the certificate of {name} (serial number {certificate.serial_number:x}) is revoked"
        raise PeerError(
            Code.CERTIFICATE_INVALID, f"{text}; {name} needs a new one from the keeper of the CA", party=name
        )
