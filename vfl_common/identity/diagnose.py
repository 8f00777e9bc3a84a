"""Finds why a connection fails. gRPC only reports "failed to connect to all addresses"; this module
reports the cause and a fix.

It repeats the connection with Python's own TLS, step by step: resolve the name, connect, shake
hands, begin HTTP/2.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509

from vfl_common.errors import Code, InputError, VflError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials

# The client's first bytes in HTTP/2: the preface and an empty SETTINGS frame.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

# The exceptions for a connection that the peer has closed. Python 3.11.2 raises the last one.
_HUNG_UP = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
# The limits of one read and of the number of reads in a handshake. The peer sends only a few
# kilobytes.
_READ_BYTES, _MAX_READS = 16_384, 64
# OpenSSL's codes X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID.
_EXPIRED, _NOT_YET_VALID = 10, 9
# OpenSSL's codes for a certificate of another CA: wrong signature, self-signed (alone or in a
# chain), unknown issuer, unverifiable first certificate.
_OTHER_CA = (7, 18, 19, 20, 21)


@dataclass(frozen=True)
class _Probe:
    """One attempt to connect. ``deadline_s``: the time at which it must end, on the monotonic
    clock.
    """

    address: str
    peer: str
    credentials: Credentials
    timeout_s: float
    deadline_s: float

    @property
    def remaining_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.01)

    def error(self, message: str, code: Code = Code.UNREACHABLE) -> InputError:
        return InputError(code, message, party=self.peer)


def diagnose(address: str, credentials: Credentials, peer: str, timeout_s: float) -> VflError:
    """Finds out why gRPC cannot connect. Returns, and does not raise, the error for the person at
    this machine.

    Args:
        address: The ``host:port`` to which gRPC tried to connect.
        credentials: The credentials that gRPC used.
        peer: The name that the peer's certificate must have.
        timeout_s: The time limit of the whole diagnosis, not counting name resolution.

    Returns an InputError whose ``party`` is ``peer``: CERTIFICATE_INVALID if one side does not
    accept the other's certificate, IDENTITY_MISMATCH if another party answers, otherwise
    UNREACHABLE (even if TLS works).
    """
    probe = _Probe(address, peer, credentials, timeout_s, time.monotonic() + timeout_s)
    try:
        with _dial(probe) as raw, _shake_hands(probe, raw) as tls:
            _check_peer(probe, tls)
            _check_acceptance(probe, tls)
    except InputError as error:
        return error
    except (OSError, ValueError) as error:
        # The in-memory file for the key could not be created, or a certificate could not be parsed.
        return probe.error(
            f"{peer!r} at {address} does not answer, and the diagnosis failed ({error}). Check the "
            "address and the certificates."
        )
    return probe.error(
        f"{peer!r} at {address} accepts TLS, but its service does not answer. Check that it runs "
        "the same version and is not overloaded."
    )


def fetch_certificate(
    address: str, credentials: Credentials, peer: str, timeout_s: float
) -> x509.Certificate:
    """Connects once and returns the peer's certificate, after checking that it names ``peer`` and
    no other member.

    In TLS 1.3 the peer sends its certificate first. So this function does not need this party's
    key, and closes the connection before the peer asks for a certificate. Raises the InputError
    that ``diagnose`` would return.
    """
    probe = _Probe(address, peer, credentials, timeout_s, time.monotonic() + timeout_s)
    try:
        with _dial(probe) as raw:
            return _check_peer(probe, _receive_certificate(probe, raw))
    except (OSError, ValueError) as error:
        raise probe.error(
            f"the certificate of {peer!r} at {address} cannot be read ({error}). Check the address."
        ) from None


def _dial(probe: _Probe) -> socket.socket:
    host, _, port = probe.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise probe.error(
            f"{probe.address!r} is not an address. Write host:port, with a port from 1 to 65535."
        )
    try:
        return socket.create_connection((host, int(port)), timeout=probe.remaining_s)
    except (socket.gaierror, UnicodeError) as error:
        raise probe.error(
            f"the host name {host!r} of {probe.peer!r} cannot be resolved. Check the address "
            f"{probe.address}."
        ) from error
    except ConnectionRefusedError as error:
        raise probe.error(
            f"nothing listens at {probe.address}. Start {probe.peer!r}, or correct its address."
        ) from error
    except TimeoutError as error:
        raise probe.error(
            f"no connection to {probe.peer!r} at {probe.address} within {probe.timeout_s:g} s. "
            "Check the address, and that no firewall blocks it."
        ) from error
    except OSError as error:
        raise probe.error(
            f"{probe.peer!r} at {probe.address} cannot be reached ({error.strerror or error}). "
            "Check the address and the network."
        ) from error


def _shake_hands(probe: _Probe, raw: socket.socket) -> ssl.SSLSocket:
    context = _make_mutual_context(probe.credentials)
    raw.settimeout(probe.remaining_s)
    with _explain_errors(probe):
        return context.wrap_socket(raw, server_hostname=_server_name(probe.peer))


def _receive_certificate(probe: _Probe, raw: socket.socket) -> ssl.SSLObject:
    """Performs the handshake until the peer's certificate has arrived, without sending our own
    certificate.
    """
    context = _make_context(probe.credentials)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname=_server_name(probe.peer))
    with _explain_errors(probe):
        for _ in range(_MAX_READS):
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                raw.settimeout(probe.remaining_s)
                raw.sendall(to_send.read())
                data = raw.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError from None
                received.write(data)
        raise ConnectionAbortedError


@contextmanager
def _explain_errors(probe: _Probe) -> Iterator[None]:
    """Turns an exception of a handshake in the block into an InputError that explains it."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise _explain_distrust(probe, error) from error
    except TimeoutError as error:
        raise probe.error(
            f"{probe.address} accepts connections but does not answer within "
            f"{probe.timeout_s:g} s. Check that it is the port of {probe.peer!r}."
        ) from error
    except _HUNG_UP as error:
        raise probe.error(
            f"{probe.address} closes the connection at once. Check that it is the port of "
            f"{probe.peer!r}, and that it does not have too many connections."
        ) from error
    except OSError as error:
        # This also catches SSLError, which is a subclass of OSError.
        raise _explain_alert(probe, error) or probe.error(
            f"{probe.address} does not speak TLS. Check that it is the port of {probe.peer!r}."
        ) from error


