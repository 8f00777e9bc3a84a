"""What parties show each other of their grants when they join, and how it is checked.

Each party checks the grants of all others: that the party has signed it with its key, for this
recipe, for a day that is not over, and for the key of the party that checks it. A party that has
seen a grant used for as many runs as it allows accepts it for no further run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import pin_of
from vfl_common.identity.signing import chain_pem
from vfl_common.text import count
from vfl_party.grants import grant as grants
from vfl_party.grants.grant import Grant
from vfl_party.grants.store import KeptGrant

_WHAT = "the grant"


@dataclass(frozen=True)
class Joined:
    """What all are about to run, as each party knows it.

    ``digest``: of the recipe, of training if this is a prediction. ``run``: its id. ``goes_on``:
    this program has begun the run, or resumes it.
    """

    digest: str
    run: str
    trains: bool
    goes_on: bool = False


def present(grant: KeptGrant, credentials: Credentials) -> dict[str, Any]:
    """Returns what a party that needs a grant shows to all."""
    envelope = grant.envelope
    # The certificate may be a newer one of the same key.
    if pin_of(credentials.certificate) == envelope.keyid:
        envelope = replace(envelope, chain=chain_pem(credentials).decode())
    return {"approval": "each", "grant": envelope.value}


def check_grants(
    tables: Mapping[str, Any],
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float | None = None,
) -> dict[str, KeptGrant]:
    """Returns the grants that the other parties show, after all checks: {party: grant}.

    Args:
        tables: {party: what its ``present`` returned; None if it needs no grant}.
        joined: what is run.
        credentials: this party's.
        shown_in: (party, id of a grant) -> the runs for which the party has shown it.
        now_s: in seconds since 1970; None: now.

    Raises PeerError, in one sentence, at the first grant that does not fit.
    """
    now_s = time.time() if now_s is None else now_s
    grants_ = {}
    for party, words in tables.items():
        if party == credentials.name or words is None or words == {}:
            continue
        grant = _read(party, words, credentials)
        if why := _misfit(party, grant.grant, joined, credentials, shown_in, now_s):
            raise _refuse(party, f"the grant of {party} {why}")
        grants_[party] = grant
    return grants_


def _read(party: str, words: Any, credentials: Credentials) -> KeptGrant:
    malformed = PeerError(
        Code.MALFORMED_MESSAGE,
        f"the grant of {party} cannot be read. Run the same version of this program at all "
        "parties.",
        party=party,
    )
    if not isinstance(words, dict):
        raise malformed
    if words.get("grant") is None:
        raise _refuse(party, f"{party} needs a grant for each run, and shows none")
    try:
        envelope, grant = grants.read(words["grant"], _WHAT)
    except (InputError, ValueError):
        raise malformed from None
    envelope.require_shown(party, credentials, _WHAT)
    return KeptGrant(grant, envelope)


def _misfit(
    party: str,
    grant: Grant,
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float,
) -> str:
    if grant.party != party:
        return f"is that of {grant.party}"
    if grant.digest != joined.digest:
        return "is for another recipe"
    if now_s >= grant.ends_s:
        return f"was valid until the end of {grant.until} (UTC)"
    own = pin_of(credentials.certificate)
    if grant.peers.get(credentials.name, own) != own:
        return f"is for another key of {credentials.name}"
    if not (grant.runs if joined.trains else grant.predictions):
        return f"allows no {'run' if joined.trains else 'prediction'}"
    if not joined.trains:
        return ""
    runs = {*shown_in(grant.party, grant.grant)}
    if joined.run in runs and not joined.goes_on:
        # The server chooses the id: one that was used before would cost nothing.
        return f"was shown for run {joined.run} before, which this party does not resume"
    if len(runs - {joined.run}) >= grant.runs:
        return f"allows {count(grant.runs, 'run')}, and was shown for as many others"
    return ""


def _refuse(party: str, text: str) -> PeerError:
    return PeerError(
        Code.REFUSED, f"{text}. Ask {party} to sign another with `vfl-party approve`.", party=party
    )
