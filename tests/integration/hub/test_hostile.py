"""A hub that lies, members that pose as others, and strangers at the hub's port."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.harness.errors import raises
from tests.harness.standing import HUB, MEMBERS, Standing, make_recipe
from vfl.certs import authority
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import BOTH, Credentials, load_credentials
from vfl_common.identity.signing import Envelope
from vfl_common.process.logs import Console
from vfl_hub import documents, joining
from vfl_hub.node import Node
from vfl_hub.settings import load_node
from vfl_hub.store import open_store
from vfl_hub.streams import Client

Change = Callable[["Case"], None]


def load(folder: Path, name: str) -> Credentials:
    certs = folder / "certs"
    tls = TlsSettings(
        ca=str(certs / "ca.pem"),
        certificate=str(certs / f"{name}.pem"),
        key=str(certs / f"{name}.key"),
    )
    return load_credentials(tls, name=name, uses=BOTH)


def sign_proposal(credentials: Credentials, **more: Any) -> Envelope:
    recipe = more.pop("recipe", make_recipe())
    statement = {
        "by": credentials.name,
        "recipe": recipe,
        "digest": more.pop("digest", "") or Recipe.model_validate(recipe).digest(),
        "data": dict.fromkeys(MEMBERS, "main"),
        "until": time.time() + 1000.0,
        "at": time.time(),
        "nonce": secrets.token_hex(16),
        **more,
    }
    return Envelope.seal(documents.PROPOSAL, statement, credentials)


class Case:
    """What a lying hub reports to the node of shop about a run that both have approved."""

    def __init__(self, federation: Standing, node: Node) -> None:
        self.federation, self.node = federation, node
        self.bank = load(federation.folder / "bank", "bank")
        self.shop = load(federation.folder / "shop", "shop")
        certs = federation.folder
        self.peers = {
            name: federation.pin(certs / name / "certs" / f"{name}.pem") for name in MEMBERS
        } | {HUB: federation.pin(federation.certs / f"{HUB}.pem")}
        self.members = {name: {"pin": self.peers[name], "connected": True} for name in MEMBERS}
        self.propose(sign_proposal(self.bank))

    def propose(self, envelope: Envelope) -> None:
        read = documents.read_proposal(envelope.value)
        self.entry: dict[str, Any] = {
            "id": read.id,
            "envelope": envelope.value,
            "state": "open",
            "reason": "",
            "votes": {},
            "ended": None,
            "token": "t",
        }

    def vote(self, credentials: Credentials, **more: Any) -> None:
        peers = more.get("peers", self.peers)
        envelope = documents.sign_vote(
            credentials, more.get("proposal", self.entry["id"]), more.get("kind", "approve"), peers
        )
        self.entry["votes"][more.get("party", credentials.name)] = {"approve": envelope.value}

    def report(self, **facts: Any) -> None:
        self.entry |= facts
        self.node._take(
            {"cursor": 1, "members": self.members, "proposals": [self.entry], "tunnels": []}
        )

    @property
    def ended(self) -> str:
        known = self.node._known.get(self.entry["id"])
        return known.ended[1] if known is not None and known.ended is not None else ""


def test_a_member_may_propose_a_run_of_others(case: Case) -> None:
    recipe = make_recipe()
    recipe["parties"][1]["name"] = "club"
    data = {"bank": "main", "club": "main"}
    case.propose(sign_proposal(case.shop, recipe=recipe, data=data))
    case.report()
    (row,) = case.node.list_proposals()
    assert (row["state"], row["voted"]) == ("open", False)
    case.report(state="running")
    assert case.ended == ""


def test_an_approval_that_the_hub_has_lost_is_sent_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because its database was away."""
    approve(case)
    case.entry["votes"] = {}
    case.report()
    sent: list[Envelope] = []
    monkeypatch.setattr(case.node, "send_document", sent.append)
    case.node._vote_again_s = 0.0
    while not case.node._outbox.empty():
        case.node._outbox.get()
    case.report(envelope=case.entry["envelope"])
    case.node._outbox.get(timeout=10)(Client(case.node.address))
    assert [documents.read_vote(one.value)[1].kind for one in sent] == ["approve"]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    federation = Standing(tmp_path)
    path = federation.write_node("shop", approval="each")
    node = Node(path, load_node(path), Console("test", json_lines=True))
    monkeypatch.setattr(node, "send_document", lambda _envelope: {})
    yield Case(federation, node)
    node.close()


