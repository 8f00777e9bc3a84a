"""Finds why a connection fails. gRPC says "failed to connect to all addresses"; this gives a
sentence to act on.

It repeats the connection with Python's own TLS, step by step: resolve, connect, shake hands, first
words of HTTP/2.
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

# Preface, empty SETTINGS.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

# Python 3.11.2 raises the last one.
_HUNG_UP = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
# Of a handshake; a peer's part has some kilobytes.
_READ_BYTES, _MOST_READS = 16_384, 64
# X509_V_ERR_… of OpenSSL.
_EXPIRED, _NOT_YET_VALID = 10, 9
# Wrong signature; self-signed, alone or in a chain; issuer unknown; no signature.
_OTHER_CA = (7, 18, 19, 20, 21)


@dataclass(frozen=True)
class _Probe:
    """One attempt: the address, the credentials, the expected peer and the deadline
    (``deadline_s``, monotonic).
    """

    address: str
    peer: str
    credentials: Credentials
    timeout_s: float
    deadline_s: float

    @property
    def left_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.01)

    def error(self, message: str, code: Code = Code.UNREACHABLE) -> InputError:
        return InputError(code, message, party=self.peer)


def diagnose(address: str, credentials: Credentials, peer: str, timeout_s: float) -> VflError:
    """Finds out why gRPC cannot connect, and returns (does not raise) the error for the person at
    this machine.

    Args:
        address: ``host:port`` as it was dialled.
        credentials: those that were used.
        peer: the name that the peer's certificate must have.
        timeout_s: for the whole diagnosis, except the resolver's own time.

    Returns an InputError whose ``party`` is ``peer``: CERTIFICATE_INVALID if one side does not
    accept the other's certificate, IDENTITY_MISMATCH if another party answers, else UNREACHABLE,
    even if TLS works.
    """
    probe = _Probe(address, peer, credentials, timeout_s, time.monotonic() + timeout_s)
    try:
        with _dial(probe) as raw, _shake_hands(probe, raw) as tls:
            _check_peer(probe, tls)
            _first_words(probe, tls)
    except InputError as error:
        return error
    except (OSError, ValueError) as error:
        # No memory for the key; a certificate that cannot be parsed.
        return probe.error(
            f"{peer!r} at {address} does not answer, and the diagnosis failed: {error}"
        )
    return probe.error(
        f"TLS with {peer!r} at {address} works, but the service does not answer; is it "
        "busy, or another version?"
    )


def certificate_of(
    address: str, credentials: Credentials, peer: str, timeout_s: float
) -> x509.Certificate:
    """Connects once, and returns the certificate that ``peer`` shows; it is for ``peer`` and for no
    other member.

    In TLS 1.3 the peer shows its certificate first. So this needs no key, and hangs up before it is
    asked for one. Raises InputError, as ``diagnose`` returns it.
    """
    probe = _Probe(address, peer, credentials, timeout_s, time.monotonic() + timeout_s)
    try:
        with _dial(probe) as raw:
            return _check_peer(probe, _shown(probe, raw))
    except (OSError, ValueError) as error:
        raise probe.error(
            f"the certificate of {peer!r} at {address} cannot be looked at: {error}"
        ) from None


def _dial(probe: _Probe) -> socket.socket:
    host, _, port = probe.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise probe.error(
            f"{probe.address!r} is not an address: host:port, with a port from 1 to 65535"
        )
    try:
        return socket.create_connection((host, int(port)), timeout=probe.left_s)
    except (socket.gaierror, UnicodeError) as error:
        raise probe.error(
            f"the host name {host!r} of {probe.peer!r} does not resolve; is the address "
            f"{probe.address} right?"
        ) from error
    except ConnectionRefusedError as error:
        raise probe.error(
            f"nothing listens at {probe.address}; is {probe.peer!r} started?"
        ) from error
    except TimeoutError as error:
        raise probe.error(
            f"no connection to {probe.peer!r} at {probe.address} within {probe.timeout_s:g} s; "
            "is the address right, and does a firewall let it pass?"
        ) from error
    except OSError as error:
        raise probe.error(
            f"{probe.peer!r} at {probe.address} cannot be reached: {error.strerror or error}"
        ) from error


def _shake_hands(probe: _Probe, raw: socket.socket) -> ssl.SSLSocket:
    context = _with_key(probe.credentials)
    raw.settimeout(probe.left_s)
    with _explained(probe):
        return context.wrap_socket(raw, server_hostname=_sni(probe.peer))


def _shown(probe: _Probe, raw: socket.socket) -> ssl.SSLObject:
    """Shakes hands up to the peer's part, which it sends first, and says nothing of our own."""
    context = _context(probe.credentials)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname=_sni(probe.peer))
    with _explained(probe):
        for _ in range(_MOST_READS):
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                raw.settimeout(probe.left_s)
                raw.sendall(to_send.read())
                data = raw.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError from None
                received.write(data)
        raise ConnectionAbortedError


