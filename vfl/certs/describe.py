"""Describes a certificate or a request as text."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vfl_common.errors import Code, InputError
from vfl_common.identity import pem

_WHICH = {True: " (the certificate's; its request has another)", False: " (the request's)"}
_CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}


def describe(path: Path) -> list[tuple[str, str]]:
    """Returns (label, text) pairs about a file's first certificate, or about a request. Raises
    InputError.
    """
    content = pem.read(path)
    try:
        return _describe(path, content)
    except (
        ValueError,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        UnsupportedAlgorithm,
    ) as error:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: cannot be shown ({error}). Make the certificate or request again.",
        ) from error


def _describe(path: Path, content: bytes) -> list[tuple[str, str]]:
    if b"PRIVATE KEY-----" in content:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: is a private key. Give the certificate or the request.",
        )
    if b"-----BEGIN CERTIFICATE REQUEST-----" in content:
        request = pem.parse_request(content, path)
        return [
            ("request", str(path)),
            *_describe_identity(request),
            ("may", "nothing before the authority signs it"),
        ]
    certificate = pem.parse_certificates(content, path)[0]
    return [
        ("certificate", str(path)),
        *_describe_identity(certificate),
        ("serial", f"{certificate.serial_number:x}"),
        ("issuer", _get_common_name(certificate.issuer)),
        ("valid", _describe_validity(certificate, datetime.now(UTC))),
        ("may", ", ".join(_list_abilities(certificate)) or "nothing that is needed here"),
    ]


def fingerprint(document: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Returns the SHA-256 of the DER form, ``AB:CD:…``, for people to compare."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(document.public_bytes(Encoding.DER))
    return digest.finalize().hex(":").upper()


def _describe_identity(
    document: x509.Certificate | x509.CertificateSigningRequest,
) -> list[tuple[str, str]]:
    return [
        ("name", ", ".join(pem.names(document)) or _get_common_name(document.subject)),
        ("key", _describe_key(document)),
        ("pin", pem.compute_pin(document)),
        (
            "fingerprint",
            f"SHA-256 {fingerprint(document)}{_WHICH[isinstance(document, x509.Certificate)]}",
        ),
    ]


def _get_common_name(name: x509.Name) -> str:
    names = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else name.rfc4514_string()


def _describe_key(document: x509.Certificate | x509.CertificateSigningRequest) -> str:
    key = document.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"ECDSA {_CURVES.get(key.curve.name, key.curve.name)}"
    if isinstance(key, rsa.RSAPublicKey):
        return f"RSA {key.key_size}"
    return type(key).__name__


def _describe_validity(certificate: x509.Certificate, now: datetime) -> str:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    state = pem.find_validity_problem(certificate, now) or f"{(end - now).days} days left"
    return f"{pem.utc(start)} to {pem.utc(end)} ({state})"


def _list_abilities(certificate: x509.Certificate) -> list[str]:
    abilities = []
    for extension in certificate.extensions:
        value = extension.value
        if isinstance(value, x509.BasicConstraints) and value.ca:
            abilities.append("sign the certificates of parties")
        if isinstance(value, x509.ExtendedKeyUsage):
            abilities += ["dial a peer"] * (ExtendedKeyUsageOID.CLIENT_AUTH in value)
            abilities += ["answer a peer"] * (ExtendedKeyUsageOID.SERVER_AUTH in value)
    return abilities
