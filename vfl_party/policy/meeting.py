"""What parties show each other when they join, and what each of them checks before it sends
anything.

Each party hands the server one JSON text; the server passes all of them on, unread, when a
generation begins. It is a table with a key for each guard: ``policy``, ``grant``, ``head``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_common.text import to_json
from vfl_party.assembly.party import OpenedParty
from vfl_party.phases.context import Party
from vfl_party.policy.planned import SendingPlan, plan_sent

# The file, in the party's folder of a run, of what each party has shown.
SHOWN = "shown.json"


@dataclass(frozen=True)
class ProposedRun:
    """A run that this party is asked to take part in, before it joins.

    ``party``: as it would be, with the ``rows`` that it expects. ``epochs``: {phase: its epochs}.
    ``plugins``: ``group:name`` of each that the recipe has this party use.
    """

    opened: OpenedParty
    party: Party
    rows: int
    epochs: Mapping[str, int]
    plugins: Sequence[str] = ()

    @cached_property
    def plan(self) -> SendingPlan | None:
        """What this party would send in training; None if that has too many steps to be counted
        before, and of a prediction, in which each row leaves once.
        """
        trains = self.opened.work.job == "train"
        return plan_sent(self.party, self.rows) if trains else None


class RunGuard(Protocol):
    """Checks runs; a party has several. Only the party itself reads the text of its errors; the
    others read that it refuses.
    """

    @property
    def key(self) -> str:
        """The key of this guard in the table that parties show."""
        ...

    def before(self, asked: ProposedRun) -> None:
        """Called before the party joins. Raises InputError (REFUSED) if the run may not be."""
        ...

    def shows(self) -> Any:
        """Returns what all parties may read, fit for JSON; None: nothing."""
        ...

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """Called when all have joined, in each generation, before anything leaves.

        ``tables``: {party: what it shows under this guard's key; None if nothing}, of this party
        too; of peers, and not checked. Raises InputError (REFUSED) if the run may not be.
        """
        ...


def render_guards(guards: Sequence[RunGuard]) -> str:
    """Returns what a party shows to all. Raises InputError if that is too much."""
    tables = {guard.key: table for guard in guards if (table := guard.shows()) is not None}
    text = json.dumps(tables, sort_keys=True, separators=(",", ":")) if tables else ""
    if len(text.encode()) > MAX_SHOWN_BYTES:
        raise InputError(
            Code.CONFIG_INVALID,
            f"policy: with the grant and the record's head, must take at most {MAX_SHOWN_BYTES:,} "
            f"bytes (got {len(text.encode()):,}). Shorten the lists in [policy].",
        )
    return text


def check_tables(
    guards: Sequence[RunGuard], run_id: str, texts: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Has each guard check what the parties show, and returns it. ``texts``: {party: its text}, as
    it came.

    Raises InputError (REFUSED), and PeerError if a text is not a table.
    """
    tables = {name: _table(name, text) for name, text in texts.items()}
    for guard in guards:
        guard.meet(run_id, {name: table.get(guard.key) for name, table in tables.items()})
    return tables


def _table(name: str, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text) if text else {}
        if isinstance(table, dict) and len(text) <= MAX_SHOWN_BYTES:
            # It is kept with the run: what is nested too deeply to be written is found here.
            to_json(table)
            return table
    except (ValueError, RecursionError):
        pass
    raise PeerError(
        Code.MALFORMED_MESSAGE,
        f"{name}: its policy is not a readable table. Install the same version at all parties.",
        party=name,
    )
