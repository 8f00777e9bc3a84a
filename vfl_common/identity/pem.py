"""Reads and writes certificates, requests and keys as PEM files, and answers a few questions about them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from vfl_common.errors import Code, InputError


def write_new(files: Mapping[Path, bytes], *, force: bool) -> None:
    """Writes all files; writes none if one of them exists and ``force`` is not set.

    A ``.key`` is created with mode 0600, so that others can never read it; the rest with 0644.
    Raises InputError.
    """
    existing = [path for path in files if path.exists()]
    if existing and not force:
        raise _exists(existing[0])
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if force:
                path.unlink(missing_ok=True)
            mode = 0o600 if path.suffix == ".key" else 0o644
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            raise InputError(Code.FILE_INVALID, f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> bytes:
    """Reads a file. Raises InputError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid(f"{path} cannot be read: {error.strerror}") from error


def parse_certificates(content: bytes, path: Path) -> list[x509.Certificate]:
    """Parses the certificates, at least one, of a PEM file. Raises InputError."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise _invalid(f"{path} is not a certificate in PEM format") from error


def parse_request(content: bytes, path: Path) -> x509.CertificateSigningRequest:
    """Parses a request and checks by its signature that the sender holds the key. Raises InputError."""
    try:
        request = x509.load_pem_x509_csr(content)
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _invalid(f"{path} is not a certificate request in PEM format") from error
    if not signed:
        raise _invalid(f"the request {path} is not signed with its own key: it is damaged or forged; ask for a new one")
    return request


def read_key(path: Path) -> tuple[PrivateKeyTypes, bytes]:
    """Reads a private key that only its owner can read; returns it with its PEM text. Raises InputError.

    If root owns the key and this process is not root's, the key's group may read it too: Kubernetes mounts a Secret
    this way. (PostgreSQL has the same rule.)
    """
    content = read(path)
    status = path.stat()
    mode = status.st_mode & 0o777
    if mode & (0o037 if status.st_uid == 0 != os.geteuid() else 0o077):
        raise _invalid(f"other users can use the key {path} (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}")
    try:
        return load_pem_private_key(content, password=None), content
    except TypeError as error:
        raise _invalid(f"the key {path} is encrypted; store it without a passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _invalid(f"{path} is not a private key in PEM format") from error


def names(document: x509.Certificate | x509.CertificateSigningRequest) -> tuple[str, ...]:
    """Returns all subject alternative names; others than DNS names start with their kind, ``IPAddress:10.0.0.1``.

    Empty if there are none or they cannot be read.
    """
    try:
        san = document.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return ()
    values: Iterable[tuple[type, Any]] = ((type(name), name.value) for name in san)
    return tuple(value if kind is x509.DNSName else f"{kind.__name__}:{value}" for kind, value in values)


def quoted(found: tuple[str, ...]) -> str:
    """Returns ``'bank', 'shop'``, or ``nobody`` if there is no name."""
    return ", ".join(map(repr, found)) or "nobody"


def utc(moment: datetime) -> str:
    """Formats ``moment``, which is in UTC, as ``2026-01-31 12:00 UTC``."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def out_of_date(certificate: x509.Certificate, now: datetime) -> str:
    """Returns '' while the certificate is valid; else what is wrong, as ``expired at 2026-01-31 12:00 UTC``."""
    if now > certificate.not_valid_after_utc:
        return f"expired at {utc(certificate.not_valid_after_utc)}"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {utc(certificate.not_valid_before_utc)}"
    return ""


def issuer_of(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> x509.Certificate | None:
    """Finds the authority that signed the certificate directly; does not follow intermediate authorities."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return authority
    return None


def _exists(path: Path) -> InputError:
    return InputError(Code.FILE_INVALID, f"{path} already exists and was not changed; --force replaces it")


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
