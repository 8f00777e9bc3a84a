"""What ``load_credentials`` accepts and the sentence with which it refuses."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.harness.errors import assert_names, raises
from vfl.certs.authority import create_authority, issue
from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import load_credentials


def refusal(tls: TlsSettings, code: Code = Code.CERTIFICATE_INVALID, name: str = "bank") -> str:
    with raises(InputError, code) as caught:
        load_credentials(tls, name=name)
    return str(caught.value)


def test_good_credentials(tls: TlsSettings) -> None:
    credentials = load_credentials(tls, name="bank")
    assert credentials.ca_pem == Path(tls.ca).read_bytes()
    assert credentials.certificate_pem == Path(tls.certificate).read_bytes()
    assert credentials.key_pem == Path(tls.key).read_bytes()
    assert timedelta(days=364) < credentials.not_after - datetime.now(UTC) <= timedelta(days=365)
    assert "PRIVATE KEY" not in repr(credentials)


def test_old_and_new_authority_side_by_side(tls: TlsSettings, tmp_path: Path) -> None:
    other = create_authority(tmp_path / "next", "f")
    Path(tls.ca).write_bytes(other.read_bytes() + Path(tls.ca).read_bytes())
    assert load_credentials(tls, name="bank").name == "bank"


@pytest.mark.parametrize("part", ["ca", "certificate", "key"])
def test_missing_or_not_pem(tls: TlsSettings, part: str) -> None:
    path = Path(getattr(tls, part))
    path.write_text("no PEM\n")
    refusal(tls)
    path.unlink()
    refusal(tls)
    path.mkdir()
    refusal(tls)


def test_encrypted_key(tls: TlsSettings) -> None:
    key = load_pem_private_key(Path(tls.key).read_bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    Path(tls.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    refusal(tls)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_key_that_others_can_use(tls: TlsSettings, mode: int) -> None:
    Path(tls.key).chmod(mode)
    text = refusal(tls)
    assert f"mode {mode:04o}" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files that root owns")
def test_key_of_root_that_our_group_can_read(
    tls: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Secret that Kubernetes mounts for a user without rights."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for mode, fine in ((0o440, True), (0o640, True), (0o444, False), (0o660, False)):
        Path(tls.key).chmod(mode)
        if fine:
            assert load_credentials(tls, name="bank").name == "bank"
        else:
            assert f"mode {mode:04o}" in refusal(tls)


def test_key_of_another_certificate(ca: Path, tls: TlsSettings) -> None:
    shop = issue(ca, "shop")
    refusal(tls.model_copy(update={"key": shop.key}))


def test_certificate_of_another_authority_with_the_same_name(
    tls: TlsSettings, tmp_path: Path
) -> None:
    other = create_authority(tmp_path / "other", "f")
    assert_names(refusal(tls.model_copy(update={"ca": str(other)})), "bank.pem", "ca.pem")


def test_certificate_of_another_party(ca: Path) -> None:
    mallory = issue(ca, "mallory")
    refusal(mallory, Code.IDENTITY_MISMATCH)


def test_expired_and_not_yet_valid(ca: Path) -> None:
    expired = issue(ca, "bank", days=1, now=datetime(2020, 1, 1, 12, 30, tzinfo=UTC))
    assert_names(refusal(expired), "bank.pem")
    early = issue(ca, "bank", force=True, now=datetime.now(UTC) + timedelta(days=2))
    assert_names(refusal(early), "bank.pem")


def test_expired_authority(tls: TlsSettings, ca: Path) -> None:
    """The library issues nothing that outlives its authority; other software may."""
    certificate = x509.load_pem_x509_certificate(Path(tls.ca).read_bytes())
    key = load_pem_private_key((ca / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    builder = (
        x509.CertificateBuilder(certificate.issuer, certificate.subject, key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2020, 1, 11, tzinfo=UTC))
    )
    Path(tls.ca).write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    refusal(tls)