def approve(case: Case) -> None:
    case.report()
    case.node.approve(case.entry["id"])
    case.vote(case.shop)


def test_the_run_of_an_honest_hub_begins(case: Case) -> None:
    approve(case)
    case.vote(case.bank)
    case.report(state="running")
    assert case.ended == ""
    assert [*case.node._runs] == [case.entry["id"]]


def change_recipe(case: Case) -> None:
    payload = json.loads(documents.read_proposal(case.entry["envelope"]).envelope.payload)
    payload["recipe"]["phases"][0]["epochs"] = 9
    payload["digest"] = Recipe.model_validate(payload["recipe"]).digest()
    envelope = Envelope.read(case.entry["envelope"], documents.PROPOSAL)
    changed = Envelope(
        envelope.payload_type, json.dumps(payload).encode(), envelope.signature, envelope.chain
    )
    case.propose(changed)


def pose_as_bank(case: Case) -> None:
    """The hub holds the CA, so it can certify another key for the name of a known member."""
    folder = case.federation.folder / "lying"
    authority.issue(case.federation.certs, "bank", out=folder / "certs", force=True)
    authority.give_ca(case.federation.certs, folder / "certs")
    case.propose(sign_proposal(load(folder, "bank")))
    case.members["bank"] = {"pin": case.federation.pin(folder / "certs" / "bank.pem")}


@pytest.mark.parametrize("change", [change_recipe, pose_as_bank])
def test_a_changed_or_invented_proposal_is_ignored(case: Case, change: Change) -> None:
    case.report()
    change(case)
    case.report()
    assert case.entry["id"] not in case.node._known


def vote_nothing(_: Case) -> None:
    pass


def vote_by_the_hub(case: Case) -> None:
    certs = case.federation.folder / "hub" / "certs"
    folder = case.federation.folder / "hub"
    assert certs.exists()
    case.vote(load(folder, HUB), party="bank")


def vote_for_another(case: Case) -> None:
    case.vote(case.bank, proposal="0" * 64)


def vote_against(case: Case) -> None:
    case.vote(case.bank, kind="deny")


def vote_with_other_keys(case: Case) -> None:
    case.vote(case.bank, peers=case.peers | {"shop": "sha256:" + "0" * 64})


def vote_twice_by_shop(case: Case) -> None:
    case.vote(case.shop, party="bank")


@pytest.mark.parametrize(
    "vote",
    [
        vote_nothing,
        vote_by_the_hub,
        vote_for_another,
        vote_against,
        vote_with_other_keys,
        vote_twice_by_shop,
    ],
)
def test_no_run_begins_without_all_approvals(case: Case, vote: Change) -> None:
    approve(case)
    vote(case)
    case.report(state="running")
    assert "refused at shop" in case.ended
    assert not case.node._runs


def test_no_run_begins_without_the_approval_of_this_node(case: Case) -> None:
    # The key of shop has signed it, but this node does not know it: somebody copied the key.
    case.report()
    case.vote(case.bank)
    case.vote(case.shop)
    case.report(state="running")
    assert "shop has not approved it" in case.ended


def test_an_ended_run_never_begins_again(case: Case) -> None:
    approve(case)
    case.vote(case.bank)
    case.node._known[case.entry["id"]].ended = ("done", "")
    case.report(state="running")
    assert not case.node._runs


@pytest.mark.parametrize("kind", ["stop", "deny"])
def test_the_vote_of_this_node_ends_a_run_whatever_the_hub_does(
    case: Case, kind: Literal["stop", "deny"]
) -> None:
    approve(case)
    case.vote(case.bank)
    case.report(state="running")
    case.node.vote(case.entry["id"], kind, "enough")
    assert not case.node._runs
    for state in ("running", "open", "running"):
        case.report(state=state)
    assert not case.node._runs
    with raises(InputError, Code.REFUSED, names="ended"):
        case.node.approve(case.entry["id"])


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "expired"])
def test_a_run_that_the_hub_has_ended_never_begins(case: Case, state: str) -> None:
    approve(case)
    case.vote(case.bank)
    case.report(state=state)
    case.report(state="running")
    assert not case.node._runs


def test_no_run_begins_after_its_time(case: Case) -> None:
    case.propose(sign_proposal(case.bank, until=time.time() - 1000.0))
    approve(case)
    case.vote(case.bank)
    case.report(state="running")
    assert "after the time" in case.ended


