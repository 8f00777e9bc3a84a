"""Checks a party's credentials before the first connection: a mistake is easiest to explain at its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity import pem


@dataclass(frozen=True)
class Credentials:
    """The federation's CA and a party's certificate and key, PEM; ``name`` is the certificate's only name."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    name: str
    not_after: datetime  # UTC
    ca_file: str = "ca.pem"  # for messages


def load_credentials(tls: TlsSettings, *, name: str) -> Credentials:
    """Reads and checks the three files for the party ``name``.

    Raises InputError: CERTIFICATE_INVALID if a file cannot be read or is no PEM, if other users can read the key, if
    the key or the CA does not belong to the certificate, or if a certificate is expired or not yet valid;
    IDENTITY_MISMATCH if the certificate is for another name.
    """
    ca_path, certificate_path, key_path = Path(tls.ca), Path(tls.certificate), Path(tls.key)
    ca_pem, certificate_pem = pem.read(ca_path), pem.read(certificate_path)
    authorities = pem.parse_certificates(ca_pem, ca_path)
    certificate = pem.parse_certificates(certificate_pem, certificate_path)[0]
    key, key_pem = pem.read_key(key_path)

    if key.public_key() != certificate.public_key():
        raise _invalid(f"the key {key_path} does not belong to the certificate {certificate_path}")
    found = pem.names(certificate)
    if found != (name,):
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"the certificate {certificate_path} is for {pem.quoted(found)}, but this party is {name!r}",
        )
    authority = pem.issuer_of(certificate, authorities)
    if authority is None:
        raise _invalid(
            f"the certificate {certificate_path} is not signed by the CA in {ca_path}; take both from one federation"
        )
    now = datetime.now(UTC)
    for document, path, remedy in (
        (certificate, certificate_path, f"`vfl certs issue {name}` or `request` and `sign` make a new one"),
        (authority, ca_path, "`vfl certs ca` makes a new authority"),
    ):
        problem = pem.out_of_date(document, now)
        if problem:
            hint = remedy if problem.startswith("expired") else f"it is {pem.utc(now)} by this machine's clock"
            raise _invalid(f"the certificate {path} {problem}: {hint}")
    return Credentials(ca_pem, certificate_pem, key_pem, name, certificate.not_valid_after_utc, str(ca_path))


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
