"""The tables that parties exchange when they join, and the guards that check them.

Each party sends the server one JSON text. When a generation begins, the server sends all these
texts to all parties, without reading them. A text is a table with a key for each guard: ``policy``,
``grant``, ``head``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_common.text import LINE, clean, list_names, to_json
from vfl_party.assembly.party import OpenedParty
from vfl_party.phases.context import Party
from vfl_party.policy.planned import SendingPlan, plan_sent

log = logging.getLogger(__name__)

# The name of the file with all parties' tables, in the party's folder of a run.
SHOWN = "shown.json"


@dataclass(frozen=True)
class ProposedRun:
    """A run that this party has not yet joined.

    Args:
        opened: The opened party, with its recipe and table.
        party: The party with the models and exchanges that it would have in the run.
        rows: The number of rows that the party expects.
        epochs: {phase: number of epochs}.
        plugins: The plug-ins that this party would use, as ``group:name``.
    """

    opened: OpenedParty
    party: Party
    rows: int
    epochs: Mapping[str, int]
    plugins: Sequence[str] = ()

    @cached_property
    def plan(self) -> SendingPlan | None:
        """What this party would send in training.

        None for a prediction, which sends each row once, and for a run with too many steps to
        count.
        """
        trains = self.opened.work.job == "train"
        return plan_sent(self.party, self.rows) if trains else None


class RunGuard(Protocol):
    """Checks proposed runs. A party may have several guards.

    Only the party itself sees the messages of its errors. The other parties only see that it
    refuses.
    """

    @property
    def key(self) -> str:
        """The key of this guard in the tables that parties exchange."""
        ...

    def before(self, asked: ProposedRun) -> None:
        """Is called before the party joins. Raises InputError (REFUSED) to refuse the run."""
        ...

    def shows(self) -> Any:
        """Returns this guard's JSON value for all other parties, or None."""
        ...

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """Is called in each generation when all parties have joined, before anything is sent.

        ``tables``: {party: its value under this guard's key, or None}, including this party. The
        values of peers are not validated. Raises InputError (REFUSED) to refuse the run.
        """
        ...


def render_guards(guards: Sequence[RunGuard]) -> str:
    """Returns the text with all guards' values. Raises InputError if it is too long."""
    tables = {guard.key: table for guard in guards if (table := guard.shows()) is not None}
    text = json.dumps(tables, sort_keys=True, separators=(",", ":")) if tables else ""
    if len(text.encode()) > MAX_SHOWN_BYTES:
        raise InputError(
            Code.CONFIG_INVALID,
            f"policy: must have at most {MAX_SHOWN_BYTES:,} bytes together with the grant and the "
            f"record's head (got {len(text.encode()):,}). Shorten the lists in [policy].",
        )
    return text


def check_tables(
    guards: Sequence[RunGuard], run_id: str, texts: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Parses the tables of all parties, lets each guard check them, and returns them.

    ``texts``: {party: its text}, as received. Raises InputError (REFUSED) if a guard refuses, and
    PeerError if a text is not a valid table.
    """
    tables = {name: _parse_table(name, text) for name, text in texts.items()}
    keys = {guard.key for guard in guards}
    for name, table in tables.items():
        if unchecked := sorted(table.keys() - keys):
            text = "%s sent a table that no guard here checks: %s"
            log.warning(text, name, clean(list_names(unchecked), LINE), extra={"event": "policy"})
    for guard in guards:
        guard.meet(run_id, {name: table.get(guard.key) for name, table in tables.items()})
    return tables


def _parse_table(name: str, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text) if text else {}
        if isinstance(table, dict) and len(text) <= MAX_SHOWN_BYTES:
            # The table is stored with the run, so this raises if it is too deeply nested to write.
            to_json(table)
            return table
    except (ValueError, RecursionError):
        pass
    raise PeerError(
        Code.MALFORMED_MESSAGE,
        f"{name}: its policy is not a readable table. Install the same version at all parties.",
        party=name,
    )
