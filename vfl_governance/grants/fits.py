"""Checks whether a grant allows what a program is about to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vfl_common.text import count
from vfl_governance.grants.grant import Grant
from vfl_governance.grants.store import Uses


@dataclass(frozen=True)
class GrantQuery:
    """What a program is about to do and needs a grant for.

    Args:
        digest: The digest of the recipe.
        peers: {receiver: pin of its key}.
        phases: The names of the phases.
        trains: Whether the program trains. Otherwise it predicts.
        table: The digests of the table's columns and ids. None for predictions of other rows.
        run: The id of the run to train, or '' if it is not known yet.
    """

    digest: str
    peers: Mapping[str, str]
    phases: Collection[str]
    trains: bool = True
    table: tuple[str, str] | None = None
    run: str = ""


def over(grant: Grant, uses: Uses, now_s: float) -> str:
    """Returns the reason why a grant has ended, or '' if it is still valid."""
    if uses.revoked_s is not None:
        return f"was revoked{f' ({uses.why})' if uses.why else ''}"
    if now_s >= grant.ends_s:
        return f"was valid until the end of {grant.until} (UTC)"
    return ""


def misfit(grant: Grant, asked: GrantQuery, uses: Uses, now_s: float) -> str:
    """Returns the reason why a grant does not allow ``asked``, or '' if the grant allows it."""
    if grant.digest != asked.digest:
        return f"is for a recipe with digest {grant.digest}, not {asked.digest}"
    return (
        over(grant, uses, now_s)
        or _check_table(grant, asked)
        or _check_peers(grant, asked)
        or _check_phases(grant, asked)
        or _check_uses(grant, asked, uses)
    )


def _check_table(grant: Grant, asked: GrantQuery) -> str:
    if asked.table is None:
        return ""
    columns, ids = asked.table
    if columns != grant.columns:
        return "is for a table with other columns"
    return "is for a table with other ids" if ids != grant.ids else ""


def _check_peers(grant: Grant, asked: GrantQuery) -> str:
    for name, pin in asked.peers.items():
        allowed = grant.peers.get(name)
        if allowed is None:
            return f"does not name {name}, which would receive values"
        if allowed != pin:
            return f"is for the key {allowed[:23]} of {name}, but {pin[:23] or 'none'} is pinned"
    return ""


def _check_phases(grant: Grant, asked: GrantQuery) -> str:
    missing_phases = [phase for phase in asked.phases if phase not in grant.phases]
    return f"does not allow the phase {missing_phases[0]}" if missing_phases else ""


def _check_uses(grant: Grant, asked: GrantQuery, uses: Uses) -> str:
    if asked.trains:
        if asked.run in uses.runs or len(uses.runs) < grant.runs:
            return ""
        return f"allows {count(grant.runs, 'run')}{_render_uses(len(uses.runs), 'begun')}"
    if uses.predictions < grant.predictions:
        return ""
    rows = count(grant.predictions, "predicted row")
    return f"allows {rows}{_render_uses(uses.predictions, 'predicted')}"


def _render_uses(number: int, what: str) -> str:
    if not number:
        return ""
    return f", and {number:,} {'was' if number == 1 else 'were'} {what}"