def test_no_more_runs_begin_than_this_node_allows(case: Case) -> None:
    numbers = []
    for _ in range(2):
        case.propose(sign_proposal(case.bank))
        approve(case)
        case.vote(case.bank)
        case.report(state="running")
        numbers.append(case.entry["id"])
    assert [*case.node._runs] == numbers[:1]


def test_a_hub_cannot_propose_in_the_name_of_this_node(case: Case) -> None:
    folder = case.federation.folder / "lying"
    authority.issue(case.federation.certs, "shop", out=folder / "certs", force=True)
    authority.give_ca(case.federation.certs, folder / "certs")
    case.members["shop"] = {"pin": case.federation.pin(folder / "certs" / "shop.pem")}
    case.propose(sign_proposal(load(folder, "shop")))
    case.report()
    assert case.entry["id"] not in case.node._known


@pytest.mark.parametrize(
    "facts",
    [{"state": ["x"]}, {"state": "begun"}, {"votes": []}, {"votes": {"bank": 1}}, {"id": "../x"}],
)
def test_a_malformed_proposal_is_ignored(case: Case, facts: dict[str, Any]) -> None:
    case.report(**facts)
    assert not case.node._known
    case.node.list_proposals()


def test_members_with_impossible_names_or_pins_are_ignored(case: Case) -> None:
    case.members |= {"a\x1b[2J": {"pin": "sha256:" + "0" * 64}, "evil": {"pin": "x"}}
    case.report()
    assert set(case.node.members) == set(MEMBERS)


def test_a_known_key_changes_only_by_a_person(case: Case) -> None:
    case.report()
    own = case.peers["bank"]
    case.members["bank"] = {"pin": "sha256:" + "0" * 64, "connected": True}
    case.report()
    assert case.node.get_known_pin("bank") == own
    case.node.trust("bank", "sha256:" + "0" * 64)
    with raises(PeerError, Code.IDENTITY_MISMATCH, names="bank"):
        documents.verify(
            Envelope.read(case.entry["envelope"], documents.PROPOSAL),
            "bank",
            case.node.get_known_pin("bank"),
            case.shop,
        )


# -- at the port of a hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Standing]:
    federation = Standing(tmp_path)
    federation.start_hub()
    yield federation
    federation.close()


def open_session(
    federation: Standing, credentials: Credentials, **more: Any
) -> tuple[Client, dict[str, Any]]:
    path = federation.folder / "bank" / "node.toml"
    settings = load_node(path)
    client = Client(settings.make_address())
    statement = {
        "name": credentials.name,
        "hub": settings.hub_pin,
        "at": time.time(),
        "nonce": secrets.token_hex(16),
        **more,
    }
    return client, Envelope.seal(documents.SESSION, statement, credentials).value


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"name": "shop"}, "shop"),
        ({"hub": "sha256:" + "0" * 64}, "another hub"),
        ({"at": 1.0}, "clocks"),
        ({"name": "stranger"}, "not a member"),
    ],
)
def test_a_member_cannot_pose_as_another(hub: Standing, facts: dict[str, Any], words: str) -> None:
    client, proof = open_session(hub, load(hub.folder / "bank", "bank"), **facts)
    with raises(PeerError, Code.REFUSED, names=words):
        client.ask("/v1/session", proof)
    client.close()


