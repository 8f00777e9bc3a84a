"""What only a wire can do: break, lie, and let strangers in. See ``test_exchange`` for the contract
itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from tests.contract.exchanges import ACTIVE, PASSIVES, WAIT_S, GrpcExchange, credentials, soon
from tests.harness.errors import assert_names, raises
from tests.harness.pki import company, dns, signer, written
from tests.harness.proxy import Proxy
from tests.harness.waiting import wait_until
from vfl.certs.authority import create_authority, issue
from vfl_common.bundle import (
    PROTOCOL,
    Buffer,
    Bundle,
    BundleSpec,
    Direction,
    DType,
    Kind,
    Lenience,
    StepKey,
    TensorSpec,
)
from vfl_common.config.party import TlsSettings
from vfl_common.errors import (
    CATALOGUE,
    AbortedError,
    Code,
    InputError,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
)
from vfl_common.frames import FRAME_BYTES, encode, parse_frame
from vfl_common.identity.credentials import BOTH, Members, load_credentials
from vfl_common.identity.diagnose import diagnose, fetch_certificate
from vfl_common.identity.keyring import Keyring
from vfl_common.identity.pem import compute_pin
from vfl_common.pb.vfl.v1 import exchange_pb2, failure_pb2
from vfl_common.rpc import channel
from vfl_common.rpc.ask import LogHeads
from vfl_common.rpc.channel import connect, dial, run_server
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.service import FramePipe
from vfl_common.rpc.health import Health

FIRST, SECOND = StepKey("train", 0, 0), StepKey("train", 0, 1)
NOTHING, ACK = BundleSpec(Kind.ACK), Bundle(Kind.ACK)
# Bytes: three frames.
SIZE = 6_000_000
BIG = BundleSpec(Kind.WEIGHTS, {"w": TensorSpec(DType.UINT8, (SIZE,))})


def big(value: int) -> Bundle:
    return Bundle(
        Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (SIZE,), memoryview(bytes([value]) * SIZE))}
    )


@pytest.fixture
def found() -> Iterator[GrpcExchange]:
    exchange = GrpcExchange(["north"], WAIT_S)
    yield exchange
    exchange.close()


class Stream:
    """A stream on which a test says what it likes."""

    def __init__(self, exchange: GrpcExchange, party: str, attach: bytes | None = None) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.say(attached() if attach is None else attach)
        self._replies = exchange.raw(party, iter(self._requests.get, None))

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            self._requests.put(frame)

    def hear(self) -> exchange_pb2.Frame:
        return parse_frame(next(self._replies), party=ACTIVE).envelope

    def refused(self) -> failure_pb2.Failure:
        """The failure that ends the stream; nothing comes after it."""
        failure = self.hear().failure
        assert list(self._replies) == []
        return failure


def attached(run_id: str = "run", generation: int = 1, protocol: int = PROTOCOL) -> bytes:
    attach = exchange_pb2.Attach(run_id=run_id, generation=generation, protocol=protocol)
    return exchange_pb2.Frame(attach=attach).SerializeToString()


def frames(step: StepKey, bundle: Bundle, **size: int) -> list[bytes]:
    return [encoded.data for encoded in encode(step, bundle, **size)]


# -- connections that break


def delivered(found: GrpcExchange) -> int:
    """Frames of north's bundle that have come."""
    incoming = found.hub.pipe._incoming.get("north")
    return 0 if incoming is None else incoming.parts


