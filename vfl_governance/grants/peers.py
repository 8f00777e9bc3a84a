"""Exchanges and checks the parties' grants when the parties join a run.

Each party checks the grants of all other parties. A grant must have the signature of its party, be
for this recipe, still be valid, and name the key of the checking party. If a party has already seen
a grant for the allowed number of runs, it does not accept the grant for another run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import compute_pin
from vfl_common.identity.signing import encode_chain
from vfl_common.text import count
from vfl_governance.grants import grant as grants
from vfl_governance.grants.grant import Grant
from vfl_governance.grants.store import KeptGrant

_SUBJECT = "the grant"


@dataclass(frozen=True)
class Joined:
    """The run that all parties have joined.

    Args:
        digest: The digest of the recipe with which the model is or was trained.
        run: The id of the run.
        trains: Whether the run trains. Otherwise it predicts.
        goes_on: Whether this program has already begun the run, or resumes it.
    """

    digest: str
    run: str
    trains: bool
    goes_on: bool = False


def present(grant: KeptGrant, credentials: Credentials) -> dict[str, Any]:
    """Returns the value with its grant that a party sends to all parties."""
    envelope = grant.envelope
    # The party may have a newer certificate for the same key since it signed the grant.
    if compute_pin(credentials.certificate) == envelope.keyid:
        envelope = replace(envelope, chain=encode_chain(credentials).decode())
    return {"approval": "each", "grant": envelope.value}


def check_grants(
    tables: Mapping[str, Any],
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float | None = None,
) -> dict[str, KeptGrant]:
    """Checks the grants of the other parties and returns {party: grant}.

    Args:
        tables: {party: result of its ``present``, or None if it needs no grant}.
        joined: The run.
        credentials: This party's credentials.
        shown_in: A function (party, id of a grant) -> the runs for which the party sent the grant.
        now_s: The time in seconds since 1970. Default: now.

    Raises PeerError at the first grant that is invalid or does not allow the run.
    """
    now_s = time.time() if now_s is None else now_s
    grants_ = {}
    for party, value in tables.items():
        if party == credentials.name or value is None or value == {}:
            continue
        grant = _read_grant(party, value, credentials)
        if why := _find_misfit(party, grant.grant, joined, credentials, shown_in, now_s):
            raise _refuse(party, f"the grant of {party} {why}")
        grants_[party] = grant
    return grants_


def _read_grant(party: str, value: Any, credentials: Credentials) -> KeptGrant:
    malformed = PeerError(
        Code.MALFORMED_MESSAGE,
        f"the grant of {party} is malformed. Run the same version of this program at all parties.",
        party=party,
    )
    if not isinstance(value, dict):
        raise malformed
    if value.get("grant") is None:
        raise _refuse(party, f"{party} needs a grant for each run, but sent none")
    try:
        envelope, grant = grants.read(value["grant"], _SUBJECT)
    except (InputError, ValueError):
        raise malformed from None
    envelope.require_shown(party, credentials, _SUBJECT)
    return KeptGrant(grant, envelope)


def _find_misfit(
    party: str,
    grant: Grant,
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float,
) -> str:
    if grant.party != party:
        return f"belongs to {grant.party}"
    if grant.digest != joined.digest:
        return "is for another recipe"
    if now_s >= grant.ends_s:
        return f"was valid until the end of {grant.until} (UTC)"
    own_pin = compute_pin(credentials.certificate)
    if grant.peers.get(credentials.name, own_pin) != own_pin:
        return f"is for another key of {credentials.name}"
    if not (grant.runs if joined.trains else grant.predictions):
        return f"allows no {'run' if joined.trains else 'prediction'}"
    if not joined.trains:
        return ""
    runs = {*shown_in(grant.party, grant.grant)}
    if joined.run in runs and not joined.goes_on:
        # The server chooses the id of a run. Using an old id again would not be counted.
        return f"was sent for run {joined.run} before, which this party does not resume"
    if len(runs - {joined.run}) >= grant.runs:
        return f"allows {count(grant.runs, 'run')}, and was sent for this number of other runs"
    return ""


def _refuse(party: str, text: str) -> PeerError:
    return PeerError(
        Code.REFUSED, f"{text}. Ask {party} to sign another with `vfl-party approve`.", party=party
    )
