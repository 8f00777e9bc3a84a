"""The credentials of a running process. A file that is replaced on disk takes effect at the next
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
    Members,
    format_record,
    load_credentials,
    load_pair,
    read_revoked,
    read_seen,
    require_own_unrevoked,
    warn_if_ending,
)
from vfl_common.text import count

# The CA's name among the certificates; no party may have it.
CA = "ca"
_DAY_S = 86_400.0

log = logging.getLogger(__name__)


class Keyring:
    """The certificate, key, CA and list of revoked certificates, as they are on disk. Any thread
    may call the methods.

    Unusable files (damaged, or only half of a new pair) never end a running process. The process
    continues with the previous contents, logs one warning, and reads the files again at the next
    connection. A revoked certificate stays revoked, even if a later list does not contain it.
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
        """Reads the files. Raises InputError as ``load_credentials`` does.

        Args:
            members: The members of the federation; None if they are not known.
            uses: The extended key usages that the certificate must allow.
            out: The folder of ``revoked-NAME.txt``, a file with all serial numbers that were ever
                revoked; None to forget them when the process ends.
        """
        self.name = name
        self._tls, self._uses = tls, uses
        self._record_path = out / f"revoked-{name}.txt" if out is not None else None
        self._lock = threading.Lock()
        self._peers: dict[str, x509.Certificate] = {}
        # {subject of a warning: the last text about it}
        self._warned: dict[str, str] = {}
        # The time of the last warnings about certificates that end soon (monotonic).
        self._reported_s: float | None = None
        credentials = load_credentials(tls, name=name, members=members, uses=uses)
        self._recorded = (
            read_seen(self._record_path) if self._record_path is not None else frozenset()
        )
        self._credentials = replace(credentials, revoked=self._recorded)
        self._add_revoked(credentials.revoked)
        require_own_unrevoked(self._credentials)

    def current(self) -> Credentials:
        """Returns the credentials for the next connection: the files as they are now, or their last
        usable contents.
        """
        with self._lock:
            was_replaced = self._read_pair()
            try:
                lists = read_revoked(self._tls, self._credentials.ca_pem)
                self._add_revoked(lists.serials)
                if lists.late:
                    self._warn_once(
                        "list", f"{lists.late} A program that is started now refuses the list."
                    )
                else:
                    self._warned.pop("list", None)
            except InputError as error:
                self._warn_once("list", f"{error} Until then the previous list stays in use.")
            credentials = self._credentials
            if credentials.certificate.serial_number in credentials.revoked:
                self._warn_once(
                    "own",
                    f"{credentials.certificate_file}: the certificate of this process is revoked. "
                    "Ask the CA administrator for a new one.",
                )
        if was_replaced:
            log.info(
                f"{credentials.certificate_file}: the certificate was replaced; the new one ends "
                f"at {pem.utc(credentials.not_after)}",
                extra={"event": "certificate"},
            )
            self.tell()
        return credentials

    def _read_pair(self) -> bool:
        """Reads the CA, the certificate and the key again if they have changed. Returns whether new
        ones are in use.
        """
        credentials = self._credentials
        try:
            paths = (self._tls.ca, self._tls.certificate, self._tls.key)
            if tuple(pem.read(Path(path)) for path in paths) == credentials.files:
                self._warned.pop("pair", None)
                return False
            pair = load_pair(
                self._tls, name=self.name, members=credentials.members, uses=self._uses
            )
            self._credentials = replace(pair, revoked=credentials.revoked)
        except Exception as error:  # noqa: BLE001 - the files may hold anything, or vanish between two reads
            self._warn_once(
                "pair", f"{error} Until then the previous certificate and key stay in use."
            )
            return False
        self._warned.pop("pair", None)
        self._warned.pop("own", None)
        return True

    def _add_revoked(self, listed: frozenset[int]) -> None:
        """Adds the listed serial numbers to the known revoked ones and saves all of them. Warns if
        the lists no longer contain a known one.
        """
        revoked = self._credentials.revoked | listed
        if missing := len(revoked - listed):
            self._warn_once(
                "shorter",
                f"{count(missing, 'revoked certificate')} no longer in any list of revoked "
                "certificates; this process still refuses them."
                if self._record_path is None
                else f"{count(missing, 'revoked certificate')} no longer in any list of revoked "
                "certificates; this process still refuses them. To accept one again, remove its "
                f"line from {self._record_path}.",
            )
        else:
            self._warned.pop("shorter", None)
        if revoked != self._credentials.revoked:
            self._credentials = replace(self._credentials, revoked=revoked)
        if self._record_path is None or revoked == self._recorded:
            return
        try:
            self._record_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._record_path, format_record(revoked))
            self._recorded = revoked
        except (InputError, OSError) as error:
            self._warn_once(
                "note", f"{error} After a restart this process forgets earlier revocations."
            )

    def _warn_once(self, what: str, text: str) -> None:
        if self._warned.get(what) != text:
            self._warned[what] = text
            log.warning(text, extra={"event": "certificate"})

    def admit(self, certificate_pem: bytes) -> str:
        """Checks the certificate of a caller and returns the member's name in it.

        Raises PeerError: IDENTITY_MISMATCH if the certificate does not name exactly one member, or
        if its key is not the pinned one; CERTIFICATE_INVALID if it cannot be read or is revoked.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            credentials = self.current()
            name = credentials.members.find_name(certificate)
            credentials.admit(name, certificate)
        except (ValueError, UnsupportedAlgorithm):
            raise PeerError(
                Code.CERTIFICATE_INVALID,
                "a caller's certificate, or its key, cannot be read. Make another certificate.",
            ) from None
        if self._peers.get(name) != certificate and name in (credentials.members.names or {name}):
            self._peers[name] = certificate
            self._warn_if_ending(name, certificate)
        return name

    def require_valid(self, certificate_pem: bytes) -> None:
        """Raises PeerError if the certificate of a connected caller has been revoked or has ended
        since it connected.
        """
        name = self.admit(certificate_pem)
        end = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
        if end < datetime.now(UTC):
            raise PeerError(
                Code.CERTIFICATE_INVALID,
                f"the certificate of {name} has ended ({end:%Y-%m-%d %H:%M} UTC). Renew it.",
                party=name,
            )

    def ends(self) -> dict[str, datetime]:
        """Returns {name: the time at which the certificate ends} for this process, the CA (``ca``)
        and peers that have called.
        """
        return {
            name: certificate.not_valid_after_utc
            for name, certificate in self._list_certificates(self.current()).items()
        }

    def tell(self) -> None:
        """Logs a warning for each certificate that ends soon. After that, ``warn_of_expiry_daily``
        repeats the warnings once a day.
        """
        self._reported_s = time.monotonic()
        for name, certificate in self._list_certificates(self._credentials).items():
            self._warn_if_ending(name, certificate)

    def warn_of_expiry_daily(self) -> None:
        """Calls ``tell`` if its last call was at least a day ago."""
        if self._reported_s is not None and time.monotonic() - self._reported_s >= _DAY_S:
            self.tell()

    def _list_certificates(self, credentials: Credentials) -> dict[str, x509.Certificate]:
        return {**self._peers, self.name: credentials.certificate, CA: credentials.authority}

    def _warn_if_ending(self, name: str, certificate: x509.Certificate) -> None:
        owner = {self.name: self._credentials.certificate_file, CA: self._credentials.ca_file}.get(
            name, f"of {name}"
        )
        warning = warn_if_ending(certificate, datetime.now(UTC))
        if warning:
            log.warning(
                f"the certificate {owner} {warning}",
                extra={"event": "expiring", "certificate": name},
            )