@pytest.mark.parametrize("collecting", [False, True])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_request_that_breaks_goes_on_where_it_broke(
    share: float, times: int, collecting: bool, found: GrpcExchange
) -> None:
    """Cut after such a share of its bytes; of three frames, those that came whole do not come
    again.
    """
    values = bytes(range(250)) * (SIZE // 250)
    bundle = Bundle(Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (SIZE,), memoryview(values))})
    with Proxy(found.address) as proxy:
        link = found.new_link("north", address=proxy.address)
        collected = soon(lambda: found.hub.collect(FIRST, BIG)) if collecting else None
        proxy.hold_at(sent=int(share * SIZE))
        asked = soon(lambda: link.swap(FIRST, bundle, NOTHING))
        for time_ in range(times):
            proxy.wait_until_held()
            if time_ + 1 < times:
                # Before another frame is whole.
                proxy.hold_at(sent=proxy.sent + SIZE // 20)
            # What nobody has read is lost.
            wait_until(lambda: delivered(found) >= share * SIZE // FRAME_BYTES)
            proxy.cut()
        proxy.release()
        got = (collected or soon(lambda: found.hub.collect(FIRST, BIG))).result(WAIT_S)
        assert got["north"].tensors["w"].data == values
        found.hub.reply(FIRST, {"north": ACK})
        assert asked.result(WAIT_S).kind is Kind.ACK
        # A look at the certificate each time, then the link.
        assert proxy.connections == 2 * (1 + times)
        (entry,) = [
            each
            for each in found.ledger.entries()
            if (each.kind, each.direction) == ("weights", "received")
        ]
        assert (entry.payload_bytes, entry.messages) == (SIZE, 3)


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.2, 1.5, 2.9])
def test_several_steps_in_flight_go_on_where_they_broke(share: float, done: int) -> None:
    """Cut after so many of four bundles' bytes, or in a reply, when ``done`` are answered: all
    come, and come once.
    """
    found = GrpcExchange(["north"], WAIT_S, in_flight=4)
    steps = [StepKey("train", 0, batch) for batch in range(4)]
    try:
        with Proxy(found.address) as proxy:
            link = found.new_link("north", address=proxy.address)
            if done == 0:
                proxy.hold_at(sent=int(share * SIZE))
            for number, step in enumerate(steps):
                link.send(step, big(number))
            # All bundles have come; a held connection would also hold gRPC's word that there is
            # room.
            if done:
                wait_until(lambda: found.hub.pipe._delivered["north"], lambda frames: frames == 12)
                proxy.hold_at(received=proxy.received + int(share * SIZE))
            for step in steps[:done]:
                values = found.hub.collect(step, BIG)["north"].tensors["w"].data
                assert bytes(values) == bytes([step.batch]) * SIZE
                found.hub.reply(step, {"north": big(10 + step.batch)})
            heard = soon(
                lambda: [bytes(link.receive(step, BIG).tensors["w"].data) for step in steps]
            )
            if done == 0 or share < done:
                proxy.wait_until_held()
                # A frame that the hub reads after the cut is sent again, and counts twice.
                if done == 0:
                    bundles, rest = divmod(int(share * SIZE), SIZE)
                    came = 3 * bundles + rest // FRAME_BYTES
                    wait_until(
                        lambda: found.hub.pipe._delivered["north"], lambda frames: frames == came
                    )
                proxy.cut()
            proxy.release()
            for step in steps[done:]:
                values = found.hub.collect(step, BIG)["north"].tensors["w"].data
                assert bytes(values) == bytes([step.batch]) * SIZE
                found.hub.reply(step, {"north": big(10 + step.batch)})
            assert heard.result(WAIT_S) == [bytes([10 + step.batch]) * SIZE for step in steps]
        (entry,) = [
            each
            for each in found.ledger.entries()
            if (each.kind, each.direction) == ("weights", "received")
        ]
        assert (entry.payload_bytes, entry.messages) == (4 * SIZE, 12)
    finally:
        found.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_reply_that_breaks_is_given_again(goes_on: bool, found: GrpcExchange) -> None:
    """Also where the active party never collects again: after the last step of a run, say."""
    with Proxy(found.address) as proxy:
        link = found.new_link("north", address=proxy.address)
        proxy.hold_at(received=SIZE // 2)
        asked = soon(lambda: link.swap(FIRST, ACK, BIG))
        found.hub.collect(FIRST, NOTHING)
        found.hub.reply(FIRST, {"north": big(9)})
        next_step = soon(lambda: found.hub.collect(SECOND, NOTHING)) if goes_on else None
        proxy.wait_until_held()
        proxy.cut()
        proxy.release()
        assert asked.result(WAIT_S).tensors["w"].data == bytes([9]) * SIZE
        if next_step is not None:
            assert not next_step.done()
            last = soon(lambda: link.swap(SECOND, ACK, NOTHING))
            assert list(next_step.result(WAIT_S)) == ["north"]
            found.hub.reply(SECOND, {"north": ACK})
            assert last.result(WAIT_S).kind is Kind.ACK


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives connections a fifth of the product's times."""
    for name in ("_SHARED_OPTIONS", "_SERVER_OPTIONS"):
        options = [
            (key, value // 5 if key.endswith("_ms") else value)
            for key, value in getattr(channel, name)
        ]
        monkeypatch.setattr(channel, name, options)


def test_a_peer_that_hangs_is_noticed_within_15_s() -> None:
    options = dict(channel._SHARED_OPTIONS)
    for answer in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert options["grpc.keepalive_time_ms"] + options[answer] <= 15_000


@pytest.mark.usefixtures("hurried")
def test_a_peer_that_hangs_is_noticed_at_both_ends_though_its_kernel_acknowledges(
    found: GrpcExchange,
) -> None:
    """After 3 s: keepalive's ping every 2 s, and 1 s for its answer."""
    with Proxy(found.address) as proxy:
        link = found.new_link("north", address=proxy.address, reconnect_s=1.0, timeout_s=120.0)
        asked = soon(lambda: link.swap(FIRST, ACK, BIG))
        found.hub.collect(FIRST, NOTHING)
        proxy.hold_at(sent=0, received=0)
        # gRPC's own timeout would take a minute more.
        assert isinstance(asked.exception(35.0), LostError)
        found.service.wait_until_idle(5.0)
        assert found.service._num_attached == 0


def test_a_party_that_reconnects_while_its_step_is_computed_gets_the_reply(
    found: GrpcExchange,
) -> None:
    with Proxy(found.address) as proxy:
        link = found.new_link("north", address=proxy.address)
        asked = soon(lambda: link.swap(FIRST, big(1), BIG))
        # The bundle is in; the step is being computed.
        found.hub.collect(FIRST, BIG)
        before = proxy.sent
        first = found.hub.pipe._incoming["north"].stream
        proxy.cut()
        # It asks there how much has come.
        wait_until(lambda: found.hub.pipe._incoming["north"].stream is not first)
        found.hub.reply(FIRST, {"north": big(2)})
        assert asked.result(WAIT_S).tensors["w"].data == bytes([2]) * SIZE
        # And nothing is sent again.
        assert proxy.sent < before + SIZE // 10


def test_frames_of_an_older_stream_are_of_no_account() -> None:
    """Whatever the order in which the threads of an old and a new stream come to deliver their
    frames.
    """
    spec = BundleSpec(Kind.WEIGHTS, {"w": TensorSpec(DType.UINT8, (4,))})
    bundle = Bundle(Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (4,), memoryview(b"abcd"))})
    first, last = (
        parse_frame(data, party="north") for data in frames(FIRST, bundle, frame_bytes=2)
    )
    for late in ([], [first], [first, last]):
        pipe = FramePipe("run", 1, ["north"])
        old = pipe.open("north")
        pipe.deliver(old, first)
        new = pipe.open("north")
        for frame in late:
            pipe.deliver(old, frame)
        for frame in (first, last):
            pipe.deliver(new, frame)
        for frame in late:
            pipe.deliver(old, frame)
        hub = ExchangeHub(pipe, timeout_s=WAIT_S)
        assert hub.collect(FIRST, spec)["north"].tensors["w"].data == b"abcd"
        hub.reply(FIRST, {"north": ACK})
        assert isinstance(new.outbox.get(timeout=WAIT_S), list)
        # And the next step does not trip over them.
        waiting = soon(hub.collect, SECOND, spec)
        for data in frames(SECOND, bundle):
            pipe.deliver(new, parse_frame(data, party="north"))
        assert list(waiting.result(WAIT_S)) == ["north"]


