"""What one party seals for another, and who a party says it is."""

from __future__ import annotations

import base64
import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.errors import raises
from tests.harness.pki import company, dns, signer, written
from vfl.certs import authority
from vfl.certs.authority import create_authority, issue, revoke
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials, Members, load_credentials
from vfl_common.identity.pem import compute_pin
from vfl_party.psi.sealed import OVERHEAD, PUBLIC_BYTES, KeyPair, verify_introduction

RUN, STEP = b"run 1", b"run 1, step 2, from shop to clinic"
A, B, C = KeyPair.new(), KeyPair.new(), KeyPair.new()


@pytest.fixture
def shop(ca: Path) -> Credentials:
    return load_credentials(issue(ca, "shop"), name="shop")


@pytest.fixture
def clinic(ca: Path) -> Credentials:
    return load_credentials(issue(ca, "clinic"), name="clinic")


def refusal(introduction: bytes, credentials: Credentials, code: Code, context: bytes = RUN) -> str:
    with raises(PeerError, code, party="shop") as caught:
        verify_introduction(introduction, credentials, "shop", context)
    return str(caught.value)


# -- introductions


def test_a_public_key_with_its_holder(shop: Credentials, clinic: Credentials) -> None:
    introduction = A.introduction(shop, RUN)
    assert verify_introduction(introduction, clinic, "shop", RUN) == A.public
    assert len(A.public) == PUBLIC_BYTES
    assert KeyPair(A.secret).public == A.public != B.public
    assert A.secret not in introduction
    assert b"PRIVATE" not in introduction
    assert "secret" not in repr(A)


def test_a_key_in_the_certificates_file_stays_here(shop: Credentials, clinic: Credentials) -> None:
    both = replace(shop, certificate_pem=shop.certificate_pem + shop.key_pem)
    introduction = A.introduction(both, RUN)
    assert b"PRIVATE" not in introduction
    assert verify_introduction(introduction, clinic, "shop", RUN) == A.public


def with_key(ca: Path, monkeypatch: pytest.MonkeyPatch, key: PrivateKeyTypes) -> Credentials:
    monkeypatch.setattr(authority, "_new_key", lambda: key)
    return load_credentials(issue(ca, "shop", force=True), name="shop")


