"""``vfl certs`` as a person uses it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.harness.errors import assert_names, raises
from vfl.certs.authority import issue
from vfl.commands import certs
from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import load_credentials


def run(*args: str | Path) -> str:
    result = CliRunner().invoke(certs, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    run("ca", "--out", tmp_path / "ca", "--federation", "credit-risk")
    return tmp_path / "ca"


def test_authority_and_all_parties_in_one_place(ca: Path, tmp_path: Path) -> None:
    output = run(
        "issue", "server", "bank", "--ca", ca, "--out", tmp_path / "parties", "--days", "9"
    )
    assert_names(output, "server.key", "bank.key")
    assert (tmp_path / "parties" / "ca.pem").read_bytes() == (ca / "ca.pem").read_bytes()
    assert not (tmp_path / "parties" / "ca.key").exists()
    for name in ("server", "bank"):
        base = tmp_path / "parties" / name
        tls = TlsSettings(ca=str(ca / "ca.pem"), certificate=f"{base}.pem", key=f"{base}.key")
        assert load_credentials(tls, name=name).name == name


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("ca")
    run("issue", "bank")
    assert {path.name for path in (tmp_path / "certs").iterdir()} == {
        "ca.pem",
        "ca.key",
        "bank.pem",
        "bank.key",
    }


def test_keys_that_stay_at_home(ca: Path, tmp_path: Path) -> None:
    asked = run("request", "bank", "--out", tmp_path)
    signed = run("sign", tmp_path / "bank.csr", "--ca", ca)
    fingerprint = re.compile(r"SHA-256 (?:[0-9A-F]{2}:){31}[0-9A-F]{2}")
    assert fingerprint.findall(asked) == fingerprint.findall(signed) != []
    tls = TlsSettings(
        ca=str(ca / "ca.pem"),
        certificate=str(tmp_path / "bank.pem"),
        key=str(tmp_path / "bank.key"),
    )
    assert load_credentials(tls, name="bank").name == "bank"


def test_the_expected_name_is_the_file_s_unless_given(ca: Path, tmp_path: Path) -> None:
    run("request", "bank", "--out", tmp_path)
    moved = (tmp_path / "bank.csr").rename(tmp_path / "shop.csr")
    with raises(InputError, Code.IDENTITY_MISMATCH, names=("bank", "shop")):
        run("sign", moved, "--ca", ca)
    run("sign", moved, "--ca", ca, "--name", "bank", "--out", tmp_path / "signed")
    assert (tmp_path / "signed" / "bank.pem").exists()


def test_errors_are_left_to_the_program(ca: Path, tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID, names=("--force", "ca.key")):
        run("ca", "--out", ca)
    before = (ca / "ca.key").read_bytes()
    run("ca", "--out", ca, "--force")
    assert (ca / "ca.key").read_bytes() != before
    with raises(InputError, Code.CONFIG_INVALID, names="64"):
        run("issue", "bank", "-", "--ca", ca)
    assert not (ca / "bank.pem").exists()
    with raises(InputError, Code.CERTIFICATE_INVALID):
        run("show", tmp_path / "missing.pem")


def test_days_out_of_range_are_a_usage_error(ca: Path) -> None:
    assert (
        CliRunner().invoke(certs, ["issue", "bank", "--ca", str(ca), "--days", "0"]).exit_code == 2
    )


def lines(file: Path) -> dict[str, str]:
    return {
        label: text.strip()
        for label, _, text in (line.partition(":") for line in run("show", file).splitlines())
    }


def test_show_authority(ca: Path) -> None:
    shown = lines(ca / "ca.pem")
    assert (shown["name"], shown["issuer"], shown["key"]) == (
        "credit-risk",
        "credit-risk",
        "ECDSA P-256",
    )
    assert_names(shown["may"], "certificates")
    assert re.search(r"UTC to .* UTC \(3649 days left\)", shown["valid"])


def test_show_party(ca: Path) -> None:
    run("issue", "bank", "--ca", ca)
    shown = lines(ca / "bank.pem")
    assert (shown["name"], shown["issuer"], shown["may"]) == (
        "bank",
        "credit-risk",
        "dial a peer, answer a peer",
    )
    assert shown["fingerprint"].startswith("SHA-256 ")
    old = issue(ca, "shop", days=1, now=datetime(2020, 1, 1, tzinfo=UTC))
    assert "(expired at 2020-01-02 00:00 UTC)" in lines(Path(old.certificate))["valid"]


def test_show_request_but_no_key(tmp_path: Path) -> None:
    run("request", "bank", "--out", tmp_path)
    shown = lines(tmp_path / "bank.csr")
    assert (shown["name"], shown["key"]) == ("bank", "ECDSA P-256")
    assert_names(shown["may"], "authority")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank.key"):
        run("show", tmp_path / "bank.key")


@pytest.mark.parametrize(
    "command", [(), ("ca",), ("issue",), ("request",), ("sign",), ("revoke",), ("show",)]
)
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    assert re.search(r"^ +vfl certs \w", run(*command, "--help"), re.MULTILINE)


def test_revoke(ca: Path, tmp_path: Path) -> None:
    run("issue", "bank", "shop", "--ca", ca)
    old = (ca / "shop.pem").rename(tmp_path / "old.pem")
    run("issue", "shop", "--ca", ca, "--force")
    assert_names(run("revoke", "bank", old, "--ca", ca), "revoked.txt", "revoked.crl")
    assert_names(run("revoke", "bank", "--ca", ca), "revoked.txt", "revoked.crl")
    serials = [lines(path)["serial"] for path in (ca / "bank.pem", old)]
    listed = (ca / "revoked.txt").read_text().splitlines()
    assert [line.split("#")[0].strip() for line in listed] == ["", *serials]
    assert listed[1].partition("# ")[2].startswith("'bank', ends at ")
    tls = TlsSettings(
        ca=str(ca / "ca.pem"), certificate=str(ca / "shop.pem"), key=str(ca / "shop.key")
    )
    assert load_credentials(tls, name="shop").revoked == {int(serial, 16) for serial in serials}


def test_the_list_is_signed_where_the_authority_s_key_is(ca: Path) -> None:
    run("issue", "bank", "shop", "--ca", ca)
    said = run("revoke", "bank", "--ca", ca, "--days", "30")
    assert_names(said, "revoked.txt", "revoked.crl")
    (ca / "revoked.txt").rename(ca / "kept.txt")
    tls = TlsSettings(
        ca=str(ca / "ca.pem"), certificate=str(ca / "shop.pem"), key=str(ca / "shop.key")
    )
    serial = int(lines(ca / "bank.pem")["serial"], 16)
    assert load_credentials(tls, name="shop").revoked == {serial}
    (ca / "kept.txt").rename(ca / "revoked.txt")
    before = (ca / "revoked.crl").read_bytes()
    assert "revoked.txt" not in run("revoke", "--ca", ca)
    assert (ca / "revoked.crl").read_bytes() != before
    (ca / "ca.key").unlink()
    assert "revoked.crl" not in run("revoke", "shop", "--ca", ca)
    done = CliRunner().invoke(certs, ["revoke", "--ca", str(ca)])
    assert done.exit_code == 2
    assert_names(done.output, "--help", "ca.key")


def test_a_certificate_is_shown_with_the_pin_of_its_key(ca: Path, tmp_path: Path) -> None:
    run("request", "bank", "--out", tmp_path)
    run("sign", tmp_path / "bank.csr", "--ca", ca)
    pin = lines(tmp_path / "bank.pem")["pin"]
    assert re.fullmatch("sha256:[0-9a-f]{64}", pin)
    assert lines(tmp_path / "bank.csr")["pin"] == pin


def test_only_certificates_of_this_authority_are_revoked(ca: Path, tmp_path: Path) -> None:
    run("ca", "--out", tmp_path / "other")
    run("issue", "bank", "--ca", tmp_path / "other")
    for who in (tmp_path / "other" / "bank.pem", ca / "ca.pem"):
        with raises(InputError, Code.CERTIFICATE_INVALID):
            run("revoke", who, "--ca", ca)
    with raises(InputError, Code.CERTIFICATE_INVALID):
        run("revoke", "shop", "--ca", ca)
    assert not (ca / "revoked.txt").exists()
