"""Checks a party's credentials before the first connection: a mistake is easiest to explain at its
source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity import pem
from vfl_common.identity.members import Members
from vfl_common.identity.revoked import read_revoked, require_unrevoked

PASSPHRASE = "VFL_TLS_PASSPHRASE"  # noqa: S105 - the name of a variable
# What the certificate of a program that only dials must be for.
DIALS = (ExtendedKeyUsageOID.CLIENT_AUTH,)
ANSWERS = (ExtendedKeyUsageOID.SERVER_AUTH,)
BOTH = DIALS + ANSWERS
_WORDS = {
    ExtendedKeyUsageOID.CLIENT_AUTH: "dial (clientAuth)",
    ExtendedKeyUsageOID.SERVER_AUTH: "answer (serverAuth)",
}

_SOON = timedelta(days=30)


@dataclass(frozen=True)
class Credentials:
    """The federation's CA and a party's certificate and key, PEM; ``name`` is the member for whom
    it stands.

    ``files``: the contents of the three files as they were read; the key may be encrypted there.
    ``chain``: the certificate, the intermediates that lie in its file, and the authority of
    ``ca_pem`` that ends it. ``members``: who has a part in the federation, and whose keys are
    pinned. ``revoked``: serial numbers of certificates that are not accepted any more.
    """

    ca_pem: bytes
    certificate_pem: bytes
    # Not encrypted.
    key_pem: bytes = field(repr=False)
    files: tuple[bytes, bytes, bytes] = field(repr=False)
    name: str
    chain: tuple[x509.Certificate, ...]
    # For messages.
    ca_file: str
    certificate_file: str
    members: Members = field(default_factory=Members)
    revoked: frozenset[int] = frozenset()

    @property
    def certificate(self) -> x509.Certificate:
        return self.chain[0]

    @property
    def authority(self) -> x509.Certificate:
        return self.chain[-1]

    @property
    def not_after(self) -> datetime:
        return self.certificate.not_valid_after_utc

    @property
    def pems(self) -> tuple[bytes, bytes, bytes]:
        return self.ca_pem, self.certificate_pem, self.key_pem

    def admit(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError if the certificate of the peer ``name`` is revoked, or if another key of
        it is pinned.
        """
        self.members.require_pin(name, certificate)
        require_unrevoked(name, certificate, self.revoked)


def load_credentials(
    tls: TlsSettings,
    *,
    name: str,
    members: Members | None = None,
    uses: Sequence[x509.ObjectIdentifier] = DIALS,
) -> Credentials:
    """Reads and checks the files for the party ``name``: those of ``load_pair``, and the list of
    revoked certificates.

    Raises InputError, also if the list cannot be read, is out of date, or has the party's own
    certificate.
    """
    found = load_pair(tls, name=name, members=members, uses=uses)
    listed = read_revoked(tls, found.ca_pem)
    if listed.late:
        raise _invalid(listed.late)
    credentials = replace(found, revoked=listed.serials)
    require_own(credentials)
    return credentials


def require_own(credentials: Credentials) -> None:
    """Raises InputError if the party's own certificate is revoked."""
    if credentials.certificate.serial_number in credentials.revoked:
        text = (
            f"the certificate {credentials.certificate_file} is revoked; ask the keeper of the "
            "CA for a new one"
        )
        raise _invalid(text)