@contextmanager
def _explained(probe: _Probe) -> Iterator[None]:
    """Words what goes wrong in a handshake. Raises InputError."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(probe, error) from error
    except TimeoutError as error:
        raise probe.error(
            f"{probe.address} accepts connections but does not answer within "
            f"{probe.timeout_s:g} s; "
            f"is it the port of {probe.peer!r}?"
        ) from error
    except _HUNG_UP as error:
        raise probe.error(
            f"{probe.address} hangs up at once; is it the port of {probe.peer!r}, or has "
            "it too many connections?"
        ) from error
    except OSError as error:
        # An SSLError is one too.
        raise _refused(probe, error) or probe.error(
            f"{probe.address} does not speak TLS; is it the port of {probe.peer!r}?"
        ) from error


def _check_peer(probe: _Probe, tls: ssl.SSLSocket | ssl.SSLObject) -> x509.Certificate:
    certificate = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    members = probe.credentials.members
    if not members.stand_for(certificate, probe.peer):
        words = members.words(certificate, probe.peer)
        if "also for" not in words:
            words += f", not {probe.peer!r}; is the address right?"
        raise probe.error(
            f"{probe.address} answers with a certificate {words}", Code.IDENTITY_MISMATCH
        )
    if problem := pem.unusable(certificate.public_key()):
        text = f"the key of the certificate of {probe.peer!r} at {probe.address} {problem}"
        raise probe.error(text, Code.CERTIFICATE_INVALID)
    return certificate


def _first_words(probe: _Probe, tls: ssl.SSLSocket) -> None:
    """Reads the peer's verdict on our certificate: in TLS 1.3 it comes after our side of the
    handshake.

    A gRPC server that accepts it sends its SETTINGS at once. One that refuses it closes without an
    alert (grpcio 1.85); other servers and proxies send the alert.
    """
    tls.settimeout(probe.left_s)
    try:
        # Already closed: the alert can still be read.
        with suppress(*_HUNG_UP):
            tls.sendall(_HELLO)
        answer = tls.recv(9)
    except TimeoutError:
        return
    except OSError as error:
        raise _refused(probe, error) or _closed(probe) from error
    if tls.selected_alpn_protocol() != "h2":
        raise probe.error(
            f"{probe.address} speaks TLS but not gRPC; is it the port of {probe.peer!r}?"
        )
    if not answer:
        raise _closed(probe)


def _untrusted(probe: _Probe, error: ssl.SSLCertVerificationError) -> InputError:
    """Words why we do not accept the peer's certificate."""
    of_peer = f"the certificate of {probe.peer!r} at {probe.address}"
    if error.verify_code in _OTHER_CA:
        reason = (
            f"is not from the CA in {probe.credentials.ca_file}; do both sides have the same "
            "ca.pem?"
        )
    elif error.verify_code == _EXPIRED:
        reason = f"has expired{_dates(probe)}; a new one must be issued for it"
    elif error.verify_code == _NOT_YET_VALID:
        reason = f"is not valid yet{_dates(probe)}; the clock of one of the machines is wrong"
    else:
        reason = f"cannot be used: {error.verify_message}"
    return probe.error(f"{of_peer} {reason}", Code.CERTIFICATE_INVALID)


