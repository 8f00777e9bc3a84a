"""For whom a certificate stands, what a company's own certificates may look like, and pins of
keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.harness.cases import recipe
from tests.harness.pki import Signer, company, dns, signer, written
from vfl.certs.authority import issue
from vfl_common.config.base import parse
from vfl_common.config.party import PartyFile, TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import ANSWERS, BOTH, DIALS, load_credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.identity.members import Members, members_of
from vfl_server.cli import _pins

MEMBERS = Members(frozenset({"server", "bank", "shop"}))
SPIFFE = x509.UniformResourceIdentifier("spiffe://example.org/bank")


def refusal(
    tls: TlsSettings, code: Code = Code.CERTIFICATE_INVALID, members: Members = MEMBERS
) -> str:
    with pytest.raises(InputError) as caught:
        load_credentials(tls, name="bank", members=members, uses=BOTH)
    assert caught.value.code is code
    return str(caught.value)


# -- names
# ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        dns("bank"),
        dns("bank.example.org", "bank"),
        [SPIFFE, *dns("bank")],
        [*dns("bank", "stranger"), x509.RFC822Name("shop@example.org")],
    ],
)
def test_a_member_s_name_is_among_the_certificate_s(
    ca: Path, names: Sequence[x509.GeneralName]
) -> None:
    tls = written(ca, "bank", signer(ca).leaf(names))
    assert load_credentials(tls, name="bank", members=MEMBERS, uses=BOTH).name == "bank"
    assert (
        Keyring(issue(ca, "server"), "server", MEMBERS).admit(Path(tls.certificate).read_bytes())
        == "bank"
    )


@pytest.mark.parametrize(
    "names",
    [
        dns("bank", "shop"),
        dns("bank", "SHOP"),
        dns("bank", "shop."),
        dns("server", "bank"),
        dns("stranger", "another"),
        dns("stranger", "Bank"),
        [SPIFFE],
        [x509.RFC822Name("bank")],
        [],
    ],
)
def test_a_caller_s_certificate_stands_for_one_member(
    ca: Path, names: Sequence[x509.GeneralName]
) -> None:
    certificate, _ = signer(ca).leaf(names, common_name="bank")
    with pytest.raises(PeerError, match="exactly one of them must be a member's") as caught:
        Keyring(issue(ca, "server"), "server", MEMBERS).admit(
            certificate.public_bytes(Encoding.PEM)
        )
    assert caught.value.code is Code.IDENTITY_MISMATCH
    assert not MEMBERS.stand_for(certificate, "bank")


@pytest.mark.parametrize("name", ["stranger", "BANK", "bank.", "*.example.org"])
def test_a_caller_s_only_name_is_what_it_is(ca: Path, name: str) -> None:
    """Whoever asks for the name finds that it has no part."""
    certificate, _ = signer(ca).leaf(dns(name))
    keyring = Keyring(issue(ca, "server"), "server", MEMBERS)
    assert keyring.admit(certificate.public_bytes(Encoding.PEM)) == name
    # It is not noted: there may be any number of strangers.
    assert set(keyring.ends()) == {"server", "ca"}


def test_a_certificate_that_cannot_be_read_is_the_caller_s_fault(ca: Path) -> None:
    with pytest.raises(PeerError, match="cannot be read") as caught:
        Keyring(issue(ca, "server"), "server", MEMBERS).admit(
            b"-----BEGIN CERTIFICATE-----\nAA==\n"
        )
    assert caught.value.code is Code.CERTIFICATE_INVALID


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (dns("bank", "shop"), "is for 'bank' and also for 'shop'; it must name one member alone"),
        (dns("Bank"), "is for 'Bank', but this party is 'bank'"),
        (
            [SPIFFE],
            "is for 'UniformResourceIdentifier:spiffe://example.org/bank', but this party is 'bank'",
        ),
        ([], "is for nobody, but this party is 'bank'"),
    ],
)
def test_one_s_own_certificate_is_explained(
    ca: Path, names: Sequence[x509.GeneralName], text: str
) -> None:
    tls = written(ca, "bank", signer(ca).leaf(names, common_name="bank"))
    assert refusal(tls, Code.IDENTITY_MISMATCH) == f"the certificate {tls.certificate} {text}"


def test_names_that_differ_by_capitals_are_refused(ca: Path) -> None:
    parties = [{"name": "bank", "role": "active"}, {"name": "Bank", "role": "passive"}]
    with pytest.raises(ValueError, match="'Bank' and 'bank' differ by capitals alone"):
        Recipe.model_validate(recipe(2) | {"parties": parties})
    with pytest.raises(ValueError, match="'Server' and 'server' differ by capitals alone"):
        Recipe.model_validate(
            recipe(2) | {"parties": [*parties[:1], {"name": "Server", "role": "passive"}]}
        )
    issue(ca, "bank")
    with pytest.raises(
        InputError, match=r"'Bank' differs from 'bank', whose certificate is .* by capitals alone"
    ):
        issue(ca, "Bank")
    issue(ca, "bank", force=True)


# -- chains
# ----------------------------------------------------------------------


def test_an_intermediate_lies_behind_the_certificate(tmp_path: Path) -> None:
    root = company(tmp_path)
    below = root.intermediate()
    tls = written(tmp_path, "bank", below.leaf(dns("bank")), below)
    found = load_credentials(tls, name="bank", members=MEMBERS, uses=BOTH)
    assert list(found.chain) == [found.certificate, below.certificate, root.certificate]
    assert "put intermediate certificates behind" in refusal(
        written(tmp_path, "bank", below.leaf(dns("bank")))
    )


def deep(root: Signer, length: int) -> list[Signer]:
    found = [root]
    for number in range(length):
        found.append(found[-1].intermediate(f"level {number}"))
    return found[:0:-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda root: [root.intermediate(ca=False)],
        lambda root: [root.intermediate(constraint="example.org")],
        lambda root: [(first := root.intermediate(path_length=0)).intermediate("second"), first],
        lambda root: deep(root, 4),
    ],
    ids=["no authority", "constraints", "path length", "too many"],
)
def test_an_intermediate_that_may_not_sign(
    tmp_path: Path, make: Callable[[Signer], list[Signer]]
) -> None:
    behind = make(company(tmp_path))
    assert "is not signed by the CA" in refusal(
        written(tmp_path, "bank", behind[0].leaf(dns("bank")), *behind)
    )


def test_three_intermediates_are_followed(tmp_path: Path) -> None:
    behind = deep(company(tmp_path), 3)
    tls = written(tmp_path, "bank", behind[0].leaf(dns("bank")), *behind)
    assert len(load_credentials(tls, name="bank").chain) == 5


def test_a_party_signs_for_nobody(ca: Path) -> None:
    """An authority by ``vfl certs`` allows nobody below it, whatever another certificate says."""
    below = signer(ca).intermediate()
    assert "is not signed by the CA" in refusal(written(ca, "bank", below.leaf(dns("bank")), below))


# -- keys
# ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["file", "variable"])
def test_an_encrypted_key(ca: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = written(ca, "bank", signer(ca).leaf(dns("bank")), passphrase=b"open sesame")
    assert "is encrypted; give its passphrase in a file" in refusal(tls)
    path = ca / "passphrase"
    if how == "file":
        path.touch(mode=0o600)
        path.write_text("open sesame\n")
        tls = tls.model_copy(update={"passphrase_file": str(path)})
    else:
        monkeypatch.setenv("VFL_TLS_PASSPHRASE", "open sesame")
    keyring = Keyring(tls, "bank", MEMBERS)
    assert b"ENCRYPTED" not in keyring.current().key_pem
    assert b"ENCRYPTED" in Path(tls.key).read_bytes()
    # It is not taken for a new key at each connection.
    assert keyring.current() is keyring.current()
    if how == "file":
        path.chmod(0o644)
        assert "other users can use the passphrase" in refusal(tls)
        path.chmod(0o600)
        path.write_text("another\n")
    else:
        monkeypatch.setenv("VFL_TLS_PASSPHRASE", "another")
    assert "the passphrase does not open the key" in refusal(tls)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (
            ed25519.Ed25519PrivateKey.generate(),
            "is Ed25519, which gRPC cannot use; take ECDSA (P-256) or RSA",
        ),
        (rsa.generate_private_key(65537, 1024), "is RSA of 1024 bits; take at least 2048"),  # noqa: S505
        (ec.generate_private_key(ec.SECP256K1()), "is on the curve secp256k1; take P-256 or P-384"),
        (ec.generate_private_key(ec.SECP521R1()), "is on the curve secp521r1; take P-256 or P-384"),
    ],
    ids=["Ed25519", "RSA", "secp256k1", "P-521"],
)
def test_keys_that_cannot_be_used(
    ca: Path,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey,
    text: str,
) -> None:
    tls = written(ca, "bank", signer(ca).leaf(dns("bank"), key))
    assert refusal(tls).startswith(f"the key of {tls.certificate} {text}")


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()])
def test_keys_that_can_be_used(ca: Path, curve: ec.EllipticCurve) -> None:
    tls = written(ca, "bank", signer(ca).leaf(dns("bank"), ec.generate_private_key(curve)))
    assert load_credentials(tls, name="bank", uses=BOTH).name == "bank"


def test_what_the_certificate_is_for(ca: Path) -> None:
    dialling, answering = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    for uses, fine in (
        ([dialling], [DIALS]),
        ([answering], [ANSWERS]),
        ([dialling, answering], [DIALS, ANSWERS, BOTH]),
        (None, [DIALS, ANSWERS, BOTH]),
        # gRPC does not take it for either.
        ([ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE], []),
    ):
        tls = written(ca, "bank", signer(ca).leaf(dns("bank"), uses=uses))
        for wanted in (DIALS, ANSWERS, BOTH):
            if wanted in fine:
                assert load_credentials(tls, name="bank", uses=wanted).name == "bank"
            else:
                with pytest.raises(
                    InputError, match=r"may not (dial|answer) \(\w+Auth\): its extended key usage"
                ):
                    load_credentials(tls, name="bank", uses=wanted)


# -- pins
# ----------------------------------------------------------------------


def test_a_pinned_key(ca: Path) -> None:
    """Somebody with the authority's key makes a certificate for the shop; the shop's own is
    pinned.
    """
    certificate, key = signer(ca).leaf(dns("shop"))
    members = members_of(named(), {"shop": pem.pin_of(certificate)})
    keyring = Keyring(issue(ca, "server"), "server", members)
    assert keyring.admit(certificate.public_bytes(Encoding.PEM)) == "shop"
    # The same key.
    renewed, _ = signer(ca).leaf(dns("shop"), key)
    assert keyring.admit(renewed.public_bytes(Encoding.PEM)) == "shop"
    forged, _ = signer(ca).leaf(dns("shop"))
    with pytest.raises(PeerError) as caught:
        keyring.admit(forged.public_bytes(Encoding.PEM))
    assert (caught.value.code, caught.value.party) == (Code.IDENTITY_MISMATCH, "shop")
    assert (
        caught.value.public == "the certificate of shop has another key than the one pinned for it"
    )
    assert f"({pem.pin_of(forged)} instead of {pem.pin_of(certificate)})" in str(caught.value)


def test_one_s_own_pin(ca: Path) -> None:
    """All may share one table of pins."""
    tls = written(ca, "bank", own := signer(ca).leaf(dns("bank")))
    right = members_of(named(), {"bank": pem.pin_of(own[0])})
    assert load_credentials(tls, name="bank", members=right).name == "bank"
    wrong = members_of(named(), {"bank": f"sha256:{'0' * 64}"})
    assert f"has another key ({pem.pin_of(own[0])}) than is pinned for bank" in refusal(
        tls, Code.IDENTITY_MISMATCH, wrong
    )


def test_a_pin_for_nobody(ca: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"pins: 'hosiptal' is neither the server nor a party .*\(bank, server, shop\)",
    ):
        members_of(named(), {"hosiptal": f"sha256:{'0' * 64}"})


def named() -> Recipe:
    parties = [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}]
    return Recipe.model_validate(recipe(2) | {"parties": parties})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["bank"], "write NAME=PIN, the pin as `vfl certs show` prints it: 'bank'"),
        (["bank=sha256:AB"], "write NAME=PIN"),
        ([f"bank=sha256:{'0' * 64}", f"bank=sha256:{'1' * 64}"], "a party has two pins; give one"),
    ],
)
def test_pins_of_the_server_s_command(given: list[str], text: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(text)):
        _pins(tuple(given))
    assert _pins((f"bank=sha256:{'0' * 64}",)) == {"bank": f"sha256:{'0' * 64}"}


def test_a_pin_in_a_party_file_is_looked_at(ca: Path) -> None:
    with pytest.raises(
        InputError, match=r"pins.shop: .* write a pin as `vfl certs show` prints it"
    ):
        parse(
            PartyFile,
            {"name": "bank", "recipe": "r", "server": "a:1", "tls": TLS, "pins": {"shop": "ab"}},
            "here",
        )


TLS = {"ca": "ca.pem", "certificate": "bank.pem", "key": "bank.key"}
