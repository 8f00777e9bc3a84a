"""Checks that a party's Join message fits the recipe and the run, and says why not. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vfl_common.config.recipe import Recipe
from vfl_common.config.spelling import first_difference
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.agreement import at, range_of, require_alike, spelling_of
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_common.summary import PartySummary
from vfl_common.text import clean

# Characters of a device, a run, an address or a reason.
MAX_TEXT = 200
# A party's recipe that is longer than ours by more characters is not compared key by key.
MAX_RECIPE = 16_384
# Number of plug-ins that a party may name.
MAX_PLUGINS = 100
# Bytes of what all parties show each other.
MAX_ALL_SHOWN = 1 << 20
# A party may join again into a running generation 20 times, then 10 times a minute.
AGAIN_S, AGAIN = 6.0, 20


def admit(
    name: str,
    join: control_pb2.Join,
    recipe: Recipe,
    job: str,
    joined: Mapping[str, control_pb2.Join],
    oldest: int = OLDEST,
) -> None:
    """Returns if the party may join.

    Args:
        joined: {party: what it said} of the others that have joined: their plug-ins, the defaults
            of their recipe's phases and, for a prediction, their trained run, are this party's.
        oldest: the oldest protocol that the server can serve the recipe with.

    Raises:
        PeerError: PROTOCOL_DIFFERS, ROLE_MISMATCH, MALFORMED_MESSAGE, RECIPE_DIFFERS,
            PLUGINS_DIFFER.
    """
    runs = {other.run_id for other in joined.values()}
    expected = recipe.party(name)
    _compare_protocols(name, join, oldest)
    if expected is None or join.role != expected.role:
        raise PeerError(
            Code.ROLE_MISMATCH,
            f"{name} joins as {clean(join.role, 20)!r}; in the recipe it is "
            f"{expected.role if expected else 'nobody'}",
            party=name,
        )
    _require_bounds(name, join)
    known = any(
        (theirs.recipe_json, theirs.filled_json) == (join.recipe_json, join.filled_json)
        and theirs.written == join.written
        for theirs in joined.values()
    )
    difference = "" if known else _difference(recipe, join)
    if difference:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"the recipe of {name} differs from the server's{difference}",
            party=name,
        )
    if join.job != job:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"{name} wants to {clean(join.job, 20)}, but this server runs a {job} job",
            party=name,
        )
    if job == "predict" and runs and join.run_id not in runs:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"{name} predicts with run {clean(join.run_id, 80)}, but the others with "
            f"{', '.join(runs)}",
            party=name,
        )
    for other, theirs in joined.items():
        require_alike(name, join, other, theirs)


def _require_bounds(name: str, join: control_pb2.Join) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) if a text is too long, or plug-ins are too many."""
    texts = (join.device, join.device_name, join.run_id, join.exchange_address, join.version)
    if max(map(len, texts)) > MAX_TEXT:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} joins with a device, a run, an address or a version of more than "
            f"{MAX_TEXT} characters",
            party=name,
        )
    longest = max((len(text) for named in join.plugins.items() for text in named), default=0)
    if len(join.plugins) > MAX_PLUGINS or longest > MAX_TEXT:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} joins with more than {MAX_PLUGINS} plug-ins, or one of more than "
            f"{MAX_TEXT} characters",
            party=name,
        )