def _check_peer(probe: _Probe, tls: ssl.SSLSocket | ssl.SSLObject) -> x509.Certificate:
    certificate = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    members = probe.credentials.members
    if not members.stands_for(certificate, probe.peer):
        raise probe.error(
            f"{probe.address} answers with a certificate {members.words(certificate, probe.peer)}; "
            f"expected one for {probe.peer!r} alone. Check the address.",
            Code.IDENTITY_MISMATCH,
        )
    if problem := pem.find_key_problem(certificate.public_key()):
        text = f"the key of the certificate of {probe.peer!r} at {probe.address} {problem}"
        raise probe.error(text, Code.CERTIFICATE_INVALID)
    return certificate


def _check_acceptance(probe: _Probe, tls: ssl.SSLSocket) -> None:
    """Checks whether the peer accepts our certificate. In TLS 1.3 the peer's alert arrives only
    after our side of the handshake has finished.

    A gRPC server that accepts the certificate sends its SETTINGS at once. A gRPC server that
    refuses it closes the connection without an alert (grpcio 1.85). Other servers and proxies send
    an alert.
    """
    tls.settimeout(probe.remaining_s)
    try:
        # If the peer has closed the connection, its alert can still be read below.
        with suppress(*_HUNG_UP):
            tls.sendall(_HELLO)
        answer = tls.recv(9)
    except TimeoutError:
        return
    except OSError as error:
        raise _explain_alert(probe, error) or _explain_closing(probe) from error
    if tls.selected_alpn_protocol() != "h2":
        raise probe.error(
            f"{probe.address} speaks TLS but not gRPC. Check that it is the port of {probe.peer!r}."
        )
    if not answer:
        raise _explain_closing(probe)


def _explain_distrust(probe: _Probe, error: ssl.SSLCertVerificationError) -> InputError:
    """Explains why this process does not accept the peer's certificate."""
    peer, address = probe.peer, probe.address
    if error.verify_code in _OTHER_CA:
        text = (
            f"the certificate of {peer!r} at {address} is not from the CA in "
            f"{probe.credentials.ca_file}. Give both sides the same ca.pem."
        )
    elif error.verify_code == _EXPIRED:
        text = (
            f"the certificate of {peer!r} at {address} has expired{_format_peer_validity(probe)}. "
            "Issue a new one for it."
        )
    elif error.verify_code == _NOT_YET_VALID:
        text = (
            f"the certificate of {peer!r} at {address} is not valid "
            f"yet{_format_peer_validity(probe)}. Correct the clock of the machine that is wrong."
        )
    else:
        text = (
            f"the certificate of {peer!r} at {address} cannot be used ({error.verify_message}). "
            "Issue a new one for it."
        )
    return probe.error(text, Code.CERTIFICATE_INVALID)


