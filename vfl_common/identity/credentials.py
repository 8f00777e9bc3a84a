"""Reads and checks a party's credentials before the first connection, where mistakes are easiest to
explain.
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
# The extended key usages for a program that only connects, only listens, or does both.
DIALS = (ExtendedKeyUsageOID.CLIENT_AUTH,)
ANSWERS = (ExtendedKeyUsageOID.SERVER_AUTH,)
BOTH = DIALS + ANSWERS
# {extended key usage: its words in a message}.
_USE_WORDS = {
    ExtendedKeyUsageOID.CLIENT_AUTH: "dial (clientAuth)",
    ExtendedKeyUsageOID.SERVER_AUTH: "answer (serverAuth)",
}

# A certificate that ends within this time gives a warning.
_SOON = timedelta(days=30)


@dataclass(frozen=True)
class Credentials:
    """The federation's CA and a party's certificate and key, in PEM. ``name``: the member that the
    certificate names.

    ``files``: the contents of the three files as they were read, with a key that may be encrypted.
    ``chain``: the certificate, the intermediates from its file, and the authority in ``ca_pem`` at
    its end. ``members``: the members of the federation and their pinned keys. ``revoked``: the
    serial numbers of revoked certificates.
    """

    ca_pem: bytes
    certificate_pem: bytes
    # The private key, decrypted.
    key_pem: bytes = field(repr=False)
    files: tuple[bytes, bytes, bytes] = field(repr=False)
    name: str
    chain: tuple[x509.Certificate, ...]
    # The paths of the files, for messages.
    ca_file: str
    certificate_file: str
    members: Members = field(default_factory=Members)
    revoked: frozenset[int] = frozenset()

    @property
    def certificate(self) -> x509.Certificate:
        """The party's own certificate."""
        return self.chain[0]

    @property
    def authority(self) -> x509.Certificate:
        """The CA's certificate at the end of the chain."""
        return self.chain[-1]

    @property
    def not_after(self) -> datetime:
        """The time at which the party's certificate ends, in UTC."""
        return self.certificate.not_valid_after_utc

    @property
    def pems(self) -> tuple[bytes, bytes, bytes]:
        """The CA, the certificate and the decrypted key, in PEM."""
        return self.ca_pem, self.certificate_pem, self.key_pem

    def admit(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError if the certificate of the peer ``name`` is revoked, or if its key is not
        the peer's pinned key.
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
    """Reads and checks the files of the party ``name``: the files that ``load_pair`` reads, and the
    list of revoked certificates.

    Raises InputError as ``load_pair`` does, and if the list cannot be read, is out of date, or
    contains the party's own certificate.
    """
    pair = load_pair(tls, name=name, members=members, uses=uses)
    revoked = read_revoked(tls, pair.ca_pem)
    if revoked.late:
        raise _invalid(revoked.late)
    credentials = replace(pair, revoked=revoked.serials)
    require_own_unrevoked(credentials)
    return credentials


def require_own_unrevoked(credentials: Credentials) -> None:
    """Raises InputError if the party's own certificate is revoked."""
    if credentials.certificate.serial_number in credentials.revoked:
        raise _invalid(
            f"{credentials.certificate_file}: the certificate is revoked. Ask the CA administrator "
            "for a new one."
        )


def load_pair(
    tls: TlsSettings,
    *,
    name: str,
    members: Members | None = None,
    uses: Sequence[x509.ObjectIdentifier] = DIALS,
) -> Credentials:
    """Reads and checks the CA, the certificate and the key for the party ``name``.

    Args:
        members: The members of the federation. The certificate must not name another member. None
            if the members are not known.
        uses: The extended key usages that the certificate must allow.

    Raises InputError: CERTIFICATE_INVALID if a file cannot be read or is not PEM, if other users
    can read the key, if the key or the CA does not belong to the certificate, if gRPC cannot use
    the key, or if a certificate is expired, not yet valid or for other uses; IDENTITY_MISMATCH if
    the certificate is for another name, or its key is not the one that is pinned.
    """
    members = members or Members()
    ca_path, certificate_path, key_path = Path(tls.ca), Path(tls.certificate), Path(tls.key)
    ca_pem, certificate_pem = pem.read(ca_path), pem.read(certificate_path)
    authorities = pem.parse_certificates(ca_pem, ca_path)
    certificate, *intermediates = pem.parse_certificates(certificate_pem, certificate_path)
    key_file = pem.read_secret(key_path, "the key")
    key, key_pem = pem.parse_key(key_file, key_path, _passphrase(tls))

    if key.public_key() != certificate.public_key():
        raise _invalid(
            f"{key_path}: the key does not belong to the certificate {certificate_path}. Give the "
            "key with which the certificate was requested."
        )
    if problem := pem.find_key_problem(certificate.public_key()):
        raise _invalid(f"{certificate_path}: the key of the certificate {problem}")
    if not members.stands_for(certificate, name):
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"{certificate_path}: the certificate is {members.words(certificate, name)}, and this "
            f"party is {name!r}. Give a certificate for {name!r} and for no other member.",
        )
    if members.pins.get(name, "") not in ("", pem.compute_pin(certificate)):
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"{certificate_path}: the certificate has another key than the one pinned for {name} "
            f"(got {pem.compute_pin(certificate)}). Correct the pin, or give the certificate of "
            "the pinned key.",
        )
    chain = pem.build_chain(certificate, intermediates, authorities)
    if not chain:
        raise _invalid(
            f"{certificate_path}: the certificate is not signed by the CA in {ca_path}. Give the "
            "CA and the certificate of one federation, and append intermediate certificates to the "
            "party's own."
        )
    for use in uses:
        if not pem.allows_use(certificate, use):
            raise _invalid(
                f"{certificate_path}: the certificate may not {_USE_WORDS[use]}, because its "
                "extended key usage does not include it. Have it signed for both clientAuth and "
                "serverAuth."
            )
    now = datetime.now(UTC)
    for document, path, remedy in (
        (
            certificate,
            certificate_path,
            f"Make a new one with `vfl certs issue {name}`, or with `request` and `sign`.",
        ),
        *(
            (intermediate, certificate_path, "Replace the intermediate certificate in it.")
            for intermediate in chain[1:-1]
        ),
        (chain[-1], ca_path, "Make a new authority with `vfl certs ca`."),
    ):
        problem = pem.find_validity_problem(document, now)
        if problem:
            hint = (
                remedy
                if problem.startswith("expired")
                else f"Check this machine's clock: here it is {pem.utc(now)}."
            )
            raise _invalid(f"{path}: the certificate {problem}. {hint}")
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
    """Returns the key's passphrase from ``passphrase_file``, or else from the environment variable;
    None if neither is set. Raises InputError.
    """
    if tls.passphrase_file is not None:
        return pem.read_secret(Path(tls.passphrase_file), "the passphrase").rstrip(b"\r\n")
    passphrase = os.environ.get(PASSPHRASE)
    return None if passphrase is None else passphrase.encode()


def warn_if_ending(certificate: x509.Certificate, now: datetime) -> str:
    """Returns a warning such as ``ends at 2026-01-31 12:00 UTC, in 12 days. …`` if the certificate
    ends within 30 days; otherwise ''.

    A certificate that is valid for less than 90 days gets the warning in the last third of that
    time.
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
        f"{when}. Replace it in time: a running program uses the new one from its next connection "
        "on."
    )


def _invalid(message: str) -> InputError:
    return InputError(Code.CERTIFICATE_INVALID, message)
