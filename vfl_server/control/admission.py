"""Checks that a party's Join message fits the recipe and the run. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vfl_common.config.recipe import Recipe, first_difference
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.agreement import at, range_of, require_alike, spelling_of
from vfl_common.text import clean

# Characters of a device, a run or an address.
MAX_TEXT = 200
# A party's recipe that is longer than ours by more characters is not compared key by key.
MAX_RECIPE = 16_384
# That a party names.
MAX_PLUGINS = 100


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
        text = (
            f"{name} joins as {clean(join.role, 20)!r}; in the recipe it is "
            f"{expected.role if expected else 'nobody'}"
        )
        raise _refused(Code.ROLE_MISMATCH, name, text)
    texts = (join.device, join.device_name, join.run_id, join.exchange_address, join.version)
    if max(map(len, texts)) > MAX_TEXT:
        text = (
            f"{name} joins with a device, a run, an address or a version of more than "
            f"{MAX_TEXT} characters"
        )
        raise _refused(Code.MALFORMED_MESSAGE, name, text)
    longest = max((len(text) for named in join.plugins.items() for text in named), default=0)
    if len(join.plugins) > MAX_PLUGINS or longest > MAX_TEXT:
        text = (
            f"{name} joins with more than {MAX_PLUGINS} plug-ins, or one of more than "
            f"{MAX_TEXT} characters"
        )
        raise _refused(Code.MALFORMED_MESSAGE, name, text)
    difference = _difference(recipe, join)
    if difference:
        raise _refused(
            Code.RECIPE_DIFFERS, name, f"the recipe of {name} differs from the server's{difference}"
        )
    if join.job != job:
        text = f"{name} wants to {clean(join.job, 20)}, but this server runs a {job} job"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    if job == "predict" and runs and join.run_id not in runs:
        text = (
            f"{name} predicts with run {clean(join.run_id, 80)}, but the others with "
            f"{', '.join(runs)}"
        )
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    for other, said in joined.items():
        require_alike(name, join, other, said)


def agreed(joined: Collection[control_pb2.Join]) -> int:
    """Returns the protocol that all of ``joined`` speak with each other and with this server."""
    return min([PROTOCOL, *(join.protocol for join in joined)])


def _compare_protocols(name: str, join: control_pb2.Join, oldest: int) -> None:
    """Raises PeerError if there is no protocol in which this server can serve the recipe with the
    party.
    """
    least, most = range_of(join)
    if OLDEST <= most < oldest:
        text = (
            f"{name} speaks protocol {most}, and this recipe needs {oldest}; install the "
            f"server's version at {name}"
        )
        raise _refused(Code.PROTOCOL_DIFFERS, name, text)
    if most < oldest or least > PROTOCOL:
        text = (
            f"{name} speaks protocol {most}, the server {OLDEST} and {PROTOCOL}; install the "
            "same version"
        )
        raise _refused(Code.PROTOCOL_DIFFERS, name, text)


def _refused(code: Code, name: str, text: str) -> PeerError:
    return PeerError(code, text, party=name)


def _difference(recipe: Recipe, join: control_pb2.Join) -> str:
    """Says where a party's recipe differs from the server's; '' if it does not.

    A release of before sends its canonical form alone.
    """
    canonical = recipe.canonical_json()
    try:
        if join.filled_json:
            found = spelling_of(join, len(canonical)).difference(recipe.spelling())
        elif len(join.recipe_json) > len(canonical) + MAX_RECIPE:
            return " in size"
        else:
            found = first_difference(join.recipe_json, canonical)
    except (ValueError, RecursionError):
        return " and is not JSON"
    # The digest is made of the canonical form.
    if found is None:
        return "" if join.recipe_json == canonical else " in form"
    return at(found, "the server")