def _format_peer_validity(probe: _Probe) -> str:
    """Returns the validity of the peer's certificate and this machine's time, as text; '' if the
    peer does not send its certificate.
    """
    context = _make_context(probe.credentials)
    # Verification is off because only the dates of the certificate are read.
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            _dial(probe) as raw,
            context.wrap_socket(raw, server_hostname=_server_name(probe.peer)) as tls,
        ):
            certificate = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    except (InputError, OSError, ValueError):
        return ""
    return f" ({_format_validity(certificate)})"


def _format_validity(certificate: x509.Certificate) -> str:
    begin, end = pem.utc(certificate.not_valid_before_utc), pem.utc(certificate.not_valid_after_utc)
    return f"valid from {begin} to {end}; here it is {pem.utc(datetime.now(UTC))}"


def _explain_alert(probe: _Probe, error: OSError) -> InputError | None:
    """Explains the peer's TLS alert; returns None if there was none. Usually the peer does not
    accept our certificate.
    """
    alert = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "_ALERT_" not in alert:
        return None
    alert = alert.partition("_ALERT_")[2].lower()
    subject = f"{probe.peer!r} at {probe.address}"
    our_certificate = f"our certificate, for {probe.credentials.name!r}"
    expiry = pem.utc(probe.credentials.not_after)
    sentences = {
        "unknown_ca": f"{subject} does not trust the CA of {our_certificate}. Give both sides the "
        "same ca.pem.",
        "certificate_expired": f"{subject} considers {our_certificate}, expired (it ends at "
        f"{expiry}). Issue a new one, or correct the clocks.",
        "bad_certificate": f"{subject} does not accept {our_certificate}. Check its clock: the "
        f"certificate is {_format_validity(probe.credentials.certificate)}.",
        "certificate_required": f"{subject} got no certificate from us. Check the port.",
    }
    if alert in sentences:
        return probe.error(sentences[alert], Code.CERTIFICATE_INVALID)
    if "certificate" in alert:
        return probe.error(
            f"{subject} does not accept {our_certificate} (TLS alert {alert}). Issue a new one.",
            Code.CERTIFICATE_INVALID,
        )
    return probe.error(f"{subject} refuses the TLS connection (TLS alert {alert}). Check the port.")


def _explain_closing(probe: _Probe) -> InputError:
    """Returns the likely reason why the peer closes after the handshake, without an alert."""
    credentials, peer, address = probe.credentials, probe.peer, probe.address
    if datetime.now(UTC) > credentials.not_after:
        text = (
            f"{peer!r} at {address} closes the connection: our certificate, for "
            f"{credentials.name!r}, expired at {pem.utc(credentials.not_after)}. Issue a new one."
        )
    else:
        text = (
            f"{peer!r} at {address} closes the connection: most likely it does not trust the CA of "
            f"our certificate, for {credentials.name!r}, or its clock is wrong (the certificate is "
            f"{_format_validity(credentials.certificate)}). Give both sides the same ca.pem."
        )
    return probe.error(text, Code.CERTIFICATE_INVALID)


def _make_context(credentials: Credentials) -> ssl.SSLContext:
    """Sets up TLS as gRPC does. The peer's name is checked later, so that the error message can
    contain it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Every certificate in ca.pem is trusted, including intermediate certificates.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=credentials.ca_pem.decode("ascii", "ignore"))
    return context


def _make_mutual_context(credentials: Credentials) -> ssl.SSLContext:
    """Sets up mutual TLS. The ssl module reads keys only from files, so the key is put into a file
    in memory.
    """
    context = _make_context(credentials)
    with os.fdopen(os.memfd_create("own.pem"), "wb") as file:
        file.write(credentials.certificate_pem + b"\n" + credentials.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _server_name(peer: str) -> str | None:
    """Returns the server name to send in the handshake (SNI); None if the peer's name is not a
    valid host name, such as one of 64 characters or with two dots in a row.
    """
    try:
        peer.encode("idna")
    except UnicodeError:
        return None
    return peer
