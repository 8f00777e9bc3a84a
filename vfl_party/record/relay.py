"""Passes on what the active party's record was, from each passive party to the others.

Passive parties do not call each other. An active party could keep a record for each of them, and
each would be consistent for the one that it is shown to. So what a passive party shows when it
joins has the active party's head that it holds, and the server passes that on unread. Each other
passive party asks the active party for the proof from that head, too. It asks in the same call, so
that all proofs are to one head. A head without a cosignature is of an active party of an older
version, which gives no such proof, and is not passed on.
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
    """Shows the head of the active party's record that this party holds, and takes those of the
    others; see ``vfl_party.policy.meeting.RunGuard``.

    Args:
        heads: this party's.
        me: its name.
        active: the name of the active party.
    """

    key = "head"

    def __init__(
        self, heads: HeadExchange, me: str, active: str, credentials: Callable[[], Credentials]
    ) -> None:
        self._heads, self._me, self._active = heads, me, active
        self._credentials = credentials

    def before(self, asked: object) -> None:
        """Does nothing: a run that is only planned has no heads."""

    def shows(self) -> dict[str, Any] | None:
        """Returns the newest head of the active party that this party holds, signed by it alone."""
        held = self._heads.read_last(self._active) if self._me != self._active else None
        if held is None or not self._counts(held):
            return None
        fields: dict[str, Any] = json.loads(self._bare(held).line)
        return fields

    def meet(self, run_id: str, heads: Mapping[str, Any]) -> None:
        """Keeps the heads that other passive parties show, for the next call to the active party.

        A head that the active party has not signed proves nothing, and is left out with a warning.
        """
        _ = run_id
        relayed = {}
        for peer, value in heads.items():
            if peer in (self._me, self._active) or value is None:
                continue
            try:
                held = self._bare(StoredHead.read(to_json(value)))
                if self._counts(held):
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

    def _counts(self, held: StoredHead) -> bool:
        owned = held.note.head.owner == self._active
        return owned and is_cosigned_by(held, self._active, self._credentials())

    def _bare(self, held: StoredHead) -> StoredHead:
        """Returns a head without the signatures of others."""
        own = tuple(signature for signature in held.note.signatures if signature[0] == self._active)
        chain = {self._active: held.certificates.get(self._active, "")}
        return StoredHead(SignedNote(held.note.head, own), chain)
