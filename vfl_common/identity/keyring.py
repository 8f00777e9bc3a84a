"""A process's credentials while it runs: a file that is replaced on disk is used from the next
connection on.
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
from vfl_common.text import count

# The CA's name among the certificates; no party may have it.
CA = "ca"
_DAY_S = 86_400.0

log = logging.getLogger(__name__)


class Keyring:
    """The certificate, key, CA and list of revoked certificates, as they are on disk; any thread
    may call its methods.

    Files that cannot be used (half of a new pair, garbage) never end a running process: it goes on
    with those that it read last, logs one warning, and reads them again at the next connection. A
    certificate that was revoked once stays revoked, even if a list no longer has it.
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
            members: the members of the federation; None if they are not known.
            uses: what the certificate must be for.
            out: the folder of ``revoked-NAME.txt``, the serial numbers that were ever in a list;
                None: they are forgotten when the process ends.
        """
        self.name = name
        self._tls, self._uses = tls, uses
        self._note = out / f"revoked-{name}.txt" if out is not None else None
        self._lock = threading.Lock()
        self._peers: dict[str, x509.Certificate] = {}
        # {subject: the last warning about it}
        self._warned: dict[str, str] = {}
        # When warnings of certificates that end soon were last logged (monotonic).
        self._reported_s: float | None = None
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
                    self._complain(
                        "list", f"{listed.late} A program that is started now refuses the list."
                    )
                else:
                    self._warned.pop("list", None)
            except InputError as error:
                self._complain("list", f"{error} Until then the previous list stays in use.")
            now = self._now
            if now.certificate.serial_number in now.revoked:
                self._complain(
                    "own",
                    f"{now.certificate_file}: the certificate of this process is revoked. Ask the "
                    "CA administrator for a new one.",
                )
        if replaced:
            log.info(
                f"{now.certificate_file}: the certificate was replaced; the new one ends at "
                f"{pem.utc(now.not_after)}",
                extra={"event": "certificate"},
            )
            self.tell()
        return now

    def _read_pair(self) -> bool:
        """Reads the CA, the certificate and the key if they have changed; returns whether they
        have.
        """
        now = self._now
        try:
            paths = (self._tls.ca, self._tls.certificate, self._tls.key)
            if tuple(pem.read(Path(path)) for path in paths) == now.files:
                self._warned.pop("pair", None)
                return False
            pair = load_pair(self._tls, name=self.name, members=now.members, uses=self._uses)
            self._now = replace(pair, revoked=now.revoked)
        except Exception as error:  # noqa: BLE001 - whatever the files hold, and if one vanishes between two looks at it
            self._complain(
                "pair", f"{error} Until then the previous certificate and key stay in use."
            )
            return False
        self._warned.pop("pair", None)
        self._warned.pop("own", None)
        return True

    def _keep(self, listed: frozenset[int]) -> None:
        """Adds the listed serial numbers to those known before, and saves them; warns if the lists
        no longer have some of these.
        """
        revoked = self._now.revoked | listed
        if lost := len(revoked - listed):
            self._complain(
                "shorter",
                f"{count(lost, 'revoked certificate')} no longer in any list of revoked "
                "certificates; this process still refuses them."
                if self._note is None
                else f"{count(lost, 'revoked certificate')} no longer in any list of revoked "
                "certificates; this process still refuses them. To accept one again, remove its "
                f"line from {self._note}.",
            )
        else:
            self._warned.pop("shorter", None)
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
                "note", f"{error} After a restart this process forgets earlier revocations."
            )

    def _complain(self, what: str, text: str) -> None:
        if self._warned.get(what) != text:
            self._warned[what] = text
            log.warning(text, extra={"event": "certificate"})

    def admit(self, certificate_pem: bytes) -> str:
        """Notes the certificate of a caller, and returns the name that it is for.

        Raises PeerError: IDENTITY_MISMATCH if it does not name exactly one member, or has another
        key than is pinned; CERTIFICATE_INVALID if it cannot be read or is revoked.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            now = self.current()
            name = now.members.find_name(certificate)
            now.admit(name, certificate)
        except (ValueError, UnsupportedAlgorithm):
            raise PeerError(
                Code.CERTIFICATE_INVALID,
                "a caller's certificate, or its key, cannot be read. Make another certificate.",
            ) from None
        if self._peers.get(name) != certificate and name in (now.members.names or {name}):
            self._peers[name] = certificate
            self._warn(name, certificate)
        return name

    def require_valid(self, certificate_pem: bytes) -> None:
        """Raises PeerError if the certificate of a caller with an open connection has been revoked
        since, or has ended.
        """
        name = self.admit(certificate_pem)
        ends = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        if ends < datetime.now(UTC):
            raise PeerError(
                Code.CERTIFICATE_INVALID,
                f"the certificate of {name} has ended ({ends:%Y-%m-%d %H:%M} UTC). Renew it.",
                party=name,
            )

    def ends(self) -> dict[str, datetime]:
        """Returns when the certificates end: this process's, the CA's (``ca``) and those of peers
        that have called.
        """
        return {
            name: certificate.not_valid_after_utc
            for name, certificate in self._all(self.current()).items()
        }

    def tell(self) -> None:
        """Logs which certificates end soon; from now on ``tell_again`` does so once a day."""
        self._reported_s = time.monotonic()
        for name, certificate in self._all(self._now).items():
            self._warn(name, certificate)

    def warn_of_expiry_daily(self) -> None:
        """Calls ``tell`` if it was last called a day ago."""
        if self._reported_s is not None and time.monotonic() - self._reported_s >= _DAY_S:
            self.tell()

    def _all(self, credentials: Credentials) -> dict[str, x509.Certificate]:
        return {**self._peers, self.name: credentials.certificate, CA: credentials.authority}

    def _warn(self, name: str, certificate: x509.Certificate) -> None:
        owner = {self.name: self._now.certificate_file, CA: self._now.ca_file}.get(
            name, f"of {name}"
        )
        warning = ends_soon(certificate, datetime.now(UTC))
        if warning:
            log.warning(
                f"the certificate {owner} {warning}",
                extra={"event": "expiring", "certificate": name},
            )