def test_a_peer_that_cannot_be_reached_is_lost(found: GrpcExchange) -> None:
    with Proxy("127.0.0.1:1") as proxy:
        link = found.new_link("north", address=proxy.address, reconnect_s=0.5)
        began_s = time.monotonic()
        with raises(LostError, Code.PARTY_LOST, names="0.5"):
            link.swap(FIRST, ACK, NOTHING)
        assert 0.4 < time.monotonic() - began_s < 5.0


def test_a_peer_that_does_not_answer_in_time_is_named(found: GrpcExchange) -> None:
    link = found.new_link("north", timeout_s=0.4)
    with raises(LostError, Code.STEP_TIMEOUT, names=("run.step_timeout_s", "0.4"), party=ACTIVE):
        soon(lambda: link.swap(FIRST, ACK, NOTHING)).result(WAIT_S)


def test_both_ends_count_the_same_after_an_orderly_end(found: GrpcExchange) -> None:
    link = found.new_link("north")
    for batch in range(3):
        step = StepKey("train", 0, batch)
        asked = soon(link.swap, step, big(step.batch), BIG)
        found.hub.reply(step, found.hub.collect(step, BIG))
        asked.result(WAIT_S)
    link.close()
    ours = {(e.phase, e.kind, e.direction): e for e in found.ledgers["north"].entries()}
    theirs = {(e.phase, e.kind, e.direction): e for e in found.ledger.entries()}
    swapped: dict[Direction, Direction] = {"sent": "received", "received": "sent"}
    assert {(phase, kind, swapped[direction]) for phase, kind, direction in ours} == theirs.keys()
    for (phase, kind, direction), entry in ours.items():
        other = theirs[phase, kind, swapped[direction]]
        counts = (entry.payload_bytes, entry.message_bytes, entry.messages)
        assert counts == (other.payload_bytes, other.message_bytes, other.messages)
    assert ours["train", "weights", "sent"].payload_bytes == 3 * SIZE
    assert ours["train", "weights", "sent"].messages == 9


# -- who may come in


def test_a_certificate_of_the_federation_is_not_enough(
    found: GrpcExchange, caplog: pytest.LogCaptureFixture
) -> None:
    with raises(PeerError, Code.ROLE_MISMATCH):
        soon(lambda: found.new_link("stranger").swap(FIRST, ACK, NOTHING)).result(WAIT_S)
    assert found.service.refusals.counts() == {"ROLE_MISMATCH": 1}
    assert_names(caplog.text, "vfl_common.rpc.guard")
    # The run goes on without it.
    assert found.hub.pipe.ended is None
    assert all(entry.peer != "stranger" for entry in found.ledger.entries())


def test_a_certificate_of_another_authority_does_not_come_in(
    found: GrpcExchange, tmp_path: Path
) -> None:
    create_authority(tmp_path, "elsewhere")
    forged = load_credentials(issue(tmp_path, "north"), name="north")
    link = found.new_link("north", identity=forged, reconnect_s=0.5)
    with raises(LostError, Code.PARTY_LOST):
        soon(lambda: link.swap(FIRST, ACK, NOTHING)).result(WAIT_S)
    assert found.ledger.entries() == []


def test_with_revoked_certificates_a_link_trusts_the_one_that_it_has_looked_at(
    found: GrpcExchange,
) -> None:
    """It waits for a peer to look at, as it waits for any peer, and then exchanges as ever."""
    looks = 0

    def channel() -> grpc.Channel:
        nonlocal looks
        looks += 1
        return dial("127.0.0.1:1" if looks == 1 else found.address, knowing, ACTIVE)

    knowing = replace(credentials("north"), revoked=frozenset({1}))
    link = found.link("north")
    link._make_channel = channel
    asked = soon(lambda: link.swap(FIRST, ACK, NOTHING))
    assert list(soon(lambda: found.hub.collect(FIRST, NOTHING)).result(WAIT_S)) == ["north"]
    found.hub.reply(FIRST, {"north": ACK})
    assert asked.result(WAIT_S).kind is Kind.ACK
    assert looks == 2


