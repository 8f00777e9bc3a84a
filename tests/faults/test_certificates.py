"""Certificates that change, end or are revoked while the real programs run; an active party that
moves.
"""

from __future__ import annotations

import json
import signal
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, refused
from tests.harness.scrape import key, scrape
from tests.harness.waiting import wait_until
from tests.integration.test_resume import (
    AFTER_FIRST,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    held,
    parameters,
    undisturbed,
)
from tests.integration.test_resume import recipe as resumed
from vfl.certs.authority import create_authority, issue, revoke
from vfl_common.config.party import TlsSettings
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.identity.diagnose import fetch_certificate
from vfl_common.identity.pem import compute_pin
from vfl_common.rpc.channel import split_address

# A fixture.
__all__ = ["undisturbed"]
WAIT_S = 30.0
# An empty list of revoked certificates, for those who have not heard.
NOBODY = "nobody.txt"


def log(federation: Federation, name: str, event: str) -> list[dict[str, Any]]:
    text = (federation.run_folder / name / "log.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line.get("event") == event]


def of_p1(federation: Federation) -> Credentials:
    certs = federation.folder / "certs"
    tls = TlsSettings(
        ca=str(certs / "ca.pem"), certificate=str(certs / "p1.pem"), key=str(certs / "p1.key")
    )
    return load_credentials(tls, name="p1")


def shown_by_server(federation: Federation) -> int:
    """Returns the serial number of the certificate that a new connection gets."""
    return fetch_certificate(federation.address, of_p1(federation), "server", WAIT_S).serial_number


def renew(federation: Federation) -> None:
    for name in (*federation.names, "server"):
        issue(federation.folder / "certs", name, force=True)


# -- replaced files


def test_a_new_authority_needs_no_restart(tmp_path: Path) -> None:
    """The party that comes last has never seen the authority with which server and active party
    began.
    """
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        federation.start_party("p0")
        server.wait_for("joined", WAIT_S, party="p0")
        create_authority(federation.folder / "certs", "next", force=True)
        renew(federation)
        federation.start_party("p1")
        assert federation.finish()["interruptions"] == 0


def test_all_certificates_are_replaced_and_the_old_ones_revoked_in_the_middle_of_a_run(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    """The server is started again, so that all connections are new; whoever showed an old
    certificate is refused.
    """
    with held(tmp_path, resumed(), sent=SECOND_EPOCH) as (federation, proxy):
        certs = federation.folder / "certs"
        for name in (*federation.names, "server"):
            revoke(certs, name)
        renew(federation)
        federation.programs["server"].kill()
        proxy.release()
        federation.start_server(federation.address)
        assert federation.finish()["interruptions"] == 1
        for name in federation.names:
            texts = [line["message"] for line in log(federation, name, "certificate")]
            assert any(f"certs/{name}.pem" in text for text in texts), texts
        assert_equal(parameters(federation), undisturbed)


def test_half_of_a_new_pair_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server, certs = federation.start_server(), federation.folder / "certs"
        old = shown_by_server(federation)
        issue(certs, "server", out=certs / "new")
        (certs / "new" / "server.pem").replace(certs / "server.pem")
        for name in federation.names:
            federation.start_party(name)
            server.wait_for("joined", WAIT_S, party=name)
            if name == "p0":
                assert shown_by_server(federation) == old
                (warning,) = log(federation, "server", "certificate")
                assert warning["level"] == "warning"
                assert "certs/server.key" in warning["message"]
                assert_names(warning["message"], "server.key")
                (certs / "server.key").write_text("garbage\n")
                assert shown_by_server(federation) == old
                (certs / "new" / "server.key").replace(certs / "server.key")
                assert shown_by_server(federation) != old
        federation.finish()
        # A warning for each harm, and the replacement.
        assert len(log(federation, "server", "certificate")) == 3


# -- expiry


def test_a_certificate_that_ends_soon_is_told_in_logs_metrics_and_check(tmp_path: Path) -> None:
    with Federation(
        tmp_path / "f", recipe(2), digits(2), server_options=("--metrics", "127.0.0.1:0")
    ) as federation:
        issue(
            federation.folder / "certs",
            "p1",
            force=True,
            now=datetime.now(UTC) - timedelta(days=350),
        )
        ends = of_p1(federation).not_after.timestamp()
        server = federation.start_server()
        metrics = server.events[-2]["address"]
        federation.write_party("p1")
        checked = federation.start("check", "vfl-party", "check", "p1.toml", "--offline")
        assert checked.wait(60) == 0
        lines = [event.get("text", "") for event in checked.seen()]
        (soon,) = [line for line in lines if line.startswith("SOON  certificate   ")]
        assert_names(soon, "14 days", "p1.pem")
        federation.programs.pop("check").close()

        federation.start_party("p1")
        server.wait_for("joined", WAIT_S, party="p1")
        found = scrape(metrics)
        name = "vfl_certificate_not_after_timestamp_seconds"
        assert found[key(name, certificate="p1")] == ends
        assert found[key(name, certificate="server")] > ends
        assert found[key(name, certificate="ca")] > ends
        assert key(name, certificate="p0") not in found
        federation.start_party("p0")
        federation.finish()
        (own,) = log(federation, "p1", "expiring")
        (peer,) = log(federation, "server", "expiring")
        assert own["level"] == peer["level"] == "warning"
        assert "certs/p1.pem" in own["message"]
        assert "p1" in peer["message"]
        for line in (own, peer):
            assert_names(line["message"], "14 days")


# -- revocation


def with_list(federation: Federation, name: str, listed: str) -> None:
    """Gives a party a list of its own."""
    tls = {
        "ca": "certs/ca.pem",
        "certificate": f"certs/{name}.pem",
        "key": f"certs/{name}.key",
        "revoked": listed,
    }
    federation.extra[name] = {"tls": tls}


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Two parties; the lists of the tests are made before anybody starts."""
    return Federation(tmp_path / "f", recipe(2, run={"rejoin_deadline_s": 10.0}), digits(2))


def test_a_revoked_party_is_refused_by_the_server(federation: Federation) -> None:
    """The server runs when the list comes; the party has not heard of it, the party with a new
    certificate has.
    """
    with federation:
        (federation.folder / NOBODY).touch()
        server = federation.start_server()
        federation.start_party("p0")
        server.wait_for("joined", WAIT_S, party="p0")
        revoke(federation.folder / "certs", "p1")
        with_list(federation, "p1", NOBODY)
        refused(federation.start_party("p1"), "server", "p1")
        (line,) = log(federation, "server", "refused")
        assert (line["level"], line["party_"], line["code"]) == (
            "warning",
            "p1",
            "CERTIFICATE_INVALID",
        )
        issue(federation.folder / "certs", "p1", force=True)
        del federation.extra["p1"]
        federation.start_party("p1")
        federation.finish()


def test_a_party_that_is_revoked_during_a_run_is_waited_for(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    """Its session is open; the next interruption has it join again, and it must not end the run for
    the others.
    """
    with held(tmp_path, resumed(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        revoke(federation.folder / "certs", "p1")
        federation.programs["p0"].signal(signal.SIGTERM)
        assert federation.programs["p0"].wait(60) == 130
        refused(federation.programs["p1"], "server", "p1")
        (line,) = log(federation, "server", "refused")
        assert (line["party_"], line["code"]) == ("p1", "CERTIFICATE_INVALID")
        proxy.target = federation.start_party("p0").wait_for("ready", WAIT_S)["address"]
        proxy.release()
        issue(federation.folder / "certs", "p1", force=True)
        federation.start_party("p1")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)


def test_a_revoked_party_is_refused_by_the_active_party(federation: Federation) -> None:
    with federation:
        (federation.folder / NOBODY).touch()
        revoke(federation.folder / "certs", "p1")
        federation.server_options = ("--revoked", NOBODY)
        with_list(federation, "p1", NOBODY)
        server, p1 = federation.start_server(), federation.start_party("p1")
        server.wait_for("joined", WAIT_S, party="p1")
        # It calls once p0 has a log.
        p1.signal(signal.SIGSTOP)
        federation.start_party("p0")
        server.wait_for("started", WAIT_S)
        wait_until((federation.run_folder / "p0" / "log.jsonl").exists)
        p1.signal(signal.SIGCONT)
        refused(p1, "p0", "p1")
        assert (federation.programs["server"].wait(60), federation.programs["p0"].wait(60)) == (
            2,
            4,
        )
        (line,) = log(federation, "p0", "refused")
        assert (line["level"], line["party_"], line["code"]) == (
            "warning",
            "p1",
            "CERTIFICATE_INVALID",
        )


def test_a_party_refuses_a_revoked_server(federation: Federation) -> None:
    with federation:
        (federation.folder / NOBODY).touch()
        revoke(federation.folder / "certs", "server")
        federation.server_options = ("--revoked", NOBODY)
        federation.start_server()
        refused(federation.start_party("p0"), "server")


def test_a_party_refuses_a_revoked_active_party(federation: Federation) -> None:
    with federation:
        (federation.folder / NOBODY).touch()
        revoke(federation.folder / "certs", "p0")
        federation.server_options = ("--revoked", NOBODY)
        with_list(federation, "p0", NOBODY)
        federation.start_all()
        refused(federation.programs["p1"], "p0")
        refused(federation.programs["p0"], "p1", "p0", code=4)


def test_a_party_waits_for_a_server_although_certificates_are_revoked(
    federation: Federation,
) -> None:
    """With a list, a party looks at the server's certificate first: nobody to look at is no
    refusal.
    """
    with socket.socket() as free, federation:
        revoke(federation.folder / "certs", "p0")
        issue(federation.folder / "certs", "p0", force=True)
        free.bind(("127.0.0.1", 0))
        federation.address = f"127.0.0.1:{free.getsockname()[1]}"
        waiting = federation.start_party("p0").wait_for("waiting", WAIT_S, missing=["server"])
        assert federation.address in waiting["why"]
        assert_names(waiting["why"], "server", "127.0.0.1")
        free.close()
        federation.start_server(federation.address)
        federation.start_party("p1")
        federation.finish()


def test_a_server_that_is_started_again_without_its_list_still_knows_who_is_revoked(
    federation: Federation,
) -> None:
    with federation:
        revoke(federation.folder / "certs", "p1")
        server = federation.start_server()
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 130
        (federation.folder / "certs" / "revoked.txt").unlink()
        federation.start_server(federation.address)
        refused(federation.start_party("p1"), "server", "p1")
        for line in log(federation, "server", "certificate"):
            assert_names(line["message"], "revoked")
        issue(federation.folder / "certs", "p1", force=True)
        federation.start_party("p0")
        federation.start_party("p1")
        federation.finish()


# -- pins


def pin(federation: Federation, name: str) -> str:
    return compute_pin(
        x509.load_pem_x509_certificate((federation.folder / "certs" / f"{name}.pem").read_bytes())
    )


def test_a_pinned_key_is_asked_for_by_the_server_the_active_and_the_passive_party(
    federation: Federation,
) -> None:
    with federation:
        pins = {name: pin(federation, name) for name in ("server", "p0", "p1")}
        federation.server_options = ("--pin", f"p1={pins['p1']}", "--pin", f"p0={pins['p0']}")
        federation.extra = {name: {"pins": pins} for name in ("p0", "p1")}
        forged = {"server": pins["p0"], "p0": pins["p0"]}
        server = federation.start_server()
        federation.extra["p1"] = {"pins": forged}
        refused(federation.start_party("p1"), "server")
        federation.extra["p1"] = {"pins": {"p2": pins["p1"]}}
        refused(federation.start_party("p1"), "pins: ", "'p2'")
        # By whoever keeps the authority.
        issue(federation.folder / "certs", "p1", force=True)
        federation.extra["p1"] = {}
        refused(federation.start_party("p1"), "server", "p1")
        (line,) = log(federation, "server", "refused")
        assert (line["party_"], line["code"]) == ("p1", "IDENTITY_MISMATCH")
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 130
        federation.server_options = ()
        federation.start_server(federation.address)
        federation.extra["p1"] = {"pins": {"p1": pin(federation, "p1"), "p0": pins["p0"]}}
        federation.extra["p0"] = {"pins": {"server": pins["server"], "p1": pin(federation, "p1")}}
        federation.start_party("p0")
        federation.start_party("p1")
        federation.finish()


# -- addresses


def test_the_active_party_comes_back_at_another_host_and_port(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    """p1's file names no address of it: p1 learns the new one with the next start."""
    with held(tmp_path, resumed(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p0"].kill()
        federation.programs["server"].wait_for("interrupted", WAIT_S)
        # Accepts connections there, and never answers.
        with socket.create_server(split_address(proxy.target)):
            federation.extra["p0"] = {"listen": "127.0.0.2:0"}
            proxy.target = federation.start_party("p0").wait_for("ready", WAIT_S)["address"]
            assert proxy.target.startswith("127.0.0.2:")
            proxy.release()
            assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)
