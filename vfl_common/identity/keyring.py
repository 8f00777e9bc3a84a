"""A process's credentials while it runs: files that are replaced on disk are used for the next
connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import write_atomic
from vfl_common.identity import pem
from vfl_common.identity.credentials import (
    DIALS,
    Credentials,
    ends_soon,
    load_credentials,
    load_pair,
    require_own,
)
from vfl_common.identity.members import Members
from vfl_common.identity.revoked import note_text, read_revoked, read_seen

# No party may have this name.
CA = "ca"
_DAY_S = 86_400.0

log = logging.getLogger(__name__)


class Keyring:
    """The certificate, key, CA and list of revoked certificates, as they are on disk; any thread
    may ask.

    What cannot be used (half of a new pair, garbage) never ends a running process: it goes on with
    what it read last, logs one warning, and looks again at the next connection. What was revoked
    once stays revoked, whatever becomes of the lists.
    """

    def __init__(
        self,
        tls: TlsSettings,
        name: str,
        members: Members | None = None,
        *,
        uses: Sequence[x509.ObjectIdentifier] = DIALS,
        out: Path | None = None,
    ) -> None:
        """Reads the files. Raises InputError, as ``load_credentials``.

        Args:
            members: who has a part in the federation; None: that is not known.
            uses: what the certificate must be for.
            out: a folder that keeps ``revoked-NAME.txt``, the serial numbers that were ever in a
                list; None: they are forgotten when the process ends.
        """
        self.name = name
        self._tls, self._uses = tls, uses
        self._note = out / f"revoked-{name}.txt" if out is not None else None
        self._lock = threading.Lock()
        self._peers: dict[str, x509.Certificate] = {}
        # {what: the last warning about it}.
        self._said: dict[str, str] = {}
        # When the log was last told which certificates end soon.
        self._told_s: float | None = None
        now = load_credentials(tls, name=name, members=members, uses=uses)
        self._noted = read_seen(self._note) if self._note is not None else frozenset()
        self._now = replace(now, revoked=self._noted)
        self._keep(now.revoked)
        require_own(self._now)

    def current(self) -> Credentials:
        """Returns what the next connection uses: the files as they are now, or the last ones that
        could be used.
        """
        with self._lock:
            replaced = self._read_pair()
            try:
                listed = read_revoked(self._tls, self._now.ca_pem)
                self._keep(listed.serials)
                if listed.late:
                    self._complain("list", f"{listed.late}; a program that starts now refuses it")
                else:
                    self._said.pop("list", None)
            except InputError as error:
                self._complain("list", f"{error}; until then the list as it was stays in use")
            now = self._now
            if now.certificate.serial_number in now.revoked:
                self._complain(
                    "own", f"the certificate {now.certificate_file} of this process is revoked"
                )
        if replaced:
            text = (
                f"the certificate {now.certificate_file} was replaced; the new one ends at "
                f"{pem.utc(now.not_after)}"
            )
            log.info(text, extra={"event": "certificate"})
            self.tell()
        return now

    def _read_pair(self) -> bool:
        """Takes the CA, the certificate and the key if they have changed; returns whether they
        have.
        """
        now = self._now
        try:
            paths = (self._tls.ca, self._tls.certificate, self._tls.key)
            if tuple(pem.read(Path(path)) for path in paths) == now.files:
                self._said.pop("pair", None)
                return False
            pair = load_pair(self._tls, name=self.name, members=now.members, uses=self._uses)
            self._now = replace(pair, revoked=now.revoked)
        except Exception as error:  # noqa: BLE001 - whatever the files hold, and if one vanishes between two looks at it
            self._complain(
                "pair", f"{error}; until then the certificate and key read before stay in use"
            )
            return False
        self._said.pop("pair", None)
        self._said.pop("own", None)
        return True

    def _keep(self, listed: frozenset[int]) -> None:
        """Adds what is listed now to what was listed before, and notes it; warns if a list has lost
        some of that.
        """
        revoked = self._now.revoked | listed
        if lost := len(revoked - listed):
            text = (
                f"{lost} certificates that were revoked are in no list of revoked certificates now"
            )
            where = (
                f"; whoever means it removes their lines from {self._note}"
                if self._note is not None
                else ""
            )
            self._complain("shorter", f"{text}; they stay revoked{where}")
        else:
            self._said.pop("shorter", None)
        if revoked != self._now.revoked:
            self._now = replace(self._now, revoked=revoked)
        if self._note is None or revoked == self._noted:
            return
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._note, note_text(revoked))
            self._noted = revoked
        except (InputError, OSError) as error:
            self._complain(
                "note", f"{error}; a program that starts anew will not know who was revoked before"
            )

    def _complain(self, what: str, text: str) -> None:
        if self._said.get(what) != text:
            self._said[what] = text
            log.warning(text, extra={"event": "certificate"})

    def admit(self, certificate_pem: bytes) -> str:
        """Notes the certificate of a caller, and returns for whom it is.

        Raises PeerError: IDENTITY_MISMATCH if it does not name exactly one member, or has another
        key than is pinned; CERTIFICATE_INVALID if it cannot be read or is revoked.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            now = self.current()
            name = now.members.named(certificate)
            now.admit(name, certificate)
        except (ValueError, UnsupportedAlgorithm):
            # Of the certificate, or of its key.
            raise PeerError(
                Code.CERTIFICATE_INVALID, "a caller's certificate cannot be read; make another"
            ) from None
        if self._peers.get(name) != certificate and name in (now.members.names or {name}):
            self._peers[name] = certificate
            self._warn(name, certificate)
        return name

    def require_valid(self, certificate_pem: bytes) -> None:
        """Raises PeerError if a caller of an open connection would not be admitted now: its
        certificate has been revoked since, or has ended.
        """
        name = self.admit(certificate_pem)
        ends = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        if ends < datetime.now(UTC):
            text = f"the certificate of {name} has ended ({ends:%Y-%m-%d %H:%M} UTC); renew it"
            raise PeerError(Code.CERTIFICATE_INVALID, text, party=name)

    def ends(self) -> dict[str, datetime]:
        """Returns when the certificates end: this process's, the CA's (``ca``) and those of peers
        that have called.
        """
        return {name: each.not_valid_after_utc for name, each in self._all(self.current()).items()}

    def tell(self) -> None:
        """Logs which certificates end soon; from now on ``tell_again`` does so once a day."""
        self._told_s = time.monotonic()
        for name, certificate in self._all(self._now).items():
            self._warn(name, certificate)

    def tell_again(self) -> None:
        """Calls ``tell`` if it was last called a day ago."""
        if self._told_s is not None and time.monotonic() - self._told_s >= _DAY_S:
            self.tell()

    def _all(self, credentials: Credentials) -> dict[str, x509.Certificate]:
        return {**self._peers, self.name: credentials.certificate, CA: credentials.authority}

    def _warn(self, name: str, certificate: x509.Certificate) -> None:
        whose = {self.name: self._now.certificate_file, CA: self._now.ca_file}.get(
            name, f"of {name}"
        )
        text = ends_soon(certificate, datetime.now(UTC))
        if text:
            log.warning(
                f"the certificate {whose} {text}", extra={"event": "expiring", "certificate": name}
            )