def load_pair(
    tls: TlsSettings,
    *,
    name: str,
    members: Members | None = None,
    uses: Sequence[x509.ObjectIdentifier] = DIALS,
) -> Credentials:
    """Reads and checks the CA, the certificate and the key for the party ``name``.

    Args:
        members: the federation's; the certificate must not name another of them. None: they are not
            known.
        uses: what the certificate must be for (extended key usage).

    Raises InputError: CERTIFICATE_INVALID if a file cannot be read or is no PEM, if other users can
    read the key, if the key or the CA does not belong to the certificate, if gRPC cannot use the
    key, or if a certificate is expired, not yet valid or for other uses; IDENTITY_MISMATCH if the
    certificate is for another name, or its key is not the one that is pinned.
    """
    members = members or Members()
    ca_path, certificate_path, key_path = Path(tls.ca), Path(tls.certificate), Path(tls.key)
    ca_pem, certificate_pem = pem.read(ca_path), pem.read(certificate_path)
    authorities = pem.parse_certificates(ca_pem, ca_path)
    certificate, *others = pem.parse_certificates(certificate_pem, certificate_path)
    key_file = pem.read_secret(key_path, "the key")
    key, key_pem = pem.parse_key(key_file, key_path, _passphrase(tls))

    if key.public_key() != certificate.public_key():
        raise _invalid(f"the key {key_path} does not belong to the certificate {certificate_path}")
    if problem := pem.unusable(certificate.public_key()):
        raise _invalid(f"the key of {certificate_path} {problem}")
    if not members.stand_for(certificate, name):
        text = f"the certificate {certificate_path} is {members.words(certificate, name)}"
        raise InputError(
            Code.IDENTITY_MISMATCH,
            text if "also for" in text else f"{text}, but this party is {name!r}",
        )
    if members.pins.get(name, "") not in ("", pem.pin_of(certificate)):
        text = (
            f"the certificate {certificate_path} has another key ({pem.pin_of(certificate)}) "
            "than is pinned for"
        )
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"{text} {name}; correct the pin, or take the certificate of that key",
        )
    chain = pem.chain_of(certificate, others, authorities)
    if not chain:
        text = (
            f"the certificate {certificate_path} is not signed by the CA in {ca_path}; take "
            "both from one federation"
        )
        raise _invalid(f"{text}, and put intermediate certificates behind the party's own")
    for use in uses:
        if not pem.may(certificate, use):
            text = (
                f"the certificate {certificate_path} may not {_WORDS[use]}: its extended key "
                "usage lacks that"
            )
            raise _invalid(f"{text}; have it signed for both clientAuth and serverAuth")
    now = datetime.now(UTC)
    for document, path, remedy in (
        (
            certificate,
            certificate_path,
            f"`vfl certs issue {name}` or `request` and `sign` make a new one",
        ),
        *(
            (each, certificate_path, "its intermediate needs to be replaced")
            for each in chain[1:-1]
        ),
        (chain[-1], ca_path, "`vfl certs ca` makes a new authority"),
    ):
        problem = pem.out_of_date(document, now)
        if problem:
            hint = (
                remedy
                if problem.startswith("expired")
                else f"it is {pem.utc(now)} by this machine's clock"
            )
            raise _invalid(f"the certificate {path} {problem}: {hint}")
    return Credentials(
        ca_pem,
        certificate_pem,
        key_pem,
        (ca_pem, certificate_pem, key_file),
        name,
        tuple(chain),
        str(ca_path),
        str(certificate_path),
        members,
    )


def _passphrase(tls: TlsSettings) -> bytes | None:
    """Returns the key's passphrase, from the file that is named or else from the variable. Raises
    InputError.
    """
    if tls.passphrase_file is not None:
        return pem.read_secret(Path(tls.passphrase_file), "the passphrase").rstrip(b"\r\n")
    found = os.environ.get(PASSPHRASE)
    return None if found is None else found.encode()


def ends_soon(certificate: x509.Certificate, now: datetime) -> str:
    """Returns '' until 30 days before the end; then when it is, as ``ends at 2026-01-31 12:00 UTC,
    in 12 days; …``.

    For a certificate of less than 90 days it is the last third of its life: 30 days would be most
    of it.
    """
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < end - min(_SOON, (end - begin) / 3):
        return ""
    when = (
        f"ends at {pem.utc(end)}, in {(end - now).days} days"
        if now < end
        else f"ended at {pem.utc(end)}"
    )
    return (
        f"{when}; replace it in time: a running program uses the new one from the next "
        "connection on"
    )


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