def test_a_session_is_for_its_own_documents(hub: Standing) -> None:
    bank, shop = (load(hub.folder / name, name) for name in MEMBERS)
    client, proof = open_session(hub, bank)
    token = client.ask("/v1/session", proof)["token"]
    with raises(PeerError, Code.REFUSED, names="used before"):
        client.ask("/v1/session", proof)
    own = sign_proposal(bank)
    number = client.ask("/v1/documents", own.value, token=token)["id"]
    peers = dict.fromkeys(MEMBERS, "sha256:" + "0" * 64)
    of_another: list[tuple[Any, str]] = [
        (sign_proposal(shop).value, "certificate"),
        (documents.sign_vote(shop, number, "approve", peers).value, "certificate"),
        (documents.sign_vote(bank, "0" * 64, "approve", peers).value, "no such proposal"),
        (sign_proposal(bank, data={"bank": "main"}).value, "data"),
        (sign_proposal(bank, until=1.0).value, "until"),
        (sign_proposal(bank, digest="0" * 64).value, "digest"),
        (sign_proposal(bank, recipe=make_recipe(seed=None), digest="0" * 64).value, "recipe"),
        (sign_proposal(bank, recipe=make_recipe("\ud800"), digest="0" * 64).value, "recipe"),
        (sign_proposal(bank, purpose="x" * 501).value, "purpose"),
        (sign_proposal(bank, recipe=make_recipe(server="other")).value, "server"),
        ({"payloadType": documents.VOTE}, "vote"),
        ([1], "vote"),
    ]
    for value, words in of_another:
        with raises(PeerError, Code.REFUSED, names=words):
            client.ask("/v1/documents", value, token=token)
    for wrong in ("", "x", token[:-1] + "é"):
        with raises(PeerError, Code.REFUSED, names="session"):
            client.ask("/v1/sync", {}, token=wrong.encode("latin-1").decode("latin-1"))
    client.close()
    store = open_store(hub.folder / "hub")
    assert [entry.id for entry in store.entries()] == [number]
    assert store.entries()[0].votes == {}
    store.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/tunnel/dial/RUN/bank/server", 403),
        ("/tunnel/accept/0123", 403),
        ("/tunnel/", 403),
        ("/tunnel/dial/../../etc/bank/server", 403),
        ("/v1/sync", 426),
        ("/healthz", 426),
    ],
)
def test_a_stranger_gets_nothing_without_tls(hub: Standing, path: str, status: int) -> None:
    connection = http.client.HTTPConnection(hub.address, timeout=20)
    connection.request("GET", path, headers={"Authorization": "Bearer x"})
    assert connection.getresponse().status == status
    connection.close()


def test_a_large_body_is_refused(hub: Standing) -> None:
    context = ssl.create_default_context(cafile=str(hub.certs / "ca.pem"))
    host, _, port = hub.address.partition(":")
    for head in ("Content-Length: 500000000", "Transfer-Encoding: chunked"):
        raw = socket.create_connection((host, int(port)), 20)
        with context.wrap_socket(raw, server_hostname=HUB) as sock:
            sock.sendall(f"POST /v1/session HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            assert sock.recv(1000).split(b" ")[1] in (b"411", b"413")


def test_a_body_that_does_not_arrive_is_refused(hub: Standing) -> None:
    context = ssl.create_default_context(cafile=str(hub.certs / "ca.pem"))
    host, _, port = hub.address.partition(":")
    raw = socket.create_connection((host, int(port)), 60)
    with context.wrap_socket(raw, server_hostname=HUB) as sock:
        sock.sendall(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(1000).split(b" ")[1] == b"408"


def test_a_second_hub_is_refused(hub: Standing) -> None:
    again = hub.run("again", "vfl-server", "hub", "--folder", "hub", "--listen", "127.0.0.1:0")
    assert again.wait() == 2
    assert "in use by another hub" in again.stderr
    again.close()


def test_joining_overwrites_nothing(hub: Standing) -> None:
    store = open_store(hub.folder / "hub")
    for name in (HUB, "Shop"):
        with raises(InputError, Code.CONFIG_INVALID, names=name):
            joining.invite(store, hub.certs, hub.url, name, HUB, ["main"])
    folder = hub.folder / "shop"
    before = {path: path.read_bytes() for path in (folder / "certs").iterdir()}
    foreign = hub.folder / "foreign"
    authority.create_authority(foreign, "other")
    authority.issue(foreign, HUB)
    for certs in (foreign, hub.certs):
        token = joining.invite(store, certs, hub.url, "shop", HUB, ["main"])
        with raises(InputError, Code.FILE_INVALID, names="shop"):
            joining.join(token, folder, 0.0, lambda _text: None)
    store.close()
    assert {path: path.read_bytes() for path in (folder / "certs").iterdir()} == before


@pytest.mark.parametrize("content", [b"", b"\r\n\r\n", b"GET", b"\x16\x03\x01", b"a" * 40_000])
def test_nonsense_ends_its_connection_alone(hub: Standing, content: bytes) -> None:
    host, _, port = hub.address.partition(":")
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        with pytest.MonkeyPatch.context():
            try:
                answer = sock.recv(100)
            except ConnectionError:
                answer = b""
        assert b" 200 " not in answer
    context = ssl.create_default_context(cafile=str(hub.certs / "ca.pem"))
    raw = socket.create_connection((host, int(port)), 20)
    with context.wrap_socket(raw, server_hostname=HUB) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 200 " in sock.recv(1000)
