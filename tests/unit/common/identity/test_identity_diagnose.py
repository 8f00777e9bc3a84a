"""Each way in which a connection fails, against real listeners, and the sentence that it gives."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.harness.errors import assert_names, raises
from tests.harness.pki import dns, signer, written
from tests.harness.present import present
from vfl.certs.authority import create_authority, issue
from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.identity import diagnose as module
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.identity.diagnose import diagnose

TIMEOUT_S = 5.0
PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def other_ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "other", "f")
    return tmp_path / "other"


@pytest.fixture
def bank(ca: Path) -> Credentials:
    return load_credentials(issue(ca, "bank"), name="bank")


@pytest.fixture
def expired(ca: Path, bank: Credentials) -> Credentials:
    """As they are when the certificate expires during a run; ``load_credentials`` refuses them."""
    tls = issue(ca, "bank", days=1, now=PAST, force=True)
    return replace(
        bank,
        certificate_pem=Path(tls.certificate).read_bytes(),
        key_pem=Path(tls.key).read_bytes(),
        chain=(x509.load_pem_x509_certificate(Path(tls.certificate).read_bytes()), bank.authority),
    )


@contextmanager
def grpc_server(tls: TlsSettings, trusted: Path) -> Iterator[str]:
    """A server with mutual TLS that trusts the authority of the folder ``trusted``; gives its
    address.
    """
    pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
    root = (trusted / "ca.pem").read_bytes()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([pair], root_certificates=root, require_client_auth=True),
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def listener(answer: Callable[[socket.socket], None] | None = None) -> Iterator[str]:
    """A TCP listener; ``answer`` serves one connection, without it nothing is ever accepted."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            present(answer)(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def found(address: str, credentials: Credentials, code: Code, timeout_s: float = TIMEOUT_S) -> str:
    error = diagnose(address, credentials, "server", timeout_s)
    assert isinstance(error, InputError)
    assert (error.code, error.party) == (code, "server")
    assert "\n" not in str(error)
    return str(error)


