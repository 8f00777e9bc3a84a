"""Relays the heads of the active party's record between the passive parties.

Passive parties do not call each other. A dishonest active party could therefore keep a separate
record for each of them. To detect this, each passive party sends its stored head of the active
party's record when it joins, and the server relays this head unread. The other passive parties then
ask the active party for a proof that its record extends this head. They ask in the call in which
they exchange heads, so that all proofs are for the same new head. Heads without a cosignature come
from an active party of an older version, which gives no such proofs, and are not relayed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vfl_common.identity.credentials import Credentials
from vfl_common.text import to_json
from vfl_party.record.evidence import is_cosigned_by
from vfl_party.record.heads import HeadExchange
from vfl_party.record.note import SignedNote, StoredHead

log = logging.getLogger(__name__)


class HeadRelay:
    """Sends this party's stored head of the active party's record, and receives those of others.

    It implements ``vfl_party.policy.meeting.RunGuard``.

    Args:
        heads: This party's exchange of heads.
        me: The name of this party.
        active: The name of the active party.
        credentials: Returns the party's current credentials.
    """

    key = "head"

    def __init__(
        self, heads: HeadExchange, me: str, active: str, credentials: Callable[[], Credentials]
    ) -> None:
        self._heads, self._me, self._active = heads, me, active
        self._credentials = credentials

    def before(self, asked: object) -> None:
        """Does nothing, because a planned run has no heads yet."""

    def shows(self) -> dict[str, Any] | None:
        """Returns the newest stored head of the active party, with only its own signatures."""
        held = self._heads.read_last(self._active) if self._me != self._active else None
        if held is None or not self._is_signed_by_active(held):
            return None
        fields: dict[str, Any] = json.loads(self._keep_own_signatures(held).line)
        return fields

    def meet(self, run_id: str, heads: Mapping[str, Any]) -> None:
        """Stores the heads from other passive parties for the next call to the active party.

        It ignores heads that the active party did not sign, and logs a warning.
        """
        _ = run_id
        relayed = {}
        for peer, value in heads.items():
            if peer in (self._me, self._active) or value is None:
                continue
            try:
                held = self._keep_own_signatures(StoredHead.read(to_json(value)))
                if self._is_signed_by_active(held):
                    relayed[peer] = held
                    continue
            except ValueError:
                pass
            log.warning(
                "ignoring the head of the record of %s that %s passes on: it is not signed by %s",
                self._active,
                peer,
                self._active,
                extra={"event": "record"},
            )
        self._heads.relayed = relayed

    def _is_signed_by_active(self, held: StoredHead) -> bool:
        is_own_record = held.note.head.owner == self._active
        return is_own_record and is_cosigned_by(held, self._active, self._credentials())

    def _keep_own_signatures(self, held: StoredHead) -> StoredHead:
        """Returns a head with only the active party's signatures."""
        signatures = tuple(
            signature for signature in held.note.signatures if signature[0] == self._active
        )
        chain = {self._active: held.certificates.get(self._active, "")}
        return StoredHead(SignedNote(held.note.head, signatures), chain)
