"""Reads, writes and examines certificates, requests and keys in PEM."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from vfl_common.errors import Code, InputError

MIN_RSA_BITS = 2048
# The maximum number of intermediate certificates between a party's certificate and an authority in
# ``ca.pem``.
MAX_INTERMEDIATES = 3
# The elliptic curves of usable keys. A gRPC server accepts no P-521 signatures (grpcio 1.85).
_CURVES = (ec.SECP256R1, ec.SECP384R1)


def write_new(files: Mapping[Path, bytes], *, force: bool) -> None:
    """Writes all files, or none of them if one exists and ``force`` is not set.

    A ``.key`` file is created with mode 0600, so that other users can never read it. Other files
    are created with mode 0644. Raises InputError.
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
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be written ({error.strerror}). Correct the permissions, or give "
                "another path.",
            ) from error


def read(path: Path) -> bytes:
    """Reads a file. Raises InputError."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _invalid(
            f"{path}: does not exist. Correct the path, or make the file with `vfl certs`."
        ) from error
    except OSError as error:
        raise _invalid(
            f"{path}: cannot be read ({error.strerror}). Make the file readable."
        ) from error


def parse_certificates(content: bytes, path: Path) -> list[x509.Certificate]:
    """Parses the certificates of a PEM file. Raises InputError if it contains none."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise _invalid(
            f"{path}: is not a certificate in PEM format. Give the file that was issued."
        ) from error


def parse_request(content: bytes, path: Path) -> x509.CertificateSigningRequest:
    """Parses a certificate request. Its signature proves that the sender holds the key. Raises
    InputError if it is not valid.
    """
    try:
        request = x509.load_pem_x509_csr(content)
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _invalid(
            f"{path}: is not a certificate request in PEM format. Give the file that `vfl certs "
            "request` made."
        ) from error
    if not is_signed:
        raise _invalid(
            f"{path}: the request is not signed with its own key, so it is damaged or forged. Ask "
            "for a new one."
        )
    return request


def read_secret(path: Path, what: str) -> bytes:
    """Reads a secret file. Raises InputError if other users can read it. ``what``: the words for
    its content in the message.

    A file of root may also be readable by its group, if this process is not root's: Kubernetes
    mounts a Secret this way. PostgreSQL has the same rule.
    """
    content = read(path)
    status = path.stat()
    mode = status.st_mode & 0o777
    if mode & (0o037 if status.st_uid == 0 != os.geteuid() else 0o077):
        raise _invalid(
            f"{path}: other users can read {what} (mode {mode:04o}). Run `chmod 600 "
            f"{shlex.quote(str(path))}`."
        )
    return content


def parse_key(
    content: bytes, path: Path, passphrase: bytes | None = None
) -> tuple[PrivateKeyTypes, bytes]:
    """Parses a private key. Returns the key and its unencrypted PEM text. Raises InputError.

    ``passphrase``: The passphrase of an encrypted key; ignored if the key is not encrypted.
    """
    try:
        return load_pem_private_key(content, password=None), content
    except TypeError:
        # The key is encrypted.
        pass
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _invalid(
            f"{path}: is not a private key in PEM format. Give the file of the key."
        ) from error
    if passphrase is None:
        raise _invalid(
            f"{path}: the key is encrypted. Give its passphrase in a file (tls.passphrase_file, "
            "--passphrase-file) or in the variable VFL_TLS_PASSPHRASE."
        )
    try:
        key = load_pem_private_key(content, passphrase)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _invalid(
            f"{path}: the passphrase does not decrypt the key. Give the one with which the key was "
            "made."
        ) from error
    return key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def find_key_problem(key: PublicKeyTypes) -> str:
    """Returns '' if gRPC can use the key in a handshake; otherwise the problem and a fix, as the
    end of a sentence.
    """
    if isinstance(key, ec.EllipticCurvePublicKey):
        return (
            ""
            if isinstance(key.curve, _CURVES)
            else f"is on the curve {key.curve.name}. Use P-256 or P-384."
        )
    if isinstance(key, rsa.RSAPublicKey):
        short = f"is RSA of {key.key_size} bits. Use at least {MIN_RSA_BITS} bits."
        return "" if key.key_size >= MIN_RSA_BITS else short
    kind = type(key).__name__.removeprefix("_").removesuffix("PublicKey")
    return (
        f"is {kind}, which gRPC cannot use. Use ECDSA (P-256) or RSA of at least {MIN_RSA_BITS} "
        "bits."
    )


