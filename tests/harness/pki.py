"""Certificates as a company's own authority makes them, which ``vfl certs`` never would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vfl_common.config.party import TlsSettings

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)


@dataclass(frozen=True)
class Signer:
    """An authority, or one below it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def intermediate(
        self,
        name: str = "below",
        *,
        ca: bool = True,
        path_length: int | None = None,
        constraint: str = "",
    ) -> Signer:
        """An authority that this one has signed; ``ca``: whether it may sign; ``constraint``: the
        names that it may.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(name, key, [], 300).add_extension(
            x509.BasicConstraints(ca=ca, path_length=path_length if ca else None), critical=True
        )
        if constraint:
            names = x509.NameConstraints([x509.DNSName(constraint)], None)
            builder = builder.add_extension(names, critical=True)
        return Signer(builder.sign(self.key, hashes.SHA256()), key)

    def leaf(
        self,
        names: Sequence[x509.GeneralName],
        key: Key | None = None,
        uses: Sequence[x509.ObjectIdentifier] | None = BOTH,
        common_name: str = "a company",
    ) -> tuple[x509.Certificate, Key]:
        """A certificate and its key; ``uses`` None: without that extension."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(common_name, key, names, 30)
        if uses is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        return builder.sign(self.key, hashes.SHA256()), key

    def crl(self, serials: Sequence[int], ends: datetime | None = None) -> bytes:
        """A signed list of revoked certificates, PEM."""
        ends = ends or datetime.now(UTC) + timedelta(days=9)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(ends - timedelta(days=10)).next_update(ends)
        for serial in serials:
            each = (
                x509.RevokedCertificateBuilder()
                .serial_number(serial)
                .revocation_date(ends - timedelta(days=10))
            )
            builder = builder.add_revoked_certificate(each.build())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _builder(
        self, name: str, key: Key, names: Sequence[x509.GeneralName], days: int
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=days))
        )
        return (
            builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            if names
            else builder
        )


def signer(ca: Path) -> Signer:
    """The authority of a folder that ``vfl certs ca`` has made."""
    key = load_pem_private_key((ca / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Signer(x509.load_pem_x509_certificate((ca / "ca.pem").read_bytes()), key)


def company(folder: Path) -> Signer:
    """A root that allows authorities below it, as ``ca.pem`` of a new folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=900))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    root = Signer(builder.sign(key, hashes.SHA256()), key)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.pem").write_bytes(root.pem)
    return root


def dns(*names: str) -> list[x509.GeneralName]:
    return [x509.DNSName(name) for name in names]


def written(
    ca: Path,
    name: str,
    leaf: tuple[x509.Certificate, Key],
    *behind: Signer,
    passphrase: bytes | None = None,
) -> TlsSettings:
    """Writes a pair as ``<name>.pem``, with the certificates of ``behind``, and ``<name>.key``."""
    certificate, key = leaf
    (ca / f"{name}.pem").write_bytes(
        certificate.public_bytes(Encoding.PEM) + b"".join(each.pem for each in behind)
    )
    how: KeySerializationEncryption = (
        BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    )
    path = ca / f"{name}.key"
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    return TlsSettings(ca=str(ca / "ca.pem"), certificate=str(ca / f"{name}.pem"), key=str(path))
