"""Grants of peers that lie are refused in one sentence."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness.errors import raises
from tests.harness.granting import DIGEST, LAST_S, NOON_S, made, pin
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, PeerError
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_governance.grants.store import (
    PAYLOAD,
    Grant,
    GrantStore,
    Joined,
    KeptGrant,
    check_grants,
    folder_of,
    present,
    read_file,
    sign_grant,
)

RUN = "20270115-120000-case-1f3a"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    """Those of one CA; ``eve`` is p1 of another."""
    folder, other = tmp_path_factory.mktemp("ca"), tmp_path_factory.mktemp("other")
    create_authority(folder, "test")
    create_authority(other, "test")
    names = ("p0", "p1", "p2")
    found = {name: load_credentials(issue(folder, name), name=name) for name in names}
    return found | {"eve": load_credentials(issue(other, "p1"), name="p1")}


def says(grant: Grant, credentials: Credentials) -> dict[str, Any]:
    """What an honest party of these credentials says."""
    return present(KeptGrant(grant, sign_grant(grant, credentials)), credentials)


def look(
    said: Any,
    members: dict[str, Credentials],
    *,
    trains: bool = True,
    now_s: float = NOON_S,
    before: int = 0,
) -> dict[str, KeptGrant]:
    """What p0 finds in what p1 says. ``before``: for how many other runs it was shown."""
    joined = Joined(DIGEST, RUN, trains)
    others = [f"run {number}" for number in range(before)]
    return check_grants({"p0": {}, "p1": said}, joined, members["p0"], lambda *_: others, now_s)


def own(members: dict[str, Credentials]) -> dict[str, str]:
    return {"p0": pin(members["p0"])}


def test_an_honest_grant_is_taken_and_kept(members: dict[str, Credentials], tmp_path: Path) -> None:
    grant = made(peers=own(members))
    for trains in (True, False):
        found = look(says(grant, members["p1"]), members, trains=trains, before=1)
        assert found["p1"].grant == grant
    assert look(says(grant, members["p1"]), members, now_s=LAST_S)
    # A party that gets nothing of it is not named.
    assert look(says(made(peers={}), members["p1"]), members)
    # Anybody can check it later.
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(says(grant, members["p1"])["grant"]))
    assert read_file(path, members["p2"]).grant == grant
    # A party that asks for no grants says nothing.
    assert look({}, members) == look(None, members) == {}


def _forged(members: dict[str, Credentials]) -> dict[str, Any]:
    """Three runs of two."""
    said = says(made(peers=own(members)), members["p1"])
    payload = json.loads(base64.b64decode(said["grant"]["payload"]))
    payload["runs"] = 3
    said["grant"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    return said


def _of_another_ca(members: dict[str, Credentials]) -> dict[str, Any]:
    return says(made(peers=own(members)), members["eve"])


def _signed_by_another(members: dict[str, Credentials]) -> dict[str, Any]:
    """The grant of p1 with the signature and certificate of p2."""
    return says(made(peers=own(members)), members["p2"])


def _of_another(members: dict[str, Credentials]) -> dict[str, Any]:
    """The grant of p2, which p1 has seen, signed by p1."""
    return says(made(peers=own(members), party="p2"), members["p1"])


def _none(_members: dict[str, Credentials]) -> dict[str, Any]:
    return {"approval": "each", "grant": None}


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (_forged, Code.IDENTITY_MISMATCH),
        (_of_another_ca, Code.CERTIFICATE_INVALID),
        (_signed_by_another, Code.IDENTITY_MISMATCH),
        (_of_another, Code.REFUSED),
        (_none, Code.REFUSED),
    ],
)
def test_a_forged_or_foreign_grant_is_refused(
    lie: Callable[[dict[str, Credentials]], dict[str, Any]],
    code: Code,
    members: dict[str, Credentials],
) -> None:
    with raises(PeerError, code, names="p1", party="p1"):
        look(lie(members), members)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"digest": "9" * 64}, {}),
        ({}, {"now_s": LAST_S + 1}),
        ({"peers": {"p0": f"sha256:{'c' * 64}"}}, {}),
        ({"runs": 0}, {}),
        ({"predictions": 0}, {"trains": False}),
        # It was shown for two other runs, and allows two.
        ({}, {"before": 2}),
    ],
    ids=["recipe", "expired", "key", "no runs", "no predictions", "replayed"],
)
def test_a_grant_that_does_not_hold_is_refused(
    more: dict[str, Any], facts: dict[str, Any], members: dict[str, Credentials]
) -> None:
    grant = made(**{"peers": own(members), **more})
    with raises(PeerError, Code.REFUSED, names="p1"):
        look(says(grant, members["p1"]), members, **facts)


@pytest.mark.parametrize(
    "said",
    [
        "yes",
        ["grant"],
        7,
        {"grant": "signed"},
        {"grant": {}},
        {"grant": {"payloadType": "x", "payload": "", "signatures": []}},
        {"grant": {"payloadType": 1, "payload": 2, "signatures": [3], "certificates": 4}},
        {"grant": [1] * 1000},
        {
            "grant": {
                "payloadType": PAYLOAD,
                "payload": "e30=",
                "signatures": [{"sig": ""}],
                "certificates": "\ud800",
            }
        },
        {
            "grant": {
                "payloadType": PAYLOAD,
                "payload": base64.b64encode(b"[" * 40_000).decode(),
                "signatures": [{"sig": ""}],
                "certificates": "",
            }
        },
    ],
)
def test_what_is_no_grant_is_refused(said: Any, members: dict[str, Credentials]) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        look(said, members)


def test_other_words_under_its_signature_are_no_grant(members: dict[str, Credentials]) -> None:
    """A statement of another kind, or with a key more, is none although p1 has signed it."""
    said = says(made(peers=own(members)), members["p1"])
    for key, value in (("payloadType", "application/vnd.in-toto+json"), ("certificates", "x")):
        with pytest.raises(PeerError):
            look({**said, "grant": said["grant"] | {key: value}}, members)


def test_a_run_that_all_have_shown_is_counted_by_its_peers(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """The third run of a grant for two is refused by p0, whatever p1 has counted."""
    with closing(GrantStore(folder_of(tmp_path, "p0"), "p0")) as store:
        grant = made(peers=own(members))
        said = {"p1": says(grant, members["p1"])}
        seen = store.list_runs_shown

        def joins(run: str, *, goes_on: bool = False) -> None:
            check_grants(said, Joined(DIGEST, run, True, goes_on), members["p0"], seen, NOON_S)
            store.see(grant, run)

        joins("a")
        joins("b")
        joins("a", goes_on=True)
        # Under an id that was used, by a server that helps p1, and under another one.
        for run in ("a", "c"):
            with raises(PeerError, Code.REFUSED, names="p1"):
                joins(run)
