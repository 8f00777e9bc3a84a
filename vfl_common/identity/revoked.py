"""The lists of revoked certificates, which the CA's keeper gives to the server and to every party.

A list has one of two forms. A signed one is an X.509 CRL, PEM: it comes from an authority of
``ca.pem``, and it must be replaced before its ``nextUpdate``. A plain one is a text file: one
serial number a line, in hexadecimal digits, with or without colons; ``#`` begins a comment. They
lie beside the CA as ``revoked.crl`` and ``revoked.txt``, and both count, unless ``tls.revoked`` or
``--revoked`` names another file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem

FILE, SIGNED = "revoked.txt", "revoked.crl"
_SERIAL = re.compile(r"[0-9a-fA-F]{1,64}")
_CRL = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_IS_CRL = b"-----BEGIN X509 CRL-----"


@dataclass(frozen=True)
class RevokedSerials:
    """The serial numbers of all lists; ``late``: '' unless a signed one should have been replaced
    by now.
    """

    serials: frozenset[int] = frozenset()
    late: str = ""


def read_revoked(tls: TlsSettings, ca_pem: bytes) -> RevokedSerials:
    """Reads the lists: none if none is named and none lies beside the CA.

    ``ca_pem``: the authorities that may sign a list.

    Raises InputError if a list cannot be read, or is signed by nobody of them. One that is out of
    date is read as well.
    """
    named = tls.revoked is not None
    beside = [Path(tls.ca).with_name(name) for name in (FILE, SIGNED)]
    serials: set[int] = set()
    late = ""
    for path in [Path(tls.revoked)] if tls.revoked is not None else beside:
        try:
            content = path.read_bytes()
        except OSError as error:
            if not named and isinstance(error, FileNotFoundError):
                continue
            raise InputError(
                Code.CERTIFICATE_INVALID, f"{path} cannot be read: {error.strerror}"
            ) from None
        if _IS_CRL not in content and path.suffix != Path(SIGNED).suffix:
            serials.update(parse(content, path))
            continue
        for found in parse_signed(content, path, pem.parse_certificates(ca_pem, Path(tls.ca))):
            serials.update(each.serial_number for each in found)
            late = late or _late(found, path)
    return RevokedSerials(frozenset(serials), late)


def parse(content: bytes, path: Path) -> list[int]:
    """Parses a plain list. Raises InputError with the first line that is no serial number."""
    found = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        text = line.partition("#")[0].strip().replace(":", "")
        if text and not _SERIAL.fullmatch(text):
            what = (
                "is no serial number in hexadecimal digits; correct it, or put # before a comment"
            )
            raise InputError(Code.CERTIFICATE_INVALID, f"{path}: line {number} {what}")
        if text:
            found.append(int(text, 16))
    return found


def parse_signed(
    content: bytes, path: Path, authorities: list[x509.Certificate]
) -> list[x509.CertificateRevocationList]:
    """Parses signed lists, one after the other in a file, with nothing beside them but comments.

    Raises InputError if one is damaged or of another CA.
    """
    found, blocks = [], _CRL.findall(content)
    beside = _CRL.sub(b"", content).splitlines()
    if not blocks or any(line.partition(b"#")[0].strip() for line in beside):
        text = (
            f"{path} is damaged: it holds no signed list, or one that does not end, or other "
            "lines beside it"
        )
        raise InputError(Code.CERTIFICATE_INVALID, f"{text}; get it anew from the keeper of the CA")
    for block in blocks:
        try:
            each = x509.load_pem_x509_crl(block)
            known = any(_signed_by(each, authority) for authority in authorities)
        except (ValueError, UnsupportedAlgorithm):
            known, each = False, None
        if each is None or each.next_update_utc is None:
            text = (
                f"{path} is damaged, or has no date of the next list; get it anew from the "
                "keeper of the CA"
            )
            raise InputError(Code.CERTIFICATE_INVALID, text)
        if not known:
            text = (
                f"{path} is not signed by the CA; get it anew from its keeper, or put that CA "
                "into ca.pem"
            )
            raise InputError(Code.CERTIFICATE_INVALID, text)
        found.append(each)
    return found


def _signed_by(listed: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    try:
        return listed.issuer == authority.subject and listed.is_signature_valid(key)  # type: ignore[arg-type]
    except (TypeError, InvalidSignature):
        return False


def _late(listed: x509.CertificateRevocationList, path: Path) -> str:
    end = listed.next_update_utc
    if end is None or datetime.now(UTC) <= end:
        return ""
    text = f"the list of revoked certificates {path} was good until {pem.utc(end)}; get a new one"
    return f"{text} from the keeper of the CA (`vfl certs revoke` makes it)"


def require_unrevoked(name: str, certificate: x509.Certificate, revoked: frozenset[int]) -> None:
    """Raises PeerError (CERTIFICATE_INVALID) if the certificate of the peer ``name`` is revoked."""
    if certificate.serial_number in revoked:
        text = f"the certificate of {name} (serial number {certificate.serial_number:x}) is revoked"
        raise PeerError(
            Code.CERTIFICATE_INVALID,
            f"{text}; {name} needs a new one from the keeper of the CA",
            party=name,
        )


# -- what was seen
# ----------------------------------------------------------------------

_NOTE = """\
# Serial numbers of certificates that were revoked here once. They stay revoked, even if a list
# loses them.
# To accept one again, remove its line while the program does not run.
"""


def read_seen(path: Path) -> frozenset[int]:
    """Reads the note of the serial numbers that were in a list once; none if there is none. Raises
    InputError.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise InputError(
            Code.CERTIFICATE_INVALID, f"{path} cannot be read: {error.strerror}"
        ) from None
    return frozenset(parse(content, path))


def note_text(serials: frozenset[int]) -> str:
    """Returns the note that ``read_seen`` reads."""
    return _NOTE + "".join(f"{serial:x}\n" for serial in sorted(serials))
