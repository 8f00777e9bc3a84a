"""Checks a party's credentials before the first connection: a mistake is easiest to explain at its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity import pem
from vfl_common.identity.revoked import read_revoked

_SOON = timedelta(days=30)


@dataclass(frozen=True)
class Credentials:
    """The federation's CA and a party's certificate and key, PEM; ``name`` is the certificate's only name.

    ``revoked``: serial numbers of certificates that are not accepted any more.
    """

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    name: str
    certificate: x509.Certificate
    authority: x509.Certificate  # the one that has signed it
    ca_file: str  # for messages
    certificate_file: str
    revoked: frozenset[int] = frozenset()

    @property
    def not_after(self) -> datetime:
        return self.certificate.not_valid_after_utc

    @property
    def pems(self) -> tuple[bytes, bytes, bytes]:
        return self.ca_pem, self.certificate_pem, self.key_pem


def load_credentials(tls: TlsSettings, *, name: str) -> Credentials:
    """Reads and checks the files for the party ``name``: those of ``load_pair``, and the list of revoked certificates.

    Raises InputError, also if the list cannot be read or has the party's own certificate.
    """
    credentials = replace(load_pair(tls, name=name), revoked=read_revoked(tls))
    if credentials.certificate.serial_number in credentials.revoked:
        text = f"the certificate {tls.certificate} is revoked; ask the keeper of the CA for a new one"
        raise _invalid(text)
    return credentials


def load_pair(tls: TlsSettings, *, name: str) -> Credentials:
    """Reads and checks the CA, the certificate and the key for the party ``name``.

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
    return Credentials(
        ca_pem, certificate_pem, key_pem, name, certificate, authority, str(ca_path), str(certificate_path)
    )


def ends_soon(certificate: x509.Certificate, now: datetime) -> str:
    """Returns '' until 30 days before the end; then when it is, as ``ends at 2026-01-31 12:00 UTC, in 12 days; …``.

    For a certificate of less than 90 days it is the last third of its life: 30 days would be most of it.
    """
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < end - min(_SOON, (end - begin) / 3):
        return ""
    when = f"ends at {pem.utc(end)}, in {(end - now).days} days" if now < end else f"ended at {pem.utc(end)}"
    return f"{when}; replace it in time: a running program uses the new one from the next connection on"


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
