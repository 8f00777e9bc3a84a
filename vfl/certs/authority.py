"""The federation's certificate authority. Every party gets ``ca.pem``, and nobody gets ``ca.key``.

A party gets its certificate in one of two ways. ``issue`` makes the key and the certificate in one
place, for a demo or a single administrator. Or the party calls ``create_request`` and the authority
calls ``sign_request``, so that no private key is sent. All keys are ECDSA P-256, and all signatures
use SHA-256. ``describe`` shows a certificate or a request to a person.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import TypeAdapter, ValidationError

from vfl.certs import CA_DAYS, LIST_DAYS, MAX_DAYS, PARTY_DAYS
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.identity import pem
from vfl_common.identity.credentials import FILE, SIGNED, parse

# A new certificate is valid from this time before now, for machines whose clocks are slow.
CLOCK_SKEW = timedelta(days=1)
_LIST = (
    "# Revoked certificates, by serial number. Copy this file next to ca.pem at the server and "
    "at every party.\n"
)
_NAME: TypeAdapter[str] = TypeAdapter(Name)


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def create_authority(
    folder: Path,
    federation: str,
    days: int = CA_DAYS,
    *,
    force: bool = False,
    now: datetime | None = None,
) -> Path:
    """Writes ``ca.pem`` and ``ca.key`` (mode 0600) into ``folder`` and returns the path of
    ``ca.pem``.

    Args:
        folder: the folder for the files.
        federation: the authority's name, 1 to 64 characters. It is shown to people, but not
            checked.
        days: the validity in days.
        force: whether to replace an existing authority; all of its certificates become invalid.
        now: the start of the validity, in UTC; by default the current time.

    Raises InputError.
    """
    if not (1 <= len(federation) <= 64 and federation.isprintable()):
        raise InputError(
            Code.CONFIG_INVALID,
            f"federation: must have 1 to 64 printable characters (got {federation!r}). Choose "
            "another name.",
        )
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, federation)])
    certificate = (
        _make_builder(subject, subject, key.public_key(), now or datetime.now(UTC), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = {
        folder / "ca.key": _encode_key(key),
        folder / "ca.pem": certificate.public_bytes(Encoding.PEM),
    }
    pem.write_new(files, force=force)
    # An existing list of revoked certificates was signed by the old authority.
    (folder / SIGNED).unlink(missing_ok=True)
    return folder / "ca.pem"


def issue(
    folder: Path,
    name: str,
    days: int = PARTY_DAYS,
    *,
    out: Path | None = None,
    force: bool = False,
    now: datetime | None = None,
) -> TlsSettings:
    """Writes ``<name>.pem`` and ``<name>.key`` (mode 0600) for a party or the server, signed by the
    authority.

    Args:
        folder: the authority's folder, with ``ca.pem`` and ``ca.key``.
        name: the party's name in the recipe.
        days: the validity in days, limited by the validity of the authority's certificate.
        out: the folder for the new files; by default ``folder``.
        force: whether to replace existing files.
        now: the start of the validity, in UTC; by default the current time.

    Returns the paths of ``ca.pem``, the certificate and the key, as in a party file. Raises
    InputError.
    """
    check_name(name)
    _check_case(name, folder, out or folder)
    key = _new_key()
    certificate = _sign(_load_authority(folder), name, key.public_key(), days, now)
    out = out or folder
    settings = TlsSettings(
        ca=str(folder / "ca.pem"),
        certificate=str(out / f"{name}.pem"),
        key=str(out / f"{name}.key"),
    )
    pem.write_new(
        {Path(settings.key): _encode_key(key), Path(settings.certificate): certificate}, force=force
    )
    return settings


def give_ca(folder: Path, out: Path | None) -> Path:
    """Copies ``ca.pem`` from the authority's folder to ``out``, unless it exists there. Returns the
    path of the copy.

    Raises InputError.
    """
    target = (out or folder) / "ca.pem"
    if not target.exists():
        pem.write_new({target: pem.read(folder / "ca.pem")}, force=False)
    return target


def create_request(folder: Path, name: str, *, force: bool = False) -> Path:
    """Writes the private key ``<name>.key`` (mode 0600), and the request ``<name>.csr`` for the
    authority.

    Returns the path of the request. Raises InputError.
    """
    check_name(name)
    key = _new_key()
    path = folder / f"{name}.csr"
    pem.write_new(
        {folder / f"{name}.key": _encode_key(key), path: make_request(name, key)}, force=force
    )
    return path


def make_request(name: str, key: PrivateKeyTypes) -> bytes:
    """Returns a signing request for a key, in PEM."""
    assert isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)  # noqa: S101 - ``find_key_problem`` refuses other keys
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(Encoding.PEM)


def sign_request(
    csr: Path,
    folder: Path,
    name: str,
    days: int = PARTY_DAYS,
    *,
    out: Path | None = None,
    force: bool = False,
    now: datetime | None = None,
) -> Path:
    """Writes ``<name>.pem`` for the key of a request. Only the request's key goes into the
    certificate.

    Args:
        csr: the request; it must be signed with its own key, and be for ``name`` alone.
        folder: the authority's folder, with ``ca.pem`` and ``ca.key``.
        name: the party that sent the request.
        days, out, force, now: as in ``issue``; ``out`` defaults to the request's folder.

    Returns the certificate's path. Raises InputError.
    """
    check_name(name)
    _check_case(name, folder, out or csr.parent)
    request = pem.parse_request(pem.read(csr), csr)
    requested = pem.names(request)
    if requested != (name,):
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"{csr}: must be for {name!r} alone (got {pem.quote_names(requested)}). Check who sent "
            "the request.",
        )
    key = request.public_key()
    if problem := pem.find_key_problem(key):
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{csr}: its key {problem}. Make a new request with `vfl certs request`.",
        )
    assert isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey)  # noqa: S101 - ``key_problem`` refuses other keys
    path = (out or csr.parent) / f"{name}.pem"
    pem.write_new({path: _sign(_load_authority(folder), name, key, days, now)}, force=force)
    return path


def revoke(folder: Path, who: str) -> tuple[Path, bool]:
    """Adds the serial number of a certificate to the list ``revoked.txt`` in the authority's
    folder.

    Args:
        folder: the authority's folder, with ``ca.pem``; ``ca.key`` is not needed.
        who: the name of a party, whose certificate is ``<name>.pem`` in the folder, or the path of
            a certificate, ``….pem``.

    Returns the path of the list, and whether the list has changed. Raises InputError.
    """
    path, ca_path = Path(who) if who.endswith(".pem") else folder / f"{who}.pem", folder / "ca.pem"
    if not path.exists():
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: no such file. Name the certificate's file, as in vfl certs revoke "
            f"PATH/{path.name}, or put its serial number into {folder / FILE}.",
        )
    certificate = pem.parse_certificates(pem.read(path), path)[0]
    authority = pem.parse_certificates(pem.read(ca_path), ca_path)
    if pem.find_issuer(certificate, authority) is None or certificate in authority:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{path}: is not a party's certificate from the CA in {ca_path}. Name a certificate "
            "that this authority signed.",
        )
    list_path = folder / FILE
    content = pem.read(list_path) if list_path.exists() else _LIST.encode()
    if certificate.serial_number in parse(content, list_path):
        return list_path, False
    end = pem.utc(certificate.not_valid_after_utc)
    names = pem.quote_names(pem.names(certificate))
    line = f"{certificate.serial_number:x}  # {names}, ends at {end}\n"
    write_atomic(list_path, f"{content.decode('utf-8', 'replace').rstrip()}\n{line}")
    return list_path, True


def sign_list(folder: Path, days: int = LIST_DAYS, *, now: datetime | None = None) -> Path | None:
    """Writes the signed list of revoked certificates, ``revoked.crl``. Returns its path, or None if
    the folder has no ``ca.key``.

    Args:
        folder: the authority's folder, whose ``revoked.txt`` lists the serial numbers.
        days: the validity of the list in days; then the server and every party need a new list.
        now: the time of the signature, in UTC; by default the current time.

    Raises InputError.
    """
    if not 1 <= days <= MAX_DAYS:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--days: must be from 1 to {MAX_DAYS} (got {days}). Choose a number in this range.",
        )
    if not (folder / "ca.key").exists():
        return None
    authority, now = _load_authority(folder), now or datetime.now(UTC)
    unsigned_path, path = folder / FILE, folder / SIGNED
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now)
        .next_update(now + timedelta(days=days))
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    for serial in parse(pem.read(unsigned_path), unsigned_path) if unsigned_path.exists() else []:
        revoked = (
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        )
        builder = builder.add_revoked_certificate(revoked)
    content = builder.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    write_atomic(path, content.decode("ascii"))
    return path


def _check_case(name: str, *folders: Path) -> None:
    """Raises InputError if a folder has a certificate for a name that differs from ``name`` only by
    case.
    """
    for folder in folders:
        for path in sorted(folder.glob("*.pem")):
            if path.stem != name and path.stem.lower() == name.lower():
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{name!r}: differs from {path.stem!r} ({path}) only by case, which TLS "
                    "ignores. Choose another name.",
                )


def check_name(name: str) -> None:
    """Raises InputError unless ``name`` can be a party's name: it must match the recipe's pattern,
    and must not be an IP address or ``ca``.
    """
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name!r}: is not a valid party name. Use 1 to 64 letters, digits, '.', '_' and '-', "
            "with a letter or digit at both ends.",
        ) from error
    if name.lower() == "ca":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name!r}: is the name of the authority's files. Choose another name for the party.",
        )
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return
    raise InputError(
        Code.CONFIG_INVALID,
        f"{name!r}: is an IP address, which TLS does not accept as a party's name. Choose "
        "another name.",
    )


def _load_authority(folder: Path) -> _Authority:
    certificate_path, key_path = folder / "ca.pem", folder / "ca.key"
    certificate = pem.parse_certificates(pem.read(certificate_path), certificate_path)[0]
    key, _ = pem.parse_key(pem.read_secret(key_path, "the key"), key_path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{key_path}: is not an ECDSA key. Make one with `vfl certs ca`.",
        )
    if key.public_key() != certificate.public_key():
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{key_path}: does not belong to {certificate_path}. Put the authority's two files "
            "together.",
        )
    return _Authority(certificate, key)


def _sign(
    authority: _Authority,
    name: str,
    public_key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    days: int,
    now: datetime | None,
) -> bytes:
    """Signs a party's certificate and returns it as PEM."""
    now = now or datetime.now(UTC)
    latest = authority.certificate.not_valid_after_utc
    if now >= latest:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"the authority's certificate expired at {pem.utc(latest)}. Make a new authority "
            "with `vfl certs ca`.",
        )
    certificate = (
        _make_builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            authority.certificate.subject,
            public_key,
            now,
            days,
            latest=latest,
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


def _make_builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    now: datetime,
    days: int,
    *,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    """Returns a builder with the fields that the authority's certificate and a party's certificate
    have in common.
    """
    if not 1 <= days <= MAX_DAYS:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--days: must be from 1 to {MAX_DAYS} (got {days}). Choose a number in this range.",
        )
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(min(end, latest or end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _make_key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


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