def require_shown(name: str, join: control_pb2.Join, texts: Mapping[str, str]) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) if what a party shows to the others is too much to be
    passed on.

    ``texts``: {party: what it shows} of those that have joined.
    """
    size = len(join.shown_json.encode())
    whole = size + sum(len(text.encode()) for other, text in texts.items() if other != name)
    if size > MAX_SHOWN_BYTES or whole > MAX_ALL_SHOWN:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} shows the others {size:,} bytes of its policy and its grant; a party may "
            f"show {MAX_SHOWN_BYTES:,}, and all together {MAX_ALL_SHOWN:,}",
            party=name,
        )


def choose_protocol(joined: Collection[control_pb2.Join]) -> int:
    """Returns the protocol that all of ``joined`` speak with each other and with this server."""
    return min([PROTOCOL, *(join.protocol for join in joined)])


def offers_of(join: control_pb2.Join, run_id: str) -> tuple[str, ...]:
    """Returns the labels at which a party can resume run ``run_id``; '' is its beginning."""
    return tuple(join.checkpoints) if join.run_id == run_id else ("",)


def identity_of(name: str, join: control_pb2.Join) -> PartySummary:
    """Returns what the summary says of a party that has joined."""
    return PartySummary(
        name=name,
        role="active" if join.role == "active" else "passive",
        pid=join.pid,
        device=join.device,
        device_name=join.device_name,
        version=join.version,
    )


def facts_of(join: control_pb2.Join) -> dict[str, str | int]:
    """Returns what people are told of a party that has joined."""
    version = {"version": clean(join.version)} if join.version else {}
    return {"role": join.role, "device": join.device, **version, "protocol": join.protocol}


def require_return(name: str, join: control_pb2.Join, run_id: str, spoken: int) -> None:
    """Returns if a party can come back to the generation under way.

    Args:
        spoken: the protocol of that generation.

    Raises:
        PeerError: CHECKPOINT_INVALID, PROTOCOL_DIFFERS.
    """
    if join.unfit or join.run_id != run_id:
        raise lacking(name, run_id, "the step that is under way")
    min_protocol, max_protocol = range_of(join)
    if not min_protocol <= spoken <= max_protocol:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, and the current generation {spoken}. Install "
            f"the earlier version again at {name}.",
            party=name,
        )


def lacking(name: str, run_id: str, label: str) -> PeerError:
    """Returns the refusal of a party that cannot resume where the others can."""
    return PeerError(
        Code.CHECKPOINT_INVALID,
        f"{name} cannot resume run {run_id} at {label}, as the others can. Start it with the "
        "folder of runs that it had before, or begin a new run with vfl-server run --fresh.",
        party=name,
    )


def other_run_error(name: str, other: str, run_id: str, server: str, *, begun: bool) -> PeerError:
    """Returns the error of a party that has checkpoints of the unfinished run ``other``.

    ``begun``: this run has begun, so that party alone is wrong; else this run must not begin.
    """
    return PeerError(
        Code.CHECKPOINT_INVALID,
        f"{name} has checkpoints of run {clean(other, 80)}, which has not ended, and {server} is "
        f"in run {run_id}. Start {name} with the folder of runs that it had before."
        if begun
        else f"{name} has checkpoints of run {clean(other, 80)}, which has not ended, and {server} "
        "has not. Start the server with the folder of runs that it had before, or begin a new run "
        "with vfl-server run --fresh.",
        party=name,
    )


def why_unfit(name: str, join: control_pb2.Join) -> str:
    """Returns a sentence why a party cannot resume its run."""
    return f"{name} cannot resume run {join.run_id}: {clean(join.unfit, MAX_TEXT)}"


def unfit(name: str, why: str, within_s: float) -> PeerError:
    """Returns the error of a run that a party cannot resume, and that is too young to be set aside.

    ``within_s``: how old a run must be for that, in seconds after it trained last.
    """
    return PeerError(
        Code.DATA_INVALID,
        f"{why}. Restore them, or begin a new run with vfl-server run --fresh, at the server "
        f"alone (the same commands do so from run.resume_within_s, {within_s:g} s after the run "
        "trained last).",
        party=name,
    )


def second_session_error(name: str) -> PeerError:
    """Returns the refusal of a second session of a living party."""
    return PeerError(
        Code.NAME_TAKEN, f"a party named {name} has already joined and is alive", party=name
    )


def already_left_error(name: str, run_id: str) -> PeerError:
    """Returns the refusal of a party that has left the run."""
    return PeerError(
        Code.NAME_TAKEN,
        f"{name} has finished its part of run {run_id}, which continues without it; nothing to do",
        party=name,
    )


def too_often(name: str) -> PeerError:
    """Returns the refusal of a party that ends one generation after another."""
    return PeerError(
        Code.NAME_TAKEN,
        f"{name} has joined again {AGAIN} times in a short time, and may not stop the others now. "
        "Start it again in a minute.",
        party=name,
    )


def require_place(name: str, recipe: Recipe) -> None:
    """Raises PeerError (NOT_IN_RECIPE) if ``name`` has no part in a run of ``recipe``."""
    if recipe.party(name) is None:
        # A stranger does not learn the names of the parties.
        raise PeerError(
            Code.NOT_IN_RECIPE, f"{name} is not a party of recipe {recipe.name}", party=name
        ).privately(
            f"{name} is not a party of recipe {recipe.name} (parties: "
            f"{', '.join(party.name for party in recipe.parties)})"
        )


def _compare_protocols(name: str, join: control_pb2.Join, oldest: int) -> None:
    """Raises PeerError if there is no protocol in which this server can serve the recipe with the
    party.
    """
    min_protocol, max_protocol = range_of(join)
    if OLDEST <= max_protocol < oldest:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, and this recipe needs {oldest}. Install the "
            f"server's version at {name}.",
            party=name,
        )
    if max_protocol < oldest or min_protocol > PROTOCOL:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, the server {OLDEST} and {PROTOCOL}. Install "
            "the same version.",
            party=name,
        )


def _difference(recipe: Recipe, join: control_pb2.Join) -> str:
    """Returns where a party's recipe differs from the server's; '' if it does not.

    An earlier release sends only its canonical form.
    """
    canonical = recipe.canonical_json()
    try:
        if join.filled_json:
            difference = spelling_of(join, len(canonical)).difference(recipe.spelling())
        elif len(join.recipe_json) > len(canonical) + MAX_RECIPE:
            return " in size"
        else:
            difference = first_difference(join.recipe_json, canonical)
    except (ValueError, RecursionError):
        return " and is not JSON"
    # The digest is made of the canonical form.
    if difference is None:
        return "" if join.recipe_json == canonical else " in form"
    return at(difference, "the server")