def test_a_link_that_has_looked_at_one_certificate_accepts_no_other(
    found: GrpcExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between passes the look on to the peer, and then answers himself with a stolen,
    revoked certificate.
    """
    another = credentials("north").certificate
    monkeypatch.setattr("vfl_common.rpc.channel.fetch_certificate", lambda *_: another)
    knowing = replace(credentials("north"), revoked=frozenset({1}))
    with dial(found.address, knowing, ACTIVE) as made, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(made).result(1.0)


def test_a_link_refuses_a_revoked_peer_at_once(found: GrpcExchange) -> None:
    knowing = replace(
        credentials("north"), revoked=frozenset({credentials(ACTIVE).certificate.serial_number})
    )
    link = found.new_link("north", identity=knowing, reconnect_s=WAIT_S)
    with raises(PeerError, Code.CERTIFICATE_INVALID, party=ACTIVE):
        soon(lambda: link.swap(FIRST, ACK, NOTHING)).result(WAIT_S)


@pytest.mark.parametrize(
    "names", [["ACTIVE"], ["active."], ["active", "north"], ["south", "active"], []]
)
def test_a_link_takes_a_peer_for_nobody_but_exactly_itself(
    names: list[str], tmp_path: Path
) -> None:
    """gRPC alone would take all of these for ``active``, the last one by its common name."""
    create_authority(tmp_path, "f")
    members = Members(frozenset([ACTIVE, *PASSIVES]))
    mine = load_credentials(issue(tmp_path, "north"), name="north", members=members)
    leaf = signer(tmp_path).leaf(dns(*names), common_name=ACTIVE)
    with plain_server(written(tmp_path, "false", leaf)) as address:
        for _ in range(2):
            error = connect(address, mine, ACTIVE, WAIT_S)
            assert isinstance(error, InputError)
            assert error.code is Code.IDENTITY_MISMATCH
            assert_names(str(error), "active", "127.0.0.1")
        with pytest.raises(InputError):
            dial(address, mine, ACTIVE)
    with plain_server(
        written(tmp_path, "right", signer(tmp_path).leaf(dns("host.example.org", ACTIVE)))
    ) as address:
        made = connect(address, mine, ACTIVE, WAIT_S)
        assert isinstance(made, grpc.Channel)
        made.close()


def test_a_link_refuses_a_peer_of_another_key_than_is_pinned(found: GrpcExchange) -> None:
    pins = {ACTIVE: compute_pin(credentials(ACTIVE).certificate)}
    for pinned, right in ((pins, True), ({ACTIVE: f"sha256:{'0' * 64}"}, False)):
        knowing = replace(
            credentials("north"), members=Members(frozenset([ACTIVE, *PASSIVES]), pinned)
        )
        made = connect(found.address, knowing, ACTIVE, WAIT_S)
        assert isinstance(made, grpc.Channel) == right
        if isinstance(made, grpc.Channel):
            made.close()
        else:
            assert isinstance(made, PeerError)
            assert (made.code, made.party) == (Code.IDENTITY_MISMATCH, ACTIVE)


def test_a_chain_is_enough_at_both_ends(tmp_path: Path) -> None:
    """All have the root; each sends its intermediate. The keys of both are encrypted on the
    disk.
    """
    below = company(tmp_path).intermediate()
    rings = {}
    (tmp_path / "passphrase").touch(mode=0o600)
    (tmp_path / "passphrase").write_text("secret")
    for name in (ACTIVE, "north"):
        leaf = below.leaf(
            [
                *dns(f"{name}.example.org", name),
                x509.UniformResourceIdentifier(f"spiffe://f/{name}"),
            ]
        )
        tls = written(tmp_path, name, leaf, below, passphrase=b"secret")
        tls = tls.model_copy(update={"passphrase_file": str(tmp_path / "passphrase")})
        rings[name] = Keyring(tls, name, Members(frozenset([ACTIVE, *PASSIVES])), uses=BOTH)
    health = Health({"": lambda: True}, rings[ACTIVE], may_ask=["north"])
    with run_server("127.0.0.1:0", rings[ACTIVE], [health], 4) as (_, address):
        made = connect(address, rings["north"].current(), ACTIVE, WAIT_S)
        assert isinstance(made, grpc.Channel), made
        with made:
            check = made.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=WAIT_S) == b"\x08\x01"


def test_a_look_needs_no_key_and_leaves_no_file(
    found: GrpcExchange, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the look nor the diagnosis of a failure writes the key anywhere; the peer counts no
    failed handshake.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    keyless = replace(credentials("north"), key_pem=b"", certificate_pem=b"")
    opened: list[str] = []
    real = os.open

    def noting(path: str, *rest: Any, **more: Any) -> int:
        opened.append(path)
        return real(path, *rest, **more)

    monkeypatch.setattr("os.open", noting)
    shown = fetch_certificate(found.address, keyless, ACTIVE, WAIT_S)
    assert shown == credentials(ACTIVE).certificate
    assert_names(
        str(diagnose(found.address, credentials("north"), ACTIVE, WAIT_S)), "active", "127.0.0.1"
    )
    assert (opened, list(tmp_path.iterdir())) == ([], [])


@contextmanager
def plain_server(tls: TlsSettings) -> Iterator[str]:
    """A server of gRPC with any certificate; gives its address."""
    pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    root = Path(tls.ca).read_bytes()
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], root, require_client_auth=True)
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_connecting_takes_its_time_although_nobody_can_be_looked_at() -> None:
    """Otherwise a party that waits for its server would ask as fast as it can."""
    knowing = replace(credentials("north"), revoked=frozenset({1}))
    began_s = time.monotonic()
    error = connect("127.0.0.1:1", knowing, ACTIVE, 0.5)
    assert time.monotonic() - began_s >= 0.5
    assert isinstance(error, InputError)
    assert error.code is Code.UNREACHABLE


# The type of the frame that opens a stream.
HTTP2_HEADERS = 1
HTTP2_SETTINGS, HTTP2_GOAWAY = b"\0\0\0\x04\0\0\0\0\0", b"\0\0\x08\x07\0" + bytes(4 + 4 + 4)


def read_frame_type(tls: ssl.SSLSocket) -> int:
    """Reads a frame of HTTP/2. Returns its type; raises OSError at the end."""
    head = read(tls, 9)
    read(tls, int.from_bytes(head[:3], "big"))
    return head[3]


def read(tls: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := tls.recv(size - len(data))):
            raise ConnectionResetError
        data += more
    return data


def test_a_stream_that_an_ending_peer_refuses_is_not_opened_again_by_grpc(tmp_path: Path) -> None:
    """It would hang now and then; see ``dial``. The peer here refuses every stream, as a server
    does that ends.
    """
    own, pem = credentials(ACTIVE), tmp_path / "own.pem"
    pem.write_bytes(own.certificate_pem + b"\n" + own.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["h2"])
    streams = 0

    def serve() -> None:
        nonlocal streams
        # The listener is closed.
        with contextlib.suppress(OSError):
            while True:
                raw, _ = listener.accept()
                with (
                    contextlib.suppress(OSError),
                    context.wrap_socket(raw, server_side=True) as tls,
                ):
                    tls.settimeout(WAIT_S)
                    # The preface.
                    read(tls, 24)
                    tls.sendall(HTTP2_SETTINGS)
                    while read_frame_type(tls) != HTTP2_HEADERS:
                        pass
                    streams += 1
                    tls.sendall(HTTP2_GOAWAY)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = soon(serve)
        with dial(f"127.0.0.1:{listener.getsockname()[1]}", credentials("north"), ACTIVE) as made:
            grpc.channel_ready_future(made).result(WAIT_S)
            with pytest.raises(grpc.RpcError) as caught:
                list(
                    made.stream_stream("/vfl.v1.Exchange/Swap")(iter([attached()]), timeout=WAIT_S)
                )
        # Ends ``accept``.
        listener.shutdown(socket.SHUT_RDWR)
    served.result(WAIT_S)
    assert (caught.value.code(), streams) == (grpc.StatusCode.UNAVAILABLE, 1)


def test_a_caller_without_a_certificate_does_not_come_in(found: GrpcExchange) -> None:
    tls = grpc.ssl_channel_credentials(credentials("north").ca_pem)
    channel = grpc.secure_channel(found.address, tls, [("grpc.ssl_target_name_override", ACTIVE)])
    with channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream("/vfl.v1.Exchange/Swap")(iter([attached()]), timeout=2.0))
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_an_earlier_generation_is_stale(found: GrpcExchange) -> None:
    found.begin(2)
    assert Stream(found, "north").refused().code == Code.STALE_GENERATION
    assert Stream(found, "north", attached("another", 2)).refused().code == Code.STALE_GENERATION
    with pytest.raises(LostError):
        soon(lambda: found.new_link("north", reconnect_s=0.3).swap(FIRST, ACK, NOTHING)).result(
            WAIT_S
        )


def test_a_party_that_is_ahead_waits_for_the_new_generation(found: GrpcExchange) -> None:
    asked = soon(lambda: found.new_link("north", generation=2).swap(FIRST, ACK, NOTHING))
    old, new = found.hub, found.begin(2)
    assert list(soon(lambda: new.collect(FIRST, NOTHING)).result(WAIT_S)) == ["north"]
    new.reply(FIRST, {"north": ACK})
    assert asked.result(WAIT_S).kind is Kind.ACK
    assert old.pipe._streams == {}


def test_another_protocol_is_refused(found: GrpcExchange) -> None:
    failure = Stream(found, "north", attached(protocol=PROTOCOL + 1)).refused()
    assert failure.code == Code.PROTOCOL_DIFFERS
    assert failure.party == "north"
    assert str(PROTOCOL + 1) in failure.message


# -- what may be said


@pytest.mark.parametrize(
    "first", [b"", b"\xff\xff\xff", exchange_pb2.Frame(last=True).SerializeToString()]
)
def test_a_stream_begins_with_attach(first: bytes, found: GrpcExchange) -> None:
    assert Stream(found, "north", first).refused().code == Code.MALFORMED_MESSAGE
    assert found.hub.pipe.ended is None


_HEADER = exchange_pb2.Frame.FromString(frames(FIRST, big(0))[0])


def _frame(**changes: Any) -> bytes:
    """The first frame of ``big``, with other fields."""
    frame = exchange_pb2.Frame()
    frame.CopyFrom(_HEADER)
    frame.MergeFrom(exchange_pb2.Frame(**changes))
    return frame.SerializeToString()


def _header(**tensor: Any) -> bytes:
    frame = exchange_pb2.Frame(last=True)
    frame.step.phase = "train"
    frame.header.kind = tensor.pop("kind", Kind.WEIGHTS)
    for _ in range(tensor.pop("times", 1)):
        frame.header.tensors.add(**{"name": "w", "dtype": DType.UINT8, "shape": [SIZE]} | tensor)
    return frame.SerializeToString()


# Without data.
_HEADER_BYTES = _header()

LIES = {
    "no protobuf": ([b"\xff\xff\xff"], Code.MALFORMED_MESSAGE),
    "a name that is not UTF-8": ([b"\x1a\x06\x12\x04\x0a\x02\xff\xfe"], Code.MALFORMED_MESSAGE),
    "no header": (
        [exchange_pb2.Frame(data=b"abc", last=True).SerializeToString()],
        Code.MALFORMED_MESSAGE,
    ),
    "nothing": ([b""], Code.MALFORMED_MESSAGE),
    "fewer bytes than announced": ([_frame(last=True)], Code.MALFORMED_MESSAGE),
    "more bytes than announced": (
        [_frame(), *[exchange_pb2.Frame(data=bytes(FRAME_BYTES)).SerializeToString()] * 3],
        Code.TENSOR_TOO_LARGE,
    ),
    "data that ends before its length": ([_HEADER_BYTES + b"\x32\x7fabc"], Code.MALFORMED_MESSAGE),
    "a length that never ends": ([_HEADER_BYTES + b"\x32" + b"\xff" * 12], Code.MALFORMED_MESSAGE),
    "a header that ends after the message": (
        [b"\x1a\x7f\x08\x03\x32\x01a"],
        Code.MALFORMED_MESSAGE,
    ),
    "data and nothing around it": ([b"\x32\x03abc"], Code.MALFORMED_MESSAGE),
    "an unknown kind": ([_header(kind=99)], Code.MALFORMED_MESSAGE),
    "an unknown dtype": ([_header(dtype=99)], Code.MALFORMED_MESSAGE),
    "no dtype": ([_header(dtype=0)], Code.MALFORMED_MESSAGE),
    "two tensors of one name": ([_header(times=2)], Code.MALFORMED_MESSAGE),
    "too many tensors": ([_header(times=5000)], Code.MALFORMED_MESSAGE),
    "too many dimensions": ([_header(shape=[1] * 100_000)], Code.MALFORMED_MESSAGE),
    "an enormous shape": ([_header(shape=[2**63, 2**63, 2**63])], Code.TENSOR_TOO_LARGE),
    "a shape whose product wraps around": ([_header(shape=[2**32, 2**32])], Code.TENSOR_TOO_LARGE),
    "an enormous empty shape": ([_header(shape=[2**63, 0])], Code.TENSOR_MISMATCH),
}


@pytest.mark.parametrize("case", LIES)
def test_a_party_that_breaks_the_protocol_ends_the_run(case: str, found: GrpcExchange) -> None:
    messages, code = LIES[case]
    stream = Stream(found, "north")
    stream.say(*messages)
    with raises(PeerError, code, party="north") as caught:
        found.hub.collect(FIRST, BIG)
    found.hub.end(caught.value)
    # A stream within a bundle is told at its next frame.
    stream.say(b"")
    failure = stream.refused()
    assert (failure.code, failure.party) == (code, "north")
    assert len(failure.message) < 500
    assert isinstance(found.hub.pipe.ended, PeerError)


@pytest.mark.parametrize("order", ["data first", "repeated", "unknown fields"])
def test_frames_that_other_code_wrote_are_taken(order: str, found: GrpcExchange) -> None:
    """Writes the fields in another order, twice, and with one that is not known: all are valid
    protobuf.
    """
    stream = Stream(found, "north")
    for data in frames(FIRST, big(7)):
        frame = exchange_pb2.Frame.FromString(data)
        content = exchange_pb2.Frame(data=frame.data).SerializeToString()
        frame.ClearField("data")
        around = frame.SerializeToString()
        written = {
            "data first": content + around,
            "repeated": b"\x32\x03abc" + around + content,
            "unknown fields": b"\x7a\x03abc" + around + content,
        }
        stream.say(written[order])
    got = soon(lambda: found.hub.collect(FIRST, BIG)).result(WAIT_S)
    assert got["north"].tensors["w"].data == bytes([7]) * SIZE
    found.hub.reply(FIRST, {"north": ACK})
    assert stream.hear().last
    (entry,) = [
        each
        for each in found.ledger.entries()
        if (each.kind, each.direction) == ("weights", "received")
    ]
    assert (entry.payload_bytes, entry.messages) == (SIZE, 3)


def test_a_message_beyond_the_limit_is_refused_by_grpc(found: GrpcExchange) -> None:
    stream = Stream(found, "north")
    stream.say(exchange_pb2.Frame(data=bytes(5 << 20)).SerializeToString())
    with pytest.raises(grpc.RpcError) as caught:
        stream.hear()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_no_memory_is_taken_for_what_is_not_expected() -> None:
    taken: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return memoryview(bytearray(nbytes))

    pipe = FramePipe("run", 1, ["north"], allocate=allocate)
    pipe.deliver(pipe.open("north"), parse_frame(_header(shape=[2**40]), party="north"))
    with pytest.raises(PeerError):
        ExchangeHub(pipe, timeout_s=1.0).collect(FIRST, BIG)
    assert taken == []


def test_a_reply_to_another_step_is_refused(found: GrpcExchange) -> None:
    asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
    found.hub.collect(FIRST, NOTHING)
    stream = found.hub.pipe._incoming["north"].stream
    stream.outbox.put(encode(SECOND, ACK))
    with raises(PeerError, Code.STEP_OUT_OF_ORDER, party=ACTIVE):
        asked.result(WAIT_S)


def test_an_internal_error_keeps_its_text_to_itself(found: GrpcExchange) -> None:
    asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
    found.hub.collect(FIRST, NOTHING)
    found.hub.end(InternalError("KeyError: /home/hospital/patients.csv, id 4711"))
    with raises(AbortedError, Code.ABORTED):
        asked.result(WAIT_S)


def test_an_exception_in_the_service_keeps_its_text_to_itself(
    found: GrpcExchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("/home/hospital/patients.csv")

    monkeypatch.setattr(found.hub.pipe, "deliver", fail)
    waiting = soon(lambda: found.hub.collect(FIRST, NOTHING))
    with pytest.raises(AbortedError) as caught:
        soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING)).result(WAIT_S)
    # It would wait in vain.
    with raises(InternalError, Code.INTERNAL, names="/home/hospital/patients.csv"):
        waiting.result(WAIT_S)
    (line,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert line.exc_info is not None
    assert line.exc_info[0] is KeyError
    assert CATALOGUE[Code.INTERNAL].public in str(caught.value)
    assert "hospital" not in str(caught.value)


def test_what_another_party_did_is_an_abort_here() -> None:
    exchange = GrpcExchange(PASSIVES, WAIT_S)
    try:
        north = soon(lambda: exchange.link("north").swap(FIRST, ACK, NOTHING))
        waiting = soon(lambda: exchange.hub.collect(FIRST, NOTHING))
        south = Stream(exchange, "south")
        south.say(b"\xff")
        with pytest.raises(PeerError):
            waiting.result(WAIT_S)
        with raises(AbortedError, Code.ABORTED, names="south"):
            north.result(WAIT_S)
        assert south.refused().code == Code.MALFORMED_MESSAGE
    finally:
        exchange.close()


def test_an_interruption_reaches_a_party_that_is_waiting(found: GrpcExchange) -> None:
    asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
    found.hub.collect(FIRST, NOTHING)
    found.hub.end(InterruptedRun("south was lost"))
    with pytest.raises(InterruptedRun):
        asked.result(WAIT_S)


def test_half_a_bundle_that_comes_too_late_counts_for_no_step() -> None:
    """The other half arrives while the next step, of the same shape, is under way; then the party
    catches up.
    """
    exchange, lenience = GrpcExchange(PASSIVES, WAIT_S), Lenience(0.05, at_least=1)
    try:
        south = Stream(exchange, "south")
        head, *tail = frames(FIRST, big(1))
        south.say(head)
        north = soon(lambda: exchange.link("north").swap(FIRST, big(2), NOTHING))
        assert [*exchange.hub.collect(FIRST, BIG, lenience=lenience)] == ["north"]
        exchange.hub.reply(FIRST, {"north": ACK})
        assert north.result(WAIT_S).kind is Kind.ACK
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        south.say(*tail)
        passed = south.hear().passed
        assert StepKey(passed.phase, passed.round, passed.batch) == SECOND
        south.say(*frames(SECOND, big(3)))
        north = soon(lambda: exchange.link("north").swap(SECOND, big(4), NOTHING))
        received = collected.result(WAIT_S)
        assert {party: set(bytes(each.tensors["w"].data)) for party, each in received.items()} == {
            "north": {4},
            "south": {3},
        }
        exchange.hub.reply(SECOND, dict.fromkeys(received, ACK))
        assert north.result(WAIT_S).kind is Kind.ACK
        assert south.hear().last
    finally:
        exchange.close()


@contextmanager
def lenient_exchange() -> Iterator[GrpcExchange]:
    """North and south; south has missed the first step."""
    exchange = GrpcExchange(PASSIVES, WAIT_S)
    try:
        north = soon(lambda: exchange.link("north").swap(FIRST, big(2), NOTHING))
        assert [*exchange.hub.collect(FIRST, BIG, lenience=Lenience(0.05, at_least=1))] == ["north"]
        exchange.hub.reply(FIRST, {"north": ACK})
        assert north.result(WAIT_S).kind is Kind.ACK
        yield exchange
    finally:
        exchange.hub.end(InterruptedRun("the test is over"))
        exchange.close()


def heard(stream: Stream) -> StepKey:
    passed = stream.hear().passed
    return StepKey(passed.phase, passed.round, passed.batch)


def test_a_party_whose_stream_breaks_before_it_is_told_is_told_over_the_next() -> None:
    with lenient_exchange() as exchange:
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        # Over two streams, one after the other.
        for _ in range(2):
            south = Stream(exchange, "south")
            south.say(*frames(FIRST, big(1)))
            assert heard(south) == SECOND
        exchange.hub.end(InterruptedRun("the test is over"))
        with pytest.raises(InterruptedRun):
            collected.result(WAIT_S)


def test_invented_phases_do_not_make_the_ledger_grow() -> None:
    """In a phase with a `late_policy` a step of any name is passed over, but its bytes are
    counted.
    """
    with lenient_exchange() as exchange:
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        south = Stream(exchange, "south")
        for number in range(50):
            south.say(*frames(StepKey(f"invented {number}", 0, 0), big(3)))
            assert heard(south) == SECOND
        south.say(*frames(SECOND, big(5)))
        exchange_of_north = soon(lambda: exchange.link("north").swap(SECOND, big(2), NOTHING))
        received = collected.result(WAIT_S)
        exchange.hub.reply(SECOND, dict.fromkeys(received, ACK))
        assert exchange_of_north.result(WAIT_S).kind is Kind.ACK
        counted = {
            entry.phase: entry.messages
            for entry in exchange.ledger.entries()
            if entry.direction == "received"
        }
        assert set(counted) == {"control", "train", "unknown"}
        assert counted["unknown"] >= 50


def test_what_is_compressed_is_not_unpacked(found: GrpcExchange) -> None:
    """A message that is a thousand times as large afterwards would cost memory before anything
    looks at it.
    """
    attach = exchange_pb2.Frame()
    attach.attach.run_id, attach.attach.generation, attach.attach.protocol = "run", 1, PROTOCOL
    # So that it is worth compressing.
    attach.attach.resume.phase = "x" * 5_000
    with dial(found.address, credentials("north"), ACTIVE) as made:
        swap = made.stream_stream("/vfl.v1.Exchange/Swap")
        call = swap(
            iter([attach.SerializeToString()]), timeout=WAIT_S, compression=grpc.Compression.Gzip
        )
        answer = exchange_pb2.Frame.FromString(next(call))
    assert answer.failure.code == int(Code.MALFORMED_MESSAGE)
    assert found.hub.pipe.ended is None


def test_what_a_party_sent_before_it_came_back_counts_for_no_step() -> None:
    """Its embedding of the step under way is here already; then its next process asks from an
    earlier step on.
    """
    with lenient_exchange() as exchange:
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        south = Stream(exchange, "south")
        south.say(*frames(SECOND, big(3)))
        wait_until(lambda: "south" in exchange.hub._arrived)
        again = Stream(exchange, "south")
        again.say(*frames(FIRST, big(4)))
        assert heard(again) == SECOND
        assert "south" not in exchange.hub._arrived
        again.say(*frames(SECOND, big(5)))
        wait_until(lambda: "south" in exchange.hub._arrived)
        north = soon(lambda: exchange.link("north").swap(SECOND, big(2), NOTHING))
        received = collected.result(WAIT_S)
        assert {party: bytes(each.tensors["w"].data[:1]) for party, each in received.items()} == {
            "north": b"\x02",
            "south": b"\x05",
        }
        exchange.hub.reply(SECOND, dict.fromkeys(received, ACK))
        assert north.result(WAIT_S).kind is Kind.ACK
        assert again.hear().last


def test_a_party_that_comes_back_between_its_embedding_and_the_reply_is_told_at_the_next_step() -> (
    None
):
    with lenient_exchange() as exchange:
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        south = Stream(exchange, "south")
        south.say(*frames(SECOND, big(3)))
        # Nobody waits for it before: it is away.
        wait_until(lambda: "south" in exchange.hub._arrived)
        north = soon(lambda: exchange.link("north").swap(SECOND, big(2), NOTHING))
        received = collected.result(WAIT_S)
        assert [*received] == [*PASSIVES]
        again = Stream(exchange, "south")
        again.say(*frames(FIRST, big(4)))
        wait_until(lambda: exchange.hub.pipe._delivered["south"] > exchange.hub.pipe._read["south"])
        exchange.hub.reply(SECOND, dict.fromkeys(received, ACK))
        assert north.result(WAIT_S).kind is Kind.ACK
        third = StepKey("train", 0, 2)
        collected = soon(lambda: exchange.hub.collect(third, BIG, lenience=Lenience(WAIT_S)))
        assert heard(again) == third
        again.say(*frames(third, big(6)))
        asked = soon(lambda: exchange.link("north").swap(third, big(2), NOTHING))
        assert bytes(collected.result(WAIT_S)["south"].tensors["w"].data[:1]) == b"\x06"
        exchange.hub.reply(third, dict.fromkeys(PASSIVES, ACK))
        assert asked.result(WAIT_S).kind is Kind.ACK


@pytest.mark.parametrize("same", [True, False])
def test_a_party_that_comes_back_shows_again_what_it_has_shown(same: bool) -> None:
    """The step under way hears nothing of it, and the party hears which step that is; if it is not
    the same, none.
    """
    exchange, again = GrpcExchange(PASSIVES, WAIT_S), StepKey("train", 9, 9)
    try:
        asked = [
            soon(lambda party=party: exchange.link(party).swap(FIRST, big(1), NOTHING))
            for party in PASSIVES
        ]
        exchange.hub.collect(FIRST, BIG)
        exchange.hub.ask_again(again)
        exchange.hub.reply(FIRST, dict.fromkeys(PASSIVES, ACK))
        assert [each.result(WAIT_S).kind for each in asked] == [Kind.ACK] * 2
        collected = soon(lambda: exchange.hub.collect(SECOND, BIG, lenience=Lenience(WAIT_S)))
        south = Stream(exchange, "south")
        south.say(*frames(again, big(1 if same else 2)))
        if not same:
            with raises(PeerError, Code.ROWS_DIFFER, names="south", party="south"):
                collected.result(WAIT_S)
            return
        assert heard(south) == SECOND
        assert not exchange.hub._arrived
        south.say(*frames(SECOND, big(3)))
        north = soon(lambda: exchange.link("north").swap(SECOND, big(4), NOTHING))
        assert [*collected.result(WAIT_S)] == [*PASSIVES]
        exchange.hub.reply(SECOND, dict.fromkeys(PASSIVES, ACK))
        assert north.result(WAIT_S).kind is Kind.ACK
        assert south.hear().last
    finally:
        exchange.hub.end(InterruptedRun("the test is over"))
        exchange.close()


def test_the_end_of_a_phase_is_told_again_after_a_break_and_in_the_next_phase() -> None:
    with lenient_exchange() as exchange:
        settled = soon(exchange.hub.settle)
        over = StepKey("train", 1, 0)
        south = Stream(exchange, "south")
        south.say(*frames(FIRST, big(3)))
        assert heard(south) == over
        assert settled.result(WAIT_S) is None
        again = Stream(exchange, "south")
        # The answer was lost with the stream.
        again.say(*frames(FIRST, big(3)))
        assert heard(again) == over
        after = StepKey("evaluate", 0, 0)
        collected = soon(lambda: exchange.hub.collect(after, BIG))
        back = Stream(exchange, "south")
        # A new process, which has not heard it.
        back.say(*frames(SECOND, big(3)))
        assert heard(back) == after
        exchange.hub.end(InterruptedRun("the test is over"))
        with pytest.raises(InterruptedRun):
            collected.result(WAIT_S)


def test_a_refused_record_ends_the_generation_that_begins_a_little_later() -> None:
    """Otherwise the party with the record reports it first, and the active party ends with the
    server's report of it instead of this error.
    """
    asked = threading.Event()

    def refuse(party: str, _: LogHeads) -> LogHeads:
        asked.set()
        raise PeerError(Code.MALFORMED_MESSAGE, "another record", party=party)

    exchange = GrpcExchange(["north"], WAIT_S, attach_timeout_s=WAIT_S, confer=refuse)
    with contextlib.closing(exchange):
        exchange.hub.end(InterruptedRun("the first generation is over"))
        link = exchange.new_link("north", generation=2)
        answer = soon(lambda: link.confer(LogHeads().encode()))
        assert asked.wait(WAIT_S)
        with raises(PeerError, Code.MALFORMED_MESSAGE, names="another record", party="north"):
            exchange.begin(2).collect(FIRST, NOTHING)
        assert answer.result(WAIT_S)
