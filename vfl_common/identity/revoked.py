"""Reads the lists of revoked certificates, which the CA administrator gives to the server and every
party.

A list has one of two forms. A signed list is an X.509 CRL in PEM from an authority in ``ca.pem``,
and must be replaced before its ``nextUpdate``. A plain list is a text file with one serial number
per line, in hexadecimal digits, with or without colons; ``#`` begins a comment. Both
``revoked.crl`` and ``revoked.txt`` in the folder of the CA are used, unless ``tls.revoked`` or
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
    """The serial numbers in all lists. ``late``: a warning if a signed list is out of date;
    otherwise ''.
    """

    serials: frozenset[int] = frozenset()
    late: str = ""


def read_revoked(tls: TlsSettings, ca_pem: bytes) -> RevokedSerials:
    """Reads all lists of revoked certificates. There may be none.

    ``ca_pem``: the authorities that may sign a list.

    Raises InputError if a list cannot be read, or if none of these authorities has signed it. A
    list that is out of date is also read.
    """
    default = [Path(tls.ca).with_name(name) for name in (FILE, SIGNED)]
    serials: set[int] = set()
    late = ""
    for path in [Path(tls.revoked)] if tls.revoked is not None else default:
        try:
            content = path.read_bytes()
        except OSError as error:
            if tls.revoked is None and isinstance(error, FileNotFoundError):
                continue
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: cannot be read ({error.strerror}). Correct the path, or make the file "
                "readable.",
            ) from None
        if _IS_CRL not in content and path.suffix != Path(SIGNED).suffix:
            serials.update(parse(content, path))
            continue
        for crl in parse_signed(content, path, pem.parse_certificates(ca_pem, Path(tls.ca))):
            serials.update(entry.serial_number for entry in crl)
            late = late or _warn_if_late(crl, path)
    return RevokedSerials(frozenset(serials), late)


def parse(content: bytes, path: Path) -> list[int]:
    """Parses a plain list. Raises InputError that names the first wrong line."""
    serials = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        text = line.partition("#")[0].strip().replace(":", "")
        if text and not _SERIAL.fullmatch(text):
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: line {number}: is not a serial number in hexadecimal digits. Correct it, "
                "or put # before a comment.",
            )
        if text:
            serials.append(int(text, 16))
    return serials


def parse_signed(
    content: bytes, path: Path, authorities: list[x509.Certificate]
) -> list[x509.CertificateRevocationList]:
    """Parses the signed lists in a file, which may have comments between them.

    Raises InputError if a list is damaged or from another CA.
    """
    crls, blocks = [], _CRL.findall(content)
    other_lines = _CRL.sub(b"", content).splitlines()
    if not blocks or any(line.partition(b"#")[0].strip() for line in other_lines):
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: is damaged: it holds no complete signed list, or other lines. Get it again "
            "from the CA administrator.",
        )
    for block in blocks:
        try:
            crl = x509.load_pem_x509_crl(block)
            is_known = any(_is_signed_by(crl, authority) for authority in authorities)
        except (ValueError, UnsupportedAlgorithm):
            is_known, crl = False, None
        if crl is None or crl.next_update_utc is None:
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: is damaged, or does not say when the next list comes. Get it again from "
                "the CA administrator.",
            )
        if not is_known:
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: is not signed by the CA. Get it again from the CA administrator, or add "
                "the CA that signed it to ca.pem.",
            )
        crls.append(crl)
    return crls


def _is_signed_by(crl: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    try:
        return crl.issuer == authority.subject and crl.is_signature_valid(key)  # type: ignore[arg-type]
    except (TypeError, InvalidSignature):
        return False


def _warn_if_late(crl: x509.CertificateRevocationList, path: Path) -> str:
    end = crl.next_update_utc
    if end is None or datetime.now(UTC) <= end:
        return ""
    return (
        f"{path}: the list of revoked certificates was valid until {pem.utc(end)}. Get a new one "
        "from the CA administrator (`vfl certs revoke` makes it)."
    )


def require_unrevoked(name: str, certificate: x509.Certificate, revoked: frozenset[int]) -> None:
    """Raises PeerError (CERTIFICATE_INVALID) if the certificate of the peer ``name`` is revoked."""
    if certificate.serial_number in revoked:
        raise PeerError(
            Code.CERTIFICATE_INVALID,
            f"the certificate of {name} (serial number {certificate.serial_number:x}) is revoked. "
            "Get a new one from the CA administrator.",
            party=name,
        )


# -- the serial numbers that were ever in a list
# ----------------------------------------------------------------------

_NOTE = """\
# Serial numbers of certificates that were revoked here once. They stay revoked, even if a list
# loses them.
# To accept one again, remove its line while the program does not run.
"""


def read_seen(path: Path) -> frozenset[int]:
    """Reads the recorded serial numbers; an empty set if the file does not exist. Raises
    InputError.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Make the file readable.",
        ) from None
    return frozenset(parse(content, path))


def format_record(serials: frozenset[int]) -> str:
    """Returns the content of the file that ``read_seen`` reads."""
    return _NOTE + "".join(f"{serial:x}\n" for serial in sorted(serials))