def tls_context(tls: TlsSettings, alpn: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(alpn)
    return context


def test_nothing_listens(bank: Credentials) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    found(address, bank, Code.UNREACHABLE)


def test_host_name_does_not_resolve(bank: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    found("a..b:50051", bank, Code.UNREACHABLE)

    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found("no.such.host:50051", bank, Code.UNREACHABLE)


@pytest.mark.parametrize("address", ["server", ":1", "host:0", "host:65536", "host:x", ""])
def test_not_an_address(bank: Credentials, address: str) -> None:
    found(address, bank, Code.UNREACHABLE)


def test_ipv6_brackets_are_not_part_of_the_host(
    bank: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        dialled.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    found("[::1]:50051", bank, Code.UNREACHABLE)
    assert dialled == [("::1", 50051)]


@pytest.mark.parametrize("failure", [TimeoutError("timed out"), OSError(113, "No route to host")])
def test_network_does_not_let_us_through(
    bank: Credentials, monkeypatch: pytest.MonkeyPatch, failure: OSError
) -> None:
    def fail(address: tuple[str, int], timeout: float) -> None:
        raise failure

    monkeypatch.setattr(socket, "create_connection", fail)
    found("10.0.0.1:50051", bank, Code.UNREACHABLE)


def test_listener_that_stays_silent(bank: Credentials) -> None:
    with listener() as address:
        found(address, bank, Code.UNREACHABLE, 0.2)


def test_listener_that_hangs_up_or_speaks_plain_text(bank: Credentials) -> None:
    def greet(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    for answer in (lambda connection: None, greet):
        with listener(answer) as address:
            found(address, bank, Code.UNREACHABLE)


@pytest.mark.parametrize("failure", [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_hanging_up_has_two_names_in_python(
    bank: Credentials, monkeypatch: pytest.MonkeyPatch, failure: type[ssl.SSLError]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", fail)
    with listener(lambda connection: None) as address:
        found(address, bank, Code.UNREACHABLE)


def test_all_well(ca: Path, bank: Credentials) -> None:
    with grpc_server(issue(ca, "server"), trusted=ca) as address:
        found(address, bank, Code.UNREACHABLE)


def test_peer_of_another_authority(ca: Path, other_ca: Path, bank: Credentials) -> None:
    with grpc_server(issue(other_ca, "server"), trusted=ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_expired_or_not_yet_valid(ca: Path, bank: Credentials) -> None:
    with grpc_server(issue(ca, "server", days=1, now=PAST), trusted=ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)
    later = issue(
        ca,
        "server",
        force=True,
        now=datetime.now(UTC).replace(year=datetime.now(UTC).year + 2, day=1),
    )
    with grpc_server(later, trusted=ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_that_does_not_show_its_dates_again(
    ca: Path, bank: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, calls = module._dial, iter([True, False])

    def once(probe: module._Probe) -> socket.socket:
        if not next(calls):
            raise probe.error("nothing listens")
        return dial(probe)

    monkeypatch.setattr(module, "_dial", once)
    with grpc_server(issue(ca, "server", days=1, now=PAST), trusted=ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_whose_clock_is_behind_ours(ca: Path, bank: Credentials) -> None:
    """OpenSSL's alert then; gRPC's peer only hangs up, and the sentence has the dates to
    compare.
    """
    failure = ssl.SSLError(1, reason := "SSLV3_ALERT_BAD_CERTIFICATE")
    failure.reason = reason
    error = module._explain_alert(module._Probe("host:1", "server", bank, 1.0, 0.0), failure)
    assert_names(str(error), "server", "bank")
    with grpc_server(
        issue(ca, "server"), trusted=create_authority(ca / "other", "f").parent
    ) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_the_certificate_of_a_peer(ca: Path, bank: Credentials) -> None:
    tls = issue(ca, "server")
    with grpc_server(tls, trusted=ca) as address:
        shown = module.fetch_certificate(address, bank, "server", TIMEOUT_S)
        assert shown == x509.load_pem_x509_certificate(Path(tls.certificate).read_bytes())
        with raises(InputError, Code.IDENTITY_MISMATCH, names=("server", "shop")):
            module.fetch_certificate(address, bank, "shop", TIMEOUT_S)
    with raises(InputError, Code.UNREACHABLE, names=("server", "127.0.0.1")):
        module.fetch_certificate(address, bank, "server", TIMEOUT_S)


def test_peer_with_another_name(ca: Path, bank: Credentials) -> None:
    with grpc_server(issue(ca, "shop"), trusted=ca) as address:
        found(address, bank, Code.IDENTITY_MISMATCH)


def test_peer_whose_certificate_is_for_something_else(ca: Path, bank: Credentials) -> None:
    """A certificate with which one may only dial, as other software makes it."""
    tls, key = issue(ca, "server"), load_pem_private_key((ca / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    good = x509.load_pem_x509_certificate(Path(tls.certificate).read_bytes())
    builder = (
        x509.CertificateBuilder(good.issuer, good.subject, good.public_key(), good.serial_number)
        .not_valid_before(good.not_valid_before_utc)
        .not_valid_after(good.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    Path(tls.certificate).write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    with grpc_server(tls, trusted=ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_does_not_trust_our_authority(ca: Path, other_ca: Path, bank: Credentials) -> None:
    with grpc_server(issue(ca, "server"), trusted=other_ca) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_finds_our_certificate_expired(ca: Path, expired: Credentials) -> None:
    with grpc_server(issue(ca, "server"), trusted=ca) as address:
        found(address, expired, Code.CERTIFICATE_INVALID)


def test_alerts_of_a_peer_that_sends_them(
    ca: Path, other_ca: Path, bank: Credentials, expired: Credentials
) -> None:
    """OpenSSL says why it refuses a certificate, where gRPC only hangs up."""
    tls = issue(ca, "server")
    for trusted, credentials in ((other_ca, bank), (ca, expired)):
        context = tls_context(tls, ["h2"])
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusted / "ca.pem")

        def refuse(connection: socket.socket, context: ssl.SSLContext = context) -> None:
            with pytest.raises(ssl.SSLCertVerificationError):
                context.wrap_socket(connection, server_side=True)

        with listener(refuse) as address:
            found(address, credentials, Code.CERTIFICATE_INVALID)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("SSLV3_ALERT_BAD_CERTIFICATE", Code.CERTIFICATE_INVALID),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", Code.CERTIFICATE_INVALID),
        ("TLSV1_ALERT_PROTOCOL_VERSION", Code.UNREACHABLE),
    ],
)
def test_other_alerts(bank: Credentials, reason: str, code: Code) -> None:
    failure = ssl.SSLError(1, reason)
    failure.reason = reason
    error = present(
        module._explain_alert(module._Probe("host:1", "server", bank, 1.0, 0.0), failure)
    )
    assert error.code is code
    assert_names(str(error), "server")


def test_tls_without_grpc(ca: Path, bank: Credentials) -> None:
    context = tls_context(issue(ca, "server"), ["http/1.1"])

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(4096)
            tls.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listener(serve) as address:
        found(address, bank, Code.UNREACHABLE)


def test_peer_with_a_key_that_grpc_cannot_use(ca: Path, bank: Credentials) -> None:
    """Python's TLS takes the key, so that the handshake itself shows no reason."""
    leaf = signer(ca).leaf(dns("server"), ed25519.Ed25519PrivateKey.generate())
    context = tls_context(written(ca, "server", leaf), ["h2"])

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True):
            pass

    with listener(serve) as address:
        error = diagnose(address, bank, "server", TIMEOUT_S)
    assert error.code == Code.CERTIFICATE_INVALID
    assert "the key of the certificate of 'server'" in str(error)
    assert "is Ed25519, which gRPC cannot use. Use ECDSA" in str(error)


def test_peer_that_leaves_after_the_handshake(ca: Path, bank: Credentials) -> None:
    context = tls_context(issue(ca, "server"), ["h2"])

    def leave(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(4096)

    with listener(leave) as address:
        found(address, bank, Code.CERTIFICATE_INVALID)


def test_peer_that_falls_silent_after_the_handshake(ca: Path, bank: Credentials) -> None:
    context = tls_context(issue(ca, "server"), ["h2"])

    def listen_only(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            while tls.recv(4096):
                pass

    with listener(listen_only) as address:
        found(address, bank, Code.UNREACHABLE, 0.5)


def test_names_that_are_no_host_names(ca: Path, bank: Credentials) -> None:
    for name in ("a..b", "x" * 64):
        with grpc_server(issue(ca, name), trusted=ca) as address:
            assert_names(str(diagnose(address, bank, name, TIMEOUT_S)), "127.0.0.1")


def test_diagnosis_itself_never_raises(bank: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(credentials: Credentials) -> ssl.SSLContext:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_make_context", full)
    with listener() as address:
        error: VflError = diagnose(address, bank, "server", TIMEOUT_S)
    assert_names(str(error), "server", "127.0.0.1")
    assert error.code is Code.UNREACHABLE


def test_grpc_itself_connects_with_these_credentials(ca: Path, bank: Credentials) -> None:
    channel_credentials = grpc.ssl_channel_credentials(
        bank.ca_pem, bank.key_pem, bank.certificate_pem
    )
    for name in ("server", "Server_2.x", "x" * 64):
        options = [("grpc.ssl_target_name_override", name)]
        with (
            grpc_server(issue(ca, name), trusted=ca) as address,
            grpc.secure_channel(address, channel_credentials, options) as channel,
        ):
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
