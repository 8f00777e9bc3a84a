"""For whom a certificate stands, what a company's own certificates may look like, and pins of
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.harness.cases import recipe
from tests.harness.errors import assert_names, raises
from tests.harness.pki import Signer, company, dns, signer, written
from vfl.certs.authority import issue
from vfl_common.config.base import parse
from vfl_common.config.party import PartyFile, TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import (
    ANSWERS,
    BOTH,
    DIALS,
    Members,
    collect_members,
    load_credentials,
)
from vfl_common.identity.keyring import Keyring
from vfl_server.cli import _pins

MEMBERS = Members(frozenset({"server", "bank", "shop"}))
SPIFFE = x509.UniformResourceIdentifier("spiffe://example.org/bank")


def refusal(
    tls: TlsSettings, code: Code = Code.CERTIFICATE_INVALID, members: Members = MEMBERS
) -> str:
    with raises(InputError, code) as caught:
        load_credentials(tls, name="bank", members=members, uses=BOTH)
    return str(caught.value)


# -- names


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
    with raises(PeerError, Code.IDENTITY_MISMATCH):
        Keyring(issue(ca, "server"), "server", MEMBERS).admit(
            certificate.public_bytes(Encoding.PEM)
        )
    assert not MEMBERS.stands_for(certificate, "bank")


@pytest.mark.parametrize("name", ["stranger", "BANK", "bank.", "*.example.org"])
def test_a_caller_s_only_name_is_what_it_is(ca: Path, name: str) -> None:
    """Whoever asks for the name finds that it has no part."""
    certificate, _ = signer(ca).leaf(dns(name))
    keyring = Keyring(issue(ca, "server"), "server", MEMBERS)
    assert keyring.admit(certificate.public_bytes(Encoding.PEM)) == name
    # It is not noted: there may be any number of strangers.
    assert set(keyring.ends()) == {"server", "ca"}


def test_a_certificate_that_cannot_be_read_is_the_caller_s_fault(ca: Path) -> None:
    with raises(PeerError, Code.CERTIFICATE_INVALID):
        Keyring(issue(ca, "server"), "server", MEMBERS).admit(
            b"-----BEGIN CERTIFICATE-----\nAA==\n"
        )


@pytest.mark.parametrize("names", [dns("bank", "shop"), dns("Bank"), [SPIFFE], []])
def test_one_s_own_certificate_is_explained(ca: Path, names: Sequence[x509.GeneralName]) -> None:
    tls = written(ca, "bank", signer(ca).leaf(names, common_name="bank"))
    refusal(tls, Code.IDENTITY_MISMATCH)


def test_names_that_differ_by_capitals_are_refused(ca: Path) -> None:
    parties = [{"name": "bank", "role": "active"}, {"name": "Bank", "role": "passive"}]
    with raises(ValueError, names=("Bank", "bank")):
        Recipe.model_validate(recipe(2) | {"parties": parties})
    with raises(ValueError, names=("Server", "server")):
        Recipe.model_validate(
            recipe(2) | {"parties": [*parties[:1], {"name": "Server", "role": "passive"}]}
        )
    issue(ca, "bank")
    with raises(InputError, Code.CONFIG_INVALID, names=("Bank", "bank")):
        issue(ca, "Bank")
    issue(ca, "bank", force=True)


# -- chains


def test_an_intermediate_lies_behind_the_certificate(tmp_path: Path) -> None:
    root = company(tmp_path)
    below = root.intermediate()
    tls = written(tmp_path, "bank", below.leaf(dns("bank")), below)
    found = load_credentials(tls, name="bank", members=MEMBERS, uses=BOTH)
    assert list(found.chain) == [found.certificate, below.certificate, root.certificate]
    refusal(written(tmp_path, "bank", below.leaf(dns("bank"))))


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
    refusal(written(tmp_path, "bank", behind[0].leaf(dns("bank")), *behind))


def test_three_intermediates_are_followed(tmp_path: Path) -> None:
    behind = deep(company(tmp_path), 3)
    tls = written(tmp_path, "bank", behind[0].leaf(dns("bank")), *behind)
    assert len(load_credentials(tls, name="bank").chain) == 5


def test_a_party_signs_for_nobody(ca: Path) -> None:
    """An authority by ``vfl certs`` allows nobody below it, whatever another certificate says."""
    below = signer(ca).intermediate()
    refusal(written(ca, "bank", below.leaf(dns("bank")), below))


# -- keys


@pytest.mark.parametrize("how", ["file", "variable"])
def test_an_encrypted_key(ca: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = written(ca, "bank", signer(ca).leaf(dns("bank")), passphrase=b"open sesame")
    refusal(tls)
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
        refusal(tls)
        path.chmod(0o600)
        path.write_text("another\n")
    else:
        monkeypatch.setenv("VFL_TLS_PASSPHRASE", "another")
    refusal(tls)


@pytest.mark.parametrize(
    "key",
    [
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 1024),  # noqa: S505
        ec.generate_private_key(ec.SECP256K1()),
        ec.generate_private_key(ec.SECP521R1()),
    ],
    ids=["Ed25519", "RSA", "secp256k1", "P-521"],
)
def test_keys_that_cannot_be_used(
    ca: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
) -> None:
    tls = written(ca, "bank", signer(ca).leaf(dns("bank"), key))
    refusal(tls)


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
                with raises(InputError, Code.CERTIFICATE_INVALID, names="bank"):
                    load_credentials(tls, name="bank", uses=wanted)


# -- pins


def test_a_pinned_key(ca: Path) -> None:
    """Somebody with the authority's key makes a certificate for the shop; the shop's own is
    pinned.
    """
    certificate, key = signer(ca).leaf(dns("shop"))
    members = collect_members(named(), pins={"shop": pem.compute_pin(certificate)})
    keyring = Keyring(issue(ca, "server"), "server", members)
    assert keyring.admit(certificate.public_bytes(Encoding.PEM)) == "shop"
    # The same key.
    renewed, _ = signer(ca).leaf(dns("shop"), key)
    assert keyring.admit(renewed.public_bytes(Encoding.PEM)) == "shop"
    forged, _ = signer(ca).leaf(dns("shop"))
    with raises(PeerError, Code.IDENTITY_MISMATCH, names="shop", party="shop") as caught:
        keyring.admit(forged.public_bytes(Encoding.PEM))
    assert_names(caught.value.public, "shop")


def test_one_s_own_pin(ca: Path) -> None:
    """All may share one table of pins."""
    tls = written(ca, "bank", own := signer(ca).leaf(dns("bank")))
    right = collect_members(named(), pins={"bank": pem.compute_pin(own[0])})
    assert load_credentials(tls, name="bank", members=right).name == "bank"
    wrong = collect_members(named(), pins={"bank": f"sha256:{'0' * 64}"})
    refusal(tls, Code.IDENTITY_MISMATCH, wrong)


def test_a_pin_for_nobody(ca: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("hosiptal", "bank")):
        collect_members(named(), pins={"hosiptal": f"sha256:{'0' * 64}"})


def named() -> Recipe:
    parties = [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}]
    return Recipe.model_validate(recipe(2) | {"parties": parties})


@pytest.mark.parametrize(
    "given", [["bank"], ["bank=sha256:AB"], [f"bank=sha256:{'0' * 64}", f"bank=sha256:{'1' * 64}"]]
)
def test_pins_of_the_server_s_command(given: list[str]) -> None:
    with raises(click.BadParameter):
        _pins(tuple(given))
    assert _pins((f"bank=sha256:{'0' * 64}",)) == {"bank": f"sha256:{'0' * 64}"}


def test_a_pin_in_a_party_file_is_looked_at(ca: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("ab", "sha256:")):
        parse(
            PartyFile,
            {"name": "bank", "recipe": "r", "server": "a:1", "tls": TLS, "pins": {"shop": "ab"}},
            "here",
        )


TLS = {"ca": "ca.pem", "certificate": "bank.pem", "key": "bank.key"}
