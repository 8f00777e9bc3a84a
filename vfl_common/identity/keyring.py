"""A process's credentials while it runs: files that are replaced on disk are used for the next connection."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from vfl_common.config.party import TlsSettings
from vfl_common.errors import InputError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials, ends_soon, load_credentials, load_pair
from vfl_common.identity.revoked import read_revoked, require_unrevoked

CA = "ca"  # no party may have this name
_DAY_S = 86_400.0

log = logging.getLogger(__name__)


class Keyring:
    """The certificate, key, CA and list of revoked certificates, as they are on disk; any thread may ask.

    What cannot be used (half of a new pair, garbage) never ends a running process: it goes on with what it read last,
    logs one warning, and looks again at the next connection.
    """

    def __init__(self, tls: TlsSettings, name: str) -> None:
        """Reads the files. Raises InputError, as ``load_credentials``."""
        self.name = name
        self._tls = tls
        self._lock = threading.Lock()
        self._now = load_credentials(tls, name=name)
        self._peers: dict[str, x509.Certificate] = {}
        self._said: dict[str, str] = {}  # {what: the last warning about it}
        self._told_s: float | None = None  # when the log was last told which certificates end soon

    def current(self) -> Credentials:
        """Returns what the next connection uses: the files as they are now, or the last ones that could be used."""
        with self._lock:
            replaced = self._read_pair()
            try:
                self._now = replace(self._now, revoked=read_revoked(self._tls))
                self._said.pop("list", None)
            except InputError as error:
                self._complain("list", f"{error}; until then the list as it was stays in use")
            now = self._now
            if now.certificate.serial_number in now.revoked:
                self._complain("own", f"the certificate {now.certificate_file} of this process is revoked")
        if replaced:
            text = f"the certificate {now.certificate_file} was replaced; the new one ends at {pem.utc(now.not_after)}"
            log.info(text, extra={"event": "certificate"})
            self.tell()
        return now

    def _read_pair(self) -> bool:
        """Takes the CA, the certificate and the key if they have changed; returns whether they have."""
        now = self._now
        try:
            paths = (self._tls.ca, self._tls.certificate, self._tls.key)
            if tuple(pem.read(Path(path)) for path in paths) == now.pems:
                self._said.pop("pair", None)
                return False
            self._now = replace(load_pair(self._tls, name=self.name), revoked=now.revoked)
        except Exception as error:  # noqa: BLE001 - whatever the files hold, and if one vanishes between two looks at it
            self._complain("pair", f"{error}; until then the certificate and key read before stay in use")
            return False
        self._said.pop("pair", None)
        self._said.pop("own", None)
        return True

    def _complain(self, what: str, text: str) -> None:
        if self._said.get(what) != text:
            self._said[what] = text
            log.warning(text, extra={"event": "certificate"})

    def admit(self, name: str, certificate_pem: bytes) -> None:
        """Notes the certificate of a caller. Raises PeerError (CERTIFICATE_INVALID) if it is revoked."""
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        require_unrevoked(name, certificate, self.current().revoked)
        if self._peers.get(name) != certificate:
            self._peers[name] = certificate
            self._warn(name, certificate)

    def ends(self) -> dict[str, datetime]:
        """Returns when the certificates end: this process's, the CA's (``ca``) and those of peers that have called."""
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
        whose = {self.name: self._now.certificate_file, CA: self._now.ca_file}.get(name, f"of {name}")
        text = ends_soon(certificate, datetime.now(UTC))
        if text:
            log.warning(f"the certificate {whose} {text}", extra={"event": "expiring", "certificate": name})
