"""The tables that parties exchange when they join, and the guards that check them.

Each party sends the server one JSON text. When a generation begins, the server sends all these
texts to all parties, without reading them. A text is a table with a key for each guard: ``policy``,
``grant``, ``head``.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_common.text import LINE, clean, list_names, to_json
from vfl_party.align import list_occurrences
from vfl_party.align.digest import OPENING
from vfl_party.assembly.party import OpenedParty
from vfl_party.outbound.declared import Exchange, Occurrence, Sent
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)

# The name of the file with all parties' tables, in the party's folder of a run.
SHOWN = "shown.json"
# The splits that have no rows in common.
_APART = ("train", "validation", "test")
# The maximum number of steps that are counted, because counting more takes too long.
MAX_STEPS = 1_000_000


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


@dataclass
class SendingPlan:
    """What a party would send in a run.

    Args:
        payload_bytes: The number of bytes to all receivers together.
        numbers: {peer: maximum count of numbers about one person}.
        batches: {(phase, exchange): minimum number of rows in a batch with values for each row}.
    """

    payload_bytes: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    batches: dict[tuple[str, str], int] = field(default_factory=dict)


def plan_sent(party: Party, rows: int) -> SendingPlan | None:
    """Returns what the party would send in a run, as far as its phases declare it.

    Returns None if there are too many steps to count, or if it depends on the unknown number of
    rows at other parties. The rows of a batch are not known in advance, so this assumes that a
    round goes through the rows of one split. During the run, everything is counted exactly.

    Args:
        party: The party before it joins.
        rows: The number of rows in its table.
    """
    if party.rows.awaits_sizes:
        return None
    plan, chains = SendingPlan(), cache(party.exchanges.make_chains)
    phases = {entry.name for entry in party.course.phases}
    # {(peer, phase, exchange, round): (numbers about a row, rows)}.
    rounds: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for number, occurrence in enumerate(occurrences(party, rows)):
        if number == MAX_STEPS:
            return None
        sent, up = get_sent(party, occurrence.exchange)
        to = receivers(party, occurrence, up=up)
        if not to or not sent.tensors or occurrence.empty == ("up" if up else "down"):
            continue
        phase, name = occurrence.step.phase, occurrence.exchange.name
        both_chains = chains(phase, occurrence.exchange)
        spec = occurrence.exchange.spec(sent, phase, dict(occurrence.sizes))
        wire = (both_chains.up if up else both_chains.down).wire_spec(spec)
        plan.payload_bytes += wire.payload_bytes * len(to)
        batch = dict(occurrence.sizes).get("rows", 0)
        # A policy counts no values of the ids that are compared before the first phase.
        if not (sent.about_rows and batch) or phase == OPENING:
            continue
        if phase in phases:
            plan.batches[phase, name] = min(batch, plan.batches.get((phase, name), batch))
        width = -(-sum(math.prod(tensor.shape) for tensor in spec.tensors.values()) // batch)
        for peer in to:
            key = (peer, phase, name, occurrence.step.round)
            rounds[key] = (width, rounds.get(key, (0, 0))[1] + batch)
    _add_people(plan, party, max(1, rows), rounds)
    return plan


def _add_people(
    plan: SendingPlan,
    party: Party,
    rows: int,
    rounds: Mapping[tuple[str, str, str, int], tuple[int, int]],
) -> None:
    """Adds the maximum count of numbers about one person for each peer.

    It assumes that the rows of a round are those of the smallest split that is large enough.
    """
    splits = sorted({len(party.rows.data.splits.get(name, ())) for name in _APART} - {0})
    # {(peer, rows of the split or None for all rows): count of numbers about one person}.
    sums: Counter[tuple[str, int | None]] = Counter()
    for (peer, *_), (width, row_count) in rounds.items():
        split = next((size for size in splits if row_count <= size), None)
        sums[peer, split] += width * -(-row_count // (split or rows))
    for peer in {peer for peer, _ in sums}:
        max_of_split = max(sums[peer, split] for split in [*splits, 0])
        plan.numbers[peer] = max_of_split + sums[peer, None]


def occurrences(party: Party, rows: int) -> Iterator[Occurrence]:
    """Yields all occurrences of exchanges in a run with a table of ``rows`` rows."""
    yield from list_occurrences(party.recipe, rows)
    for phase in party.course.phases:
        traffic = phase.method.traffic(party, phase.name, phase.settings)
        if traffic is not None:
            yield from traffic.occurrences
            yield from traffic.after(None) if traffic.after is not None else ()


def get_sent(party: Party, exchange: Exchange) -> tuple[Sent, bool]:
    """Returns what this party sends in an exchange, and whether it sends the request."""
    up = party.role == "passive" or exchange.asks == "server"
    return (exchange.up if up else exchange.down), up


def receivers(party: Party, occurrence: Occurrence, *, up: bool) -> list[str]:
    """Returns the names of the receivers of what this party sends in an exchange."""
    recipe, exchange = party.recipe, occurrence.exchange
    asking = [other.name for other in recipe.passives]
    if occurrence.party is not None:
        asking = [occurrence.party] if isinstance(occurrence.party, str) else [*occurrence.party]
    if exchange.asks == "server":
        return [] if exchange.passive and party.role == "active" else [recipe.server]
    if not up:
        return asking
    return [recipe.active.name] if party.name in asking else []