def compute_pin(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Returns ``sha256:`` and the digest of the public key (its DER form, SubjectPublicKeyInfo), in
    hexadecimal.
    """
    der = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{sha256(der).hexdigest()}"


def names(document: x509.Certificate | x509.CertificateSigningRequest) -> tuple[str, ...]:
    """Returns all subject alternative names. A name that is not a DNS name begins with its kind,
    such as ``IPAddress:10.0.0.1``.

    Returns an empty tuple if the document has no readable names.
    """
    return tuple(
        value if kind is x509.DNSName else f"{kind.__name__}:{value}"
        for kind, value in _all_names(document)
    )


def list_dns_names(document: x509.Certificate | x509.CertificateSigningRequest) -> tuple[str, ...]:
    """Returns the DNS names among the subject alternative names. A party's name must be one of
    them.
    """
    return tuple(value for kind, value in _all_names(document) if kind is x509.DNSName)


def _all_names(
    document: x509.Certificate | x509.CertificateSigningRequest,
) -> list[tuple[type, Any]]:
    try:
        san = document.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ):
        return []
    return [(type(name), name.value) for name in san]


def quote_names(names: tuple[str, ...]) -> str:
    """Returns ``'bank', 'shop'``, or ``nobody`` if there is no name."""
    return ", ".join(map(repr, names)) or "nobody"


def utc(moment: datetime) -> str:
    """Formats ``moment``, which is in UTC, as ``2026-01-31 12:00 UTC``."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def find_validity_problem(certificate: x509.Certificate, now: datetime) -> str:
    """Returns '' while the certificate is valid; else the problem, such as ``expired at 2026-01-31
    12:00 UTC``.
    """
    if now > certificate.not_valid_after_utc:
        return f"expired at {utc(certificate.not_valid_after_utc)}"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {utc(certificate.not_valid_before_utc)}"
    return ""


def find_issuer(
    certificate: x509.Certificate, authorities: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """Finds the authority that signed the certificate directly; None if none of them did."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return authority
    return None


def build_chain(
    certificate: x509.Certificate,
    others: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
) -> list[x509.Certificate]:
    """Returns the chain from ``certificate`` over intermediates among ``others`` to an authority;
    an empty list if no chain exists.

    An intermediate must be an authority that may sign (basic constraints, key usage), and its path
    length must allow the certificates below it. An intermediate with name constraints is not used,
    because they are not evaluated here. Dates are not checked.
    """
    chain = [certificate]
    while len(chain) <= MAX_INTERMEDIATES + 1:
        trusted = find_issuer(
            chain[-1],
            [
                authority
                for authority in authorities
                if _max_intermediates_below(authority) >= len(chain) - 1
            ],
        )
        if trusted is not None:
            return [*chain, trusted]
        candidates = [
            other
            for other in others
            if other not in chain and _may_sign(other, below=len(chain) - 1)
        ]
        issuer = find_issuer(chain[-1], candidates)
        if issuer is None:
            return []
        chain.append(issuer)
    return []


def _max_intermediates_below(authority: x509.Certificate) -> int:
    """Returns the maximum number of intermediates below an authority."""
    try:
        limit = authority.extensions.get_extension_for_class(
            x509.BasicConstraints
        ).value.path_length
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ):
        return 0
    return MAX_INTERMEDIATES if limit is None else limit


def _may_sign(intermediate: x509.Certificate, below: int) -> bool:
    understood = (x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage)
    is_authority = False
    try:
        for extension in intermediate.extensions:
            value = extension.value
            if isinstance(value, x509.BasicConstraints):
                is_authority = value.ca and (
                    value.path_length is None or value.path_length >= below
                )
            if isinstance(value, x509.KeyUsage) and not value.key_cert_sign:
                return False
            if isinstance(value, x509.NameConstraints) or (
                extension.critical and not isinstance(value, understood)
            ):
                return False
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return False
    return is_authority


def allows_use(certificate: x509.Certificate, use: x509.ObjectIdentifier) -> bool:
    """Returns whether a certificate allows ``use`` (extended key usage). A certificate without that
    extension allows every use.
    """
    try:
        return use in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return False


def _exists(path: Path) -> InputError:
    return InputError(
        Code.FILE_INVALID,
        f"{path}: already exists and was not changed. Replace it with --force.",
    )


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