def _dates(probe: _Probe) -> str:
    """Returns when the peer's certificate is valid and what this machine's clock says, or '' if it
    does not show it.
    """
    context = _context(probe.credentials)
    # Nothing but the dates is read.
    context.verify_mode = ssl.CERT_NONE
    try:
        with _dial(probe) as raw, context.wrap_socket(raw, server_hostname=_sni(probe.peer)) as tls:
            shown = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    except (InputError, OSError, ValueError):
        return ""
    return f" ({_valid(shown)})"


def _valid(certificate: x509.Certificate) -> str:
    begin, end = pem.utc(certificate.not_valid_before_utc), pem.utc(certificate.not_valid_after_utc)
    return f"valid from {begin} to {end}; here it is {pem.utc(datetime.now(UTC))}"


def _refused(probe: _Probe, error: OSError) -> InputError | None:
    """Words the peer's alert, if it sent one: in most cases it does not accept our certificate."""
    alert = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "_ALERT_" not in alert:
        return None
    alert = alert.partition("_ALERT_")[2].lower()
    at = f"{probe.peer!r} at {probe.address}"
    ours = f"our certificate, for {probe.credentials.name!r}"
    expiry = pem.utc(probe.credentials.not_after)
    sentences = {
        "unknown_ca": f"{at} does not trust the CA of {ours}; do both sides have the same ca.pem?",
        "certificate_expired": f"{at} finds {ours}, expired (it ends at {expiry}); issue a new one or check the "  # noqa: E501
        "clocks",
        "bad_certificate": f"{at} does not accept {ours}; is it not valid yet by its clock "
        f"({_valid(probe.credentials.certificate)})?",
        "certificate_required": f"{at} got no certificate from us",
    }
    if alert in sentences:
        return probe.error(sentences[alert], Code.CERTIFICATE_INVALID)
    if "certificate" in alert:
        return probe.error(
            f"{at} does not accept {ours} (TLS alert {alert})", Code.CERTIFICATE_INVALID
        )
    return probe.error(
        f"{at} refuses the TLS connection (TLS alert {alert}); is it the right port?"
    )


def _closed(probe: _Probe) -> InputError:
    """Words the likely reason why the peer closes after the handshake, without an alert."""
    credentials = probe.credentials
    ours = f"our certificate, for {credentials.name!r}"
    if datetime.now(UTC) > credentials.not_after:
        reason = f"it expired at {pem.utc(credentials.not_after)}; issue a new one"
    else:
        reason = (
            "most likely it does not trust its CA; do both sides have the same ca.pem? Or "
            "its clock is wrong: the "
            f"certificate is {_valid(credentials.certificate)}"
        )
    return probe.error(
        f"{probe.peer!r} at {probe.address} hangs up on {ours}: {reason}", Code.CERTIFICATE_INVALID
    )


def _context(credentials: Credentials) -> ssl.SSLContext:
    """Sets up TLS as gRPC does; the peer's name is compared later, so that the message can name
    it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Each certificate of ca.pem is trusted, an intermediate too.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=credentials.ca_pem.decode("ascii", "ignore"))
    return context


def _with_key(credentials: Credentials) -> ssl.SSLContext:
    """Sets up mutual TLS. ssl reads certificates and keys from files only, so the file is in
    memory, and on no disk.
    """
    context = _context(credentials)
    with os.fdopen(os.memfd_create("own.pem"), "wb") as file:
        file.write(credentials.certificate_pem + b"\n" + credentials.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _sni(peer: str) -> str | None:
    """Returns the name to send; None if a party's name is no host name (64 characters, two dots in
    a row).
    """
    try:
        peer.encode("idna")
    except UnicodeError:
        return None
    return peer