def test_a_key_of_rsa(ca: Path, clinic: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = with_key(ca, monkeypatch, rsa.generate_private_key(65537, 2048))
    assert verify_introduction(A.introduction(shop, RUN), clinic, "shop", RUN) == A.public
    refusal(A.introduction(shop, b"run 2"), clinic, Code.IDENTITY_MISMATCH)


def test_another_kind_of_key(
    ca: Path, clinic: Credentials, shop: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    with raises(InputError, Code.CERTIFICATE_INVALID, names=("shop", "2048")):
        with_key(ca, monkeypatch, key)
    text = f"{shop.certificate_file}: the key of the certificate is neither ECDSA nor RSA. Make another key, and have it signed."
    odd = replace(
        shop, key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(InputError) as caught:
        A.introduction(odd, RUN)
    assert (caught.value.code, str(caught.value)) == (Code.CERTIFICATE_INVALID, text)
    certificate = x509.load_pem_x509_certificate((ca / "shop.pem").read_bytes())
    forged = A.introduction(replace(shop, chain=(certificate, shop.authority)), RUN)
    text = "the key of the certificate of shop is Ed25519, which gRPC cannot use"
    refusal(forged, clinic, Code.CERTIFICATE_INVALID)


def test_of_another_party(clinic: Credentials) -> None:
    refusal(A.introduction(clinic, RUN), clinic, Code.IDENTITY_MISMATCH)


def test_signed_with_another_key(shop: Credentials, clinic: Credentials) -> None:
    forged = A.introduction(replace(shop, key_pem=clinic.key_pem), RUN)
    refusal(forged, clinic, Code.IDENTITY_MISMATCH)


def test_for_another_run_or_another_key(shop: Credentials, clinic: Credentials) -> None:
    introduction = A.introduction(shop, RUN)
    refusal(introduction, clinic, Code.IDENTITY_MISMATCH, b"run 2")
    refusal(B.public + introduction[32:], clinic, Code.IDENTITY_MISMATCH)


def test_of_another_federation(tmp_path: Path, clinic: Credentials) -> None:
    create_authority(tmp_path / "other", "f")
    stranger = load_credentials(issue(tmp_path / "other", "shop"), name="shop")
    refusal(A.introduction(stranger, RUN), clinic, Code.CERTIFICATE_INVALID)


def test_by_either_authority_of_a_file(tmp_path: Path, clinic: Credentials) -> None:
    other = create_authority(tmp_path / "other", "f").read_bytes()
    newer = load_credentials(issue(tmp_path / "other", "shop"), name="shop")
    both = replace(clinic, ca_pem=clinic.ca_pem + other)
    assert verify_introduction(A.introduction(newer, RUN), both, "shop", RUN) == A.public


def test_expired(ca: Path, shop: Credentials, clinic: Credentials) -> None:
    settings = issue(ca, "shop", days=1, force=True, now=datetime.now(UTC) - timedelta(days=9))
    old = Path(settings.certificate).read_bytes()

    chain = (x509.load_pem_x509_certificate(old), shop.authority)
    expired = replace(shop, chain=chain, key_pem=Path(settings.key).read_bytes())
    refusal(A.introduction(expired, RUN), clinic, Code.CERTIFICATE_INVALID)


def test_by_an_intermediate_of_the_authority(tmp_path: Path) -> None:
    """The introduction has the chain; all have the root."""
    below = company(tmp_path).intermediate()
    found = {}
    for name in ("shop", "clinic"):
        tls = written(tmp_path, name, below.leaf(dns(name, f"{name}.example.org")), below)
        found[name] = load_credentials(
            tls, name=name, members=Members(frozenset(["shop", "clinic"]))
        )
    assert (
        verify_introduction(A.introduction(found["shop"], RUN), found["clinic"], "shop", RUN)
        == A.public
    )
    alone = replace(found["shop"], chain=(found["shop"].certificate, found["shop"].authority))
    refusal(A.introduction(alone, RUN), found["clinic"], Code.CERTIFICATE_INVALID)


def test_that_names_two_members(ca: Path, shop: Credentials, clinic: Credentials) -> None:
    leaf, key = signer(ca).leaf(dns("shop", "clinic"))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    both = replace(shop, chain=(leaf, shop.authority), key_pem=pem)
    knowing = replace(clinic, members=Members(frozenset(["shop", "clinic"])))
    refusal(A.introduction(both, RUN), knowing, Code.IDENTITY_MISMATCH)


def test_with_another_key_than_is_pinned(ca: Path, shop: Credentials, clinic: Credentials) -> None:
    """The keeper of the authority reads what is sealed for the shop, unless its key is pinned."""
    pins = {"shop": compute_pin(shop.certificate)}
    knowing = replace(clinic, members=Members(frozenset(["shop", "clinic"]), pins))
    assert verify_introduction(A.introduction(shop, RUN), knowing, "shop", RUN) == A.public
    forged = load_credentials(issue(ca, "shop", force=True), name="shop")
    assert verify_introduction(A.introduction(forged, RUN), clinic, "shop", RUN) == A.public
    refusal(A.introduction(forged, RUN), knowing, Code.IDENTITY_MISMATCH)


def test_revoked(ca: Path, shop: Credentials) -> None:
    revoke(ca, "shop")
    clinic = load_credentials(issue(ca, "clinic"), name="clinic")
    refusal(A.introduction(shop, RUN), clinic, Code.CERTIFICATE_INVALID)


def test_no_public_key(shop: Credentials, clinic: Credentials) -> None:
    """A party that signs a key with which everybody knows the shared secret."""

    class Weak(KeyPair):
        public = bytes(32)

    refusal(Weak(A.secret).introduction(shop, RUN), clinic, Code.MALFORMED_MESSAGE)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 34, 60, 120, 300])
def test_half_an_introduction(shop: Credentials, clinic: Credentials, size: int) -> None:
    refusal(A.introduction(shop, RUN)[:size], clinic, Code.MALFORMED_MESSAGE)


@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
def test_a_changed_introduction(shop: Credentials, clinic: Credentials, flip: int) -> None:
    """A change is refused, or changes nothing (a line end of the PEM)."""
    introduction = A.introduction(shop, RUN)
    refused = 0
    for position in range(len(introduction)):
        changed = bytearray(introduction)
        changed[position] ^= flip
        try:
            assert verify_introduction(bytes(changed), clinic, "shop", RUN) == A.public
        except PeerError:
            refused += 1
    assert refused > 0.9 * len(introduction)


def test_a_certificate_with_a_negative_number(shop: Credentials, clinic: Credentials) -> None:
    """The library only warns of it, on a screen that is not the peer's."""
    der = bytearray(shop.certificate.public_bytes(Encoding.DER))
    # After the version and the number's tag and length.
    der[der.index(b"\xa0\x03\x02\x01\x02\x02") + 7] |= 0x80
    pem = (
        b"-----BEGIN CERTIFICATE-----\n"
        + base64.encodebytes(bytes(der))
        + b"-----END CERTIFICATE-----\n"
    )
    said = A.introduction(shop, RUN)
    with warnings.catch_warnings():
        # As a program does.
        warnings.simplefilter("ignore")
        refusal(said[: said.index(b"-----BEGIN")] + pem, clinic, Code.MALFORMED_MESSAGE)


# -- sealed messages


@given(st.binary(max_size=500), st.binary(max_size=50))
def test_opens_what_was_sealed(plain: bytes, context: bytes) -> None:
    sealed = A.seal(B.public, context, plain)
    assert len(sealed) == len(plain) + OVERHEAD
    assert B.open(A.public, context, sealed, "shop") == plain


def test_opens_after_a_restart() -> None:
    sealed = A.seal(B.public, STEP, b"points")
    assert KeyPair(B.secret).open(A.public, STEP, sealed, "shop") == b"points"


def test_the_same_again_looks_different() -> None:
    first, second = (A.seal(B.public, STEP, b"points") for _ in range(2))
    assert first[12:] != second[12:]
    assert (
        B.open(A.public, STEP, first, "shop") == B.open(A.public, STEP, second, "shop") == b"points"
    )


def refused(reader: KeyPair, peer: bytes, context: bytes, sealed: bytes) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, party="shop"):
        reader.open(peer, context, sealed, "shop")


def test_opens_for_the_receiver_in_the_context_alone() -> None:
    sealed = A.seal(B.public, STEP, b"points")
    # The relay, or another party.
    refused(C, A.public, STEP, sealed)
    # As if from another sender.
    refused(B, C.public, STEP, sealed)
    # Sent back.
    refused(A, B.public, STEP, sealed)
    refused(B, A.public, b"run 1, step 3", sealed)
    refused(B, A.public, STEP, b"")
    refused(B, A.public, STEP, sealed[: OVERHEAD - 1])


@settings(max_examples=50)
@given(st.data())
def test_a_changed_byte(data: st.DataObject) -> None:
    sealed = bytearray(A.seal(B.public, STEP, b"points"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    refused(B, A.public, STEP, bytes(sealed))
