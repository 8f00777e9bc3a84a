"""Reads and checks a party's credentials before the first connection, where mistakes are easiest to
explain; the members of the federation and their pinned keys; the lists of revoked certificates,
which the CA administrator gives to the server and every party.

A list of revoked certificates has one of two forms. A signed list is an X.509 CRL in PEM from an
authority in ``ca.pem``, and must be replaced before its ``nextUpdate``. A plain list is a text file
with one serial number per line, in hexadecimal digits, with or without colons; ``#`` begins a
comment. Both ``revoked.crl`` and ``revoked.txt`` in the folder of the CA are used, unless
``tls.revoked`` or ``--revoked`` names another file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtendedKeyUsageOID

from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.text import count


@dataclass(frozen=True)
class Members:
    """The names of the server and all parties, and their pinned keys.

    A certificate may contain further DNS names, such as a company's host names, but never the names
    of two members. The expected name must match exactly. Another member's name is recognised in any
    spelling (``SERVER``, ``server.``), because TLS treats these as equal.
    """

    # Empty if the members are not known.
    names: frozenset[str] = frozenset()
    # {name: ``sha256:`` and the digest of the pinned public key}.
    pins: Mapping[str, str] = field(default_factory=dict)

    def stands_for(self, certificate: x509.Certificate, name: str) -> bool:
        """Returns whether the certificate is for ``name`` and for no other member."""
        return name in pem.list_dns_names(certificate) and not self._find_other_members(
            certificate, name
        )

    def find_name(self, certificate: x509.Certificate) -> str:
        """Returns the name for which a caller's certificate stands: the member's name in it, or its
        only name.

        Raises PeerError (IDENTITY_MISMATCH) if the certificate has no name, or several names that
        do not include exactly one member.
        """
        names = pem.list_dns_names(certificate)
        members = sorted(self.names.intersection(names))
        if len(names) == 1 and not members:
            return names[0]
        if len(members) != 1 or self._find_other_members(certificate, members[0]):
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                "a caller's certificate must have the name of exactly one member (got "
                f"{count(len(names), 'name')}). Have one issued for one member.",
            )
        return members[0]

    def _find_other_members(self, certificate: x509.Certificate, name: str) -> list[str]:
        names = {_normalise_name(dns_name) for dns_name in pem.list_dns_names(certificate)}
        return [other for other in self.names if other != name and _normalise_name(other) in names]

    def words(self, certificate: x509.Certificate, name: str) -> str:
        """Returns the words for a message that a certificate stands for other names than ``name``
        alone.
        """
        other_members = self._find_other_members(certificate, name)
        if name in pem.list_dns_names(certificate) and other_members:
            return f"for {name!r} and also for {pem.quote_names(tuple(sorted(other_members)))}"
        return f"for {pem.quote_names(pem.names(certificate))}"

    def require_pin(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError (IDENTITY_MISMATCH) if the key in the certificate of ``name`` is not the
        pinned key.
        """
        pinned, pin = self.pins.get(name), pem.compute_pin(certificate)
        if pinned is not None and pinned != pin:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"the certificate of {name} has another key than the one pinned for it",
                party=name,
            ).privately(
                f"the certificate of {name} has another key than the one pinned for it (got {pin}, "
                f"pinned {pinned}). Ask {name} whether it has a new key, then correct the pin."
            )


def collect_members(*recipes: Recipe, pins: Mapping[str, str] | None = None) -> Members:
    """Returns the members of the recipes. Raises InputError (CONFIG_INVALID) if a pin is for a name
    that is not a member.
    """
    names = frozenset(
        name
        for recipe in recipes
        for name in (recipe.server, *(party.name for party in recipe.parties))
    )
    for name in pins or {}:
        if name not in names:
            raise InputError(
                Code.CONFIG_INVALID,
                f"pins: {name!r} is neither the server nor a party of recipe "
                f"{' or '.join(dict.fromkeys(recipe.name for recipe in recipes))}. Choose one of "
                f"{', '.join(sorted(names))}.",
            )
    return Members(names, dict(pins or {}))


def _normalise_name(name: str) -> str:
    return name.lower().rstrip(".")


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


def ends_soon(certificate: x509.Certificate, now: datetime) -> bool:
    """Returns whether a certificate is in its last 30 days, or in the last third of its time if it
    is valid for less than 90 days.
    """
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= end - min(_SOON, (end - begin) / 3)


def warn_if_ending(certificate: x509.Certificate, now: datetime) -> str:
    """Returns a warning such as ``ends at 2026-01-31 12:00 UTC, in 12 days. …`` if the certificate
    ends within 30 days; otherwise ''.

    A certificate that is valid for less than 90 days gets the warning in the last third of that
    time.
    """
    end = certificate.not_valid_after_utc
    if not ends_soon(certificate, now):
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
