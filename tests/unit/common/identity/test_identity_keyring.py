"""Certificates that change on disk while a process runs: what is used next, what is warned of."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import recipe
from tests.harness.errors import assert_names, raises
from tests.harness.pki import signer
from vfl.certs.authority import create_authority, issue, revoke, sign_list
from vfl_common.bundle import Ledger
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials, load_credentials, warn_if_ending
from vfl_common.identity.keyring import Keyring
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.session import Session
from vfl_common.run_folder import create
from vfl_party.runtime.preflight import _find_expiring
from vfl_server.app import ServerApp, _ServerParts

YEAR = timedelta(days=365)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def pair(tls: TlsSettings) -> tuple[bytes, bytes]:
    return Path(tls.certificate).read_bytes(), Path(tls.key).read_bytes()


# -- replaced files


def test_a_new_pair_is_used_next(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keyring = Keyring(tls, "bank")
    before = keyring.current()
    assert keyring.current() == before
    issue(ca, "bank", force=True)
    now = keyring.current()
    assert (now.certificate_pem, now.key_pem) == pair(tls)
    assert now.certificate_pem != before.certificate_pem
    assert_names("\n".join(record.getMessage() for record in caplog.records), "bank")


def test_a_new_authority_is_used_next(ca: Path, tls: TlsSettings) -> None:
    keyring = Keyring(tls, "bank")
    create_authority(ca, "f", force=True)
    issue(ca, "bank", force=True)
    assert keyring.current().ca_pem == Path(tls.ca).read_bytes()


def test_half_of_a_new_pair_is_not_used(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, however many connections there are meanwhile; the other half ends it."""
    keyring, old = Keyring(tls, "bank"), pair(tls)
    new = pair(issue(ca, "bank", out=ca / "new"))
    Path(tls.certificate).write_bytes(new[0])
    for _ in range(3):
        assert keyring.current().pems[1:] == old
    (text,) = warnings(caplog)
    assert_names(text, "bank.key")
    Path(tls.key).write_bytes(new[1])
    assert keyring.current().pems[1:] == new
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("part", ["ca", "certificate", "key"])
def test_garbage_and_missing_files_are_not_used(
    tls: TlsSettings, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    keyring, path = Keyring(tls, "bank"), Path(getattr(tls, part))
    before, content = keyring.current(), path.read_bytes()
    for harm in (lambda: path.write_bytes(b"\x00no PEM"), path.unlink):
        harm()
        assert [keyring.current() for _ in range(2)] == [before] * 2
    path.write_bytes(content)
    path.chmod(0o600)
    assert keyring.current() == before
    assert [str(path) in text for text in warnings(caplog)] == [True, True]
    path.unlink()
    keyring.current()
    # It was whole between.
    assert len(warnings(caplog)) == 3


def test_a_key_that_vanishes_while_it_is_read(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = Keyring(tls, "bank")
    before = keyring.current()
    issue(ca, "bank", force=True)

    def gone(path: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", gone)
        assert keyring.current() == before
    assert len(warnings(caplog)) == 1
    assert keyring.current() != before


def test_a_pair_of_another_party_is_not_used(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    keyring, shop = Keyring(tls, "bank"), pair(issue(ca, "shop"))
    Path(tls.certificate).write_bytes(shop[0])
    Path(tls.key).write_bytes(shop[1])
    assert keyring.current().certificate_pem != shop[0]
    assert_names(warnings(caplog)[0], "shop", "bank")


# -- expiry


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (timedelta(days=31), ""),
        (timedelta(days=29, hours=1), "in 29 days"),
        (timedelta(hours=1), "in 0 days"),
        (timedelta(hours=-1), "ended at"),
    ],
)
def test_an_end_is_told_thirty_days_before(tls: TlsSettings, left: timedelta, text: str) -> None:
    certificate = load_credentials(tls, name="bank").certificate
    said = warn_if_ending(certificate, certificate.not_valid_after_utc - left)
    assert bool(said) == bool(text)
    assert text in said


def test_a_certificate_for_a_few_days_is_not_about_to_end_from_its_beginning(ca: Path) -> None:
    certificate = load_credentials(issue(ca, "bank", days=8), name="bank").certificate
    end = certificate.not_valid_after_utc
    assert warn_if_ending(certificate, datetime.now(UTC)) == ""
    assert_names(warn_if_ending(certificate, end - timedelta(days=2, hours=1)), "connection")


def test_a_running_process_is_told_once_a_day(
    ca: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    keyring = Keyring(
        issue(ca, "bank", now=datetime.now(UTC) - YEAR + timedelta(days=12, hours=1)), "bank"
    )
    keyring.warn_of_expiry_daily()
    # Nothing before the log begins.
    assert warnings(caplog) == []
    keyring.tell()
    (first,) = warnings(caplog)
    assert_names(first, "bank", "12")
    now_s += 86_399.0
    keyring.warn_of_expiry_daily()
    assert len(warnings(caplog)) == 1
    now_s += 1.0
    keyring.warn_of_expiry_daily()
    keyring.warn_of_expiry_daily()
    assert warnings(caplog) == [first] * 2


class Asked(Keyring):
    """Says when it is asked to tell again."""

    def __init__(self, tls: TlsSettings) -> None:
        super().__init__(tls, "bank")
        self.again = threading.Event()

    def warn_of_expiry_daily(self) -> None:
        self.again.set()


def test_parties_and_server_ask_again_as_long_as_they_run(tls: TlsSettings, tmp_path: Path) -> None:
    session = Session(
        "127.0.0.1:1", Asked(tls), "server", Ledger(), TcpMeter(), heartbeat_s=0.01, wait_s=1.0
    )
    assert isinstance(session.keyring, Asked)
    assert session.keyring.again.wait(10.0)
    session.close()

    keyring, coordinator = Asked(tls), Ticking()
    folder = create(tmp_path, "run", "server", Recipe.model_validate(recipe(2)))
    parts = _ServerParts(keyring, folder, Ledger(), TcpMeter(), Any, Any, coordinator, Any, None)  # type: ignore[arg-type]
    ServerApp._tick(parts)
    assert keyring.again.is_set()


class Ticking:
    """A coordinator whose run is over after one tick."""

    def __init__(self) -> None:
        self.finished = threading.Event()

    def tick(self) -> None:
        self.finished.set()


def test_check_tells_which_of_a_party_s_certificates_end_soon(tmp_path: Path) -> None:
    create_authority(tmp_path, "f", days=100, now=datetime.now(UTC) - timedelta(days=90))
    tls = issue(tmp_path, "bank")

    def load() -> Credentials:
        return load_credentials(tls, name="bank")

    found = list(_find_expiring(load))
    assert [(each.about, each.fine, each.soon) for each in found] == [("CA", True, True)]
    issue(tmp_path, "bank", force=True, days=40, now=datetime.now(UTC) - timedelta(days=35))
    assert [each.about for each in _find_expiring(load)] == ["certificate", "CA"]
    (tmp_path / "bank.pem").unlink()
    # Another line says FAIL.
    assert list(_find_expiring(load)) == []


def test_a_replaced_certificate_is_looked_at_too(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring(tls, "bank")
    issue(ca, "bank", force=True, now=datetime.now(UTC) - YEAR + timedelta(days=3, hours=1))
    keyring.current()
    assert_names(warnings(caplog)[0], "bank")


def test_the_authority_and_peers_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_authority(tmp_path, "f", days=100, now=datetime.now(UTC) - timedelta(days=90))
    keyring = Keyring(issue(tmp_path, "bank", days=9), "bank")
    shop = load_credentials(issue(tmp_path, "shop", days=365), name="shop")
    keyring.admit(shop.certificate_pem)
    keyring.admit(shop.certificate_pem)
    keyring.tell()
    assert [text.partition(" ends")[0] for text in warnings(caplog)] == [
        f"the certificate {tmp_path / 'ca.pem'}"
    ]
    assert keyring.ends() == {
        "bank": keyring.current().not_after,
        "ca": keyring.current().authority.not_valid_after_utc,
        "shop": shop.not_after,
    }


def test_a_peer_whose_certificate_ends_soon_is_named_when_it_calls(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring(tls, "bank")
    shop = issue(ca, "shop", now=datetime.now(UTC) - YEAR + timedelta(days=5, hours=1))
    for _ in range(3):
        keyring.admit(Path(shop.certificate).read_bytes())
    (text,) = warnings(caplog)
    assert_names(text, "shop")


# -- revocation


def test_a_revoked_caller_is_refused_at_once(ca: Path, tls: TlsSettings) -> None:
    keyring, shop = Keyring(tls, "bank"), load_credentials(issue(ca, "shop"), name="shop")
    keyring.admit(shop.certificate_pem)
    revoke(ca, "shop")
    with raises(PeerError, Code.CERTIFICATE_INVALID, names="shop", party="shop"):
        keyring.admit(shop.certificate_pem)
    issue(ca, "shop", force=True)
    # Another certificate of the same party.
    keyring.admit((ca / "shop.pem").read_bytes())


def test_the_list_is_read_beside_the_ca_or_where_the_settings_say(
    ca: Path, tls: TlsSettings, tmp_path: Path
) -> None:
    assert load_credentials(tls, name="bank").revoked == frozenset()
    (ca / "revoked.txt").write_text("# none yet\n\nAB:CD:01  # as OpenSSL prints it\n  ff\n")
    assert load_credentials(tls, name="bank").revoked == {0xABCD01, 0xFF}
    elsewhere = tls.model_copy(update={"revoked": str(tmp_path / "list")})
    with raises(InputError, Code.CERTIFICATE_INVALID):
        load_credentials(elsewhere, name="bank")
    (tmp_path / "list").write_text("1\n")
    assert load_credentials(elsewhere, name="bank").revoked == {1}


def test_a_list_that_cannot_be_read_changes_nothing(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    (ca / "revoked.txt").write_text("ff\n")
    keyring = Keyring(tls, "bank")
    (ca / "revoked.txt").write_text("ff\nbank\n")
    assert [keyring.current().revoked for _ in range(3)] == [{0xFF}] * 3
    (text,) = warnings(caplog)
    assert_names(text, "revoked.txt")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="revoked.txt"):
        Keyring(tls, "bank")
    issue(ca, "bank", force=True)
    # One does not hold up the other.
    assert keyring.current().certificate_pem == Path(tls.certificate).read_bytes()


def test_one_s_own_revoked_certificate(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring(tls, "bank")
    revoke(ca, "bank")
    keyring.current()
    keyring.current()
    assert_names("\n".join(warnings(caplog)), "bank")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank"):
        Keyring(tls, "bank")


def test_who_was_revoked_once_stays_revoked(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """A list that is cut short, or is gone, un-revokes nobody: one warning."""
    listed = ca / "revoked.txt"
    listed.write_text("ff\nee\n")
    keyring = Keyring(tls, "bank")
    for harm in (
        lambda: listed.write_text("ff\n"),
        lambda: listed.write_text("ff\n"),
        listed.unlink,
    ):
        harm()
        assert [keyring.current().revoked for _ in range(2)] == [{0xFF, 0xEE}] * 2
    one, two = warnings(caplog)
    assert_names(one, "certificates")
    assert_names(two, "certificates")
    listed.write_text("ff\nee\ndd\n")
    assert keyring.current().revoked == {0xFF, 0xEE, 0xDD}
    assert len(warnings(caplog)) == 2


def test_who_was_revoked_is_known_after_a_restart(
    ca: Path, tls: TlsSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Secret that is made anew without the list; the folder of runs is still there."""
    out = tmp_path / "runs"
    assert Keyring(tls, "bank", out=out).current().revoked == frozenset()
    assert not out.exists()
    shop = load_credentials(issue(ca, "shop"), name="shop")
    revoke(ca, "shop")
    Keyring(tls, "bank", out=out)
    (ca / "revoked.txt").unlink()
    keyring = Keyring(tls, "bank", out=out)
    with raises(PeerError, Code.CERTIFICATE_INVALID, names="shop"):
        keyring.admit(shop.certificate_pem)
    (text,) = warnings(caplog)
    assert_names(text, "bank.txt")
    lines = (out / "revoked-bank.txt").read_text().splitlines()
    assert lines[-1] == f"{shop.certificate.serial_number:x}"
    (out / "revoked-bank.txt").write_text("\n".join(lines[:-1]))
    assert Keyring(tls, "bank", out=out).admit(shop.certificate_pem) == "shop"
    (out / "revoked-bank.txt").write_text("what\n")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank.txt"):
        Keyring(tls, "bank", out=out)


def test_one_s_own_certificate_in_the_note(ca: Path, tls: TlsSettings, tmp_path: Path) -> None:
    keyring = Keyring(tls, "bank", out=tmp_path)
    revoke(ca, "bank")
    keyring.current()
    (ca / "revoked.txt").unlink()
    with raises(InputError, Code.CERTIFICATE_INVALID, names="bank"):
        Keyring(tls, "bank", out=tmp_path)


def test_a_note_that_cannot_be_written_is_a_warning(
    ca: Path, tls: TlsSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Where the note is written first.
    (tmp_path / "runs" / f".revoked-bank.txt.{os.getpid()}").mkdir(parents=True)
    (ca / "revoked.txt").write_text("ff\n")
    assert Keyring(tls, "bank", out=tmp_path / "runs").current().revoked == {0xFF}
    assert_names(warnings(caplog)[0], "bank.txt")


# -- signed lists


def test_a_signed_list(ca: Path, tls: TlsSettings) -> None:
    (ca / "revoked.txt").write_text("ff\n")
    (ca / "revoked.crl").write_bytes(signer(ca).crl([0xAB]) + signer(ca).crl([0xCD]))
    assert load_credentials(tls, name="bank").revoked == {0xFF, 0xAB, 0xCD}
    elsewhere = tls.model_copy(update={"revoked": str(ca / "revoked.crl")})
    assert load_credentials(elsewhere, name="bank").revoked == {0xAB, 0xCD}


def test_a_signed_list_by_vfl_certs(ca: Path, tls: TlsSettings) -> None:
    serial = load_credentials(issue(ca, "shop"), name="shop").certificate.serial_number
    revoke(ca, "shop")
    (ca / "revoked.txt").rename(ca / "kept")
    path = sign_list(ca)
    assert path is not None
    # The plain list is the keeper's record.
    assert load_credentials(tls, name="bank").revoked == frozenset()
    (ca / "kept").rename(ca / "revoked.txt")
    sign_list(ca)
    (ca / "revoked.txt").unlink()
    assert load_credentials(tls, name="bank").revoked == {serial}
    create_authority(ca, "another", force=True)
    assert not path.exists()
    (ca / "ca.key").unlink()
    assert sign_list(ca) is None


@pytest.mark.parametrize(
    "harm", ["another CA", "changed", "cut", "the second cut", "empty", "beside a plain one"]
)
def test_a_list_that_is_signed_by_somebody_else_or_damaged(
    ca: Path, tls: TlsSettings, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Of the same name.
    create_authority(tmp_path / "other", "f")
    keyring, content = (
        Keyring(tls, "bank"),
        signer(tmp_path / "other" if harm == "another CA" else ca).crl([0xAB]),
    )
    if harm == "changed":
        lines = content.splitlines()
        lines[2] = lines[2][:8] + (b"A" if lines[2][8:9] != b"A" else b"B") + lines[2][9:]
        content = b"\n".join(lines)
    content = {
        "cut": content[:-40],
        "the second cut": content + signer(ca).crl([0xCD])[:-40],
        "empty": b"",
        "beside a plain one": b"cd\n" + content,
    }.get(harm, content)
    (ca / "revoked.crl").write_bytes(content)
    with raises(InputError, Code.CERTIFICATE_INVALID, names="revoked.crl"):
        load_credentials(tls, name="bank")
    assert keyring.current().revoked == frozenset()
    assert_names(warnings(caplog)[0], "revoked.crl")


def test_a_signed_list_that_is_out_of_date(
    ca: Path, tls: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused at a start; a process that runs is warned, and heeds it nevertheless."""
    keyring = Keyring(tls, "bank")
    (ca / "revoked.crl").write_bytes(signer(ca).crl([0xAB], ends=datetime(2026, 1, 2, tzinfo=UTC)))
    assert [keyring.current().revoked for _ in range(2)] == [{0xAB}] * 2
    (text,) = warnings(caplog)
    assert_names(text, "revoked.crl")
    with raises(InputError, Code.CERTIFICATE_INVALID, names="revoked.crl"):
        Keyring(tls, "bank")
    (ca / "revoked.crl").write_bytes(signer(ca).crl([0xAB]))
    assert keyring.current().revoked == Keyring(tls, "bank").current().revoked == {0xAB}
    assert len(warnings(caplog)) == 1
