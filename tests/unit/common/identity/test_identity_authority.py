"""The authority: what it signs, what it writes, what it refuses."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.harness.errors import raises
from vfl.certs.authority import create_authority, create_request, issue, sign_request
from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity import pem
from vfl_common.identity.credentials import load_credentials


def certificate_of(path: Path | str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def request_with(
    path: Path,
    *san: x509.GeneralName,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
) -> Path:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if san:
        builder = builder.add_extension(x509.SubjectAlternativeName(san), critical=False)
    key = key or ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "test federation")
    return tmp_path / "ca"


def test_authority_may_sign_parties_and_nothing_below_them(ca: Path) -> None:
    certificate = certificate_of(ca / "ca.pem")
    extensions = certificate.extensions
    assert certificate.issuer == certificate.subject
    basic = extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value) == (True, x509.BasicConstraints(ca=True, path_length=0))
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert usage.value.crl_sign
    assert not usage.value.digital_signature
    assert extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert isinstance(certificate.signature_hash_algorithm, hashes.SHA256)


def test_party_may_dial_and_answer_under_its_name_alone(ca: Path) -> None:
    authority = certificate_of(ca / "ca.pem")
    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    certificate = certificate_of(issue(ca, "bank", days=7, now=now).certificate)
    extensions = certificate.extensions
    assert pem.names(certificate) == ("bank",)
    assert set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.CLIENT_AUTH,
        ExtendedKeyUsageOID.SERVER_AUTH,
    }
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key_id = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert (
        extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        == key_id
    )
    assert certificate.not_valid_before_utc == now - timedelta(days=1)
    assert certificate.not_valid_after_utc == now + timedelta(days=7)
    certificate.verify_directly_issued_by(authority)


def test_party_is_valid_no_longer_than_the_authority(tmp_path: Path) -> None:
    create_authority(tmp_path, "short", days=2)
    certificate = certificate_of(issue(tmp_path, "bank", days=100).certificate)
    assert (
        certificate.not_valid_after_utc == certificate_of(tmp_path / "ca.pem").not_valid_after_utc
    )


def test_keys_have_mode_0600_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    os_open = os.open

    def recording_open(path: Path, flags: int, mode: int = 0o777) -> int:
        handle = os_open(path, flags, mode)
        if path.suffix == ".key":
            modes.append(os.fstat(handle).st_mode & 0o777)
        return handle

    monkeypatch.setattr("vfl_common.identity.pem.os.open", recording_open)
    umask = os.umask(0)
    try:
        create_authority(tmp_path, "f")
        create_authority(tmp_path, "f", force=True)
        issue(tmp_path, "bank")
        create_request(tmp_path, "shop")
    finally:
        os.umask(umask)
    # At the moment of creation, before any content.
    assert modes == [0o600] * 4
    for name in ("ca", "bank", "shop"):
        assert (tmp_path / f"{name}.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ca.pem").stat().st_mode & 0o777 == 0o644


def test_force_does_not_keep_the_loose_mode_of_a_replaced_key(ca: Path) -> None:
    (ca / "ca.key").chmod(0o644)
    create_authority(ca, "f", force=True)
    assert (ca / "ca.key").stat().st_mode & 0o777 == 0o600


def test_nothing_is_overwritten_without_force(ca: Path) -> None:
    issue(ca, "bank")
    csr = create_request(ca, "shop")
    sign_request(csr, ca, "shop")
    before = {path: path.read_bytes() for path in ca.iterdir()}
    for attempt in (
        lambda force: create_authority(ca, "f", force=force),
        lambda force: issue(ca, "bank", force=force),
        lambda force: create_request(ca, "shop", force=force),
        lambda force: sign_request(csr, ca, "shop", force=force),
    ):
        with raises(InputError, Code.FILE_INVALID, names="--force"):
            attempt(False)
        assert {path: path.read_bytes() for path in ca.iterdir()} == before
    issue(ca, "bank", force=True)
    assert (ca / "bank.key").read_bytes() != before[ca / "bank.key"]


def test_half_an_authority_is_not_completed(ca: Path) -> None:
    (ca / "ca.pem").unlink()
    with raises(InputError, Code.FILE_INVALID, names=("--force", "ca.key")):
        create_authority(ca, "f")
    assert not (ca / "ca.pem").exists()


@pytest.mark.parametrize(
    "name", ["", "-bank", "a b", "../bank", "bank\n", "*", "x" * 65, "ca", "CA", "10.0.0.1"]
)
def test_names_that_no_party_can_have(ca: Path, name: str) -> None:
    for attempt in (issue, create_request):
        with raises(InputError, Code.CONFIG_INVALID):
            attempt(ca, name)
    assert {path.name for path in ca.iterdir()} == {"ca.pem", "ca.key"}


@pytest.mark.parametrize("name", ["b", "Bank_2", "a..b", "x" * 64, "bank.key"])
def test_names_that_a_party_can_have(ca: Path, name: str) -> None:
    assert load_credentials(issue(ca, name), name=name).name == name


def test_days_and_federation_are_checked(ca: Path, tmp_path: Path) -> None:
    for days in (0, -1, 36501):
        with raises(InputError, Code.CONFIG_INVALID):
            issue(ca, "bank", days=days)
    for federation in ("", "x" * 65, "a\nb"):
        with raises(InputError, Code.CONFIG_INVALID):
            create_authority(tmp_path, federation)


def test_an_authority_that_cannot_sign(ca: Path, tmp_path: Path) -> None:
    with raises(InputError, Code.CERTIFICATE_INVALID):
        issue(tmp_path / "nowhere", "bank")
    with raises(InputError, Code.CERTIFICATE_INVALID):
        issue(ca, "bank", now=datetime.now(UTC) + timedelta(days=4000))
    (ca / "ca.key").chmod(0o640)
    with raises(InputError, Code.CERTIFICATE_INVALID, names=("ca.key", "0640")):
        issue(ca, "bank")
    create_authority(tmp_path / "other", "other")
    (tmp_path / "other" / "ca.key").replace(ca / "ca.key")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="ca.key"):
        issue(ca, "bank")


def test_a_folder_that_cannot_be_made(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(InputError, Code.FILE_INVALID, names="bank.key"):
        issue(ca, "bank", out=tmp_path / "file" / "below")


def test_a_request_is_signed_without_its_key(ca: Path, tmp_path: Path) -> None:
    home = tmp_path / "bank"
    csr = create_request(home, "bank")
    arrived = tmp_path / "inbox.csr"
    arrived.write_bytes(csr.read_bytes())
    certificate = sign_request(arrived, ca, "bank", days=30, out=tmp_path / "signed")
    assert certificate == tmp_path / "signed" / "bank.pem"
    assert {path.name for path in certificate.parent.iterdir()} == {"bank.pem"}
    tls = TlsSettings(
        ca=str(ca / "ca.pem"), certificate=str(certificate), key=str(home / "bank.key")
    )
    assert load_credentials(tls, name="bank").name == "bank"


def test_requests_for_other_or_more_names_are_refused(ca: Path, tmp_path: Path) -> None:
    bank, shop = x509.DNSName("bank"), x509.DNSName("shop")
    address = x509.UniformResourceIdentifier("bank")
    for san in ((shop,), (bank, shop), (bank, bank), (address,), ()):
        with raises(InputError, Code.IDENTITY_MISMATCH, names=("bank", "bank.csr")):
            sign_request(request_with(tmp_path / "bank.csr", *san), ca, "bank")
    assert not (tmp_path / "bank.pem").exists()


def test_of_a_request_only_the_key_is_taken(ca: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name.from_rfc4514_string("CN=mallory"))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bank")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    csr = tmp_path / "bank.csr"
    csr.write_bytes(request.public_bytes(Encoding.PEM))
    certificate = certificate_of(sign_request(csr, ca, "bank"))
    assert certificate.subject.rfc4514_string() == "CN=bank"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.public_key() == key.public_key()


def test_requests_that_are_damaged_or_weak_are_refused(ca: Path, tmp_path: Path) -> None:
    csr = tmp_path / "bank.csr"
    csr.write_text("no request")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank.csr"):
        sign_request(csr, ca, "bank")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="missing.csr"):
        sign_request(tmp_path / "missing.csr", ca, "bank")

    der = x509.load_pem_x509_csr(
        create_request(tmp_path, "bank", force=True).read_bytes()
    ).public_bytes(Encoding.DER)
    forged = x509.load_der_x509_csr(der.replace(b"bank", b"bans"))
    csr.write_bytes(forged.public_bytes(Encoding.PEM))
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank.csr"):
        sign_request(csr, ca, "bans")

    bank = x509.DNSName("bank")
    request_with(csr, bank, key=rsa.generate_private_key(65537, 1024))  # noqa: S505 - what is refused
    with raises(InputError, Code.CERTIFICATE_INVALID, names=("bank.csr", "1024")):
        sign_request(csr, ca, "bank")
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(x509.SubjectAlternativeName([bank]), critical=False)
    csr.write_bytes(
        builder.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(Encoding.PEM)
    )
    with raises(InputError, Code.CERTIFICATE_INVALID, names=("bank.csr", "2048")):
        sign_request(csr, ca, "bank")
