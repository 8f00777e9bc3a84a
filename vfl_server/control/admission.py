"""Checks that a party's Join message fits the recipe and the run. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping

from vfl_common.config.recipe import Recipe, first_difference
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.channel import PROTOCOL
from vfl_common.text import clean

MAX_TEXT = 200  # characters of a device, a run or an address
MAX_RECIPE = 16_384  # a party's recipe that is longer than ours by more characters is not compared key by key
MAX_PLUGINS = 100  # that a party names


def admit(name: str, join: control_pb2.Join, recipe: Recipe, job: str, joined: Mapping[str, control_pb2.Join]) -> None:
    """Returns if the party may join.

    Args:
        joined: {party: what it said} of the others that have joined: their plug-ins and, for a prediction, their
            trained run, are this party's.

    Raises:
        PeerError: PROTOCOL_DIFFERS, ROLE_MISMATCH, MALFORMED_MESSAGE, RECIPE_DIFFERS, PLUGINS_DIFFER.
    """
    runs = {other.run_id for other in joined.values()}
    expected, canonical = recipe.party(name), recipe.canonical_json()
    if join.protocol != PROTOCOL:
        text = f"{name} speaks protocol {join.protocol}, the server {PROTOCOL}; install the same version"
        raise _refused(Code.PROTOCOL_DIFFERS, name, text)
    if expected is None or join.role != expected.role:
        text = (
            f"{name} joins as {clean(join.role, 20)!r}; in the recipe it is {expected.role if expected else 'nobody'}"
        )
        raise _refused(Code.ROLE_MISMATCH, name, text)
    if max(map(len, (join.device, join.device_name, join.run_id, join.exchange_address))) > MAX_TEXT:
        text = f"{name} joins with a device, a run or an address of more than {MAX_TEXT} characters"
        raise _refused(Code.MALFORMED_MESSAGE, name, text)
    longest = max((len(text) for named in join.plugins.items() for text in named), default=0)
    if len(join.plugins) > MAX_PLUGINS or longest > MAX_TEXT:
        text = f"{name} joins with more than {MAX_PLUGINS} plug-ins, or one of more than {MAX_TEXT} characters"
        raise _refused(Code.MALFORMED_MESSAGE, name, text)
    if join.recipe_json != canonical:
        text = f"the recipe of {name} differs from the server's{_difference(canonical, join.recipe_json)}"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    if join.job != job:
        text = f"{name} wants to {clean(join.job, 20)}, but this server runs a {job} job"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    if job == "predict" and runs and join.run_id not in runs:
        text = f"{name} predicts with run {clean(join.run_id, 80)}, but the others with {', '.join(runs)}"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    for other, said in joined.items():
        _compare_plugins(name, join.plugins, other, said.plugins)


def _compare_plugins(name: str, ours: Mapping[str, str], other: str, theirs: Mapping[str, str]) -> None:
    """Raises PeerError if a plug-in that both parties have is not the same. Some are needed at one party alone."""
    for plugin in sorted(ours.keys() & theirs.keys()):
        if ours[plugin] != theirs[plugin]:
            at = f"is {clean(ours[plugin], 80)} at {name} and {clean(theirs[plugin], 80)} at {other}"
            text = f"the plug-in {clean(plugin, 80)} {at}; install the same version at both"
            raise _refused(Code.PLUGINS_DIFFER, name, text)


def _refused(code: Code, name: str, text: str) -> PeerError:
    return PeerError(code, text, party=name)


def _difference(ours: str, theirs: str) -> str:
    if len(theirs) > len(ours) + MAX_RECIPE:
        return " in size"
    try:
        found = first_difference(ours, theirs)
    except (ValueError, RecursionError):
        return " and is not JSON"
    if found is None:
        return " in form"
    key, mine, yours = found
    return f" at {clean(key, 80)}: {_short(yours)} here, {_short(mine)} at the server"


def _short(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
