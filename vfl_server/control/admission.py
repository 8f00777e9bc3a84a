"""Checks that a party's Join message fits the recipe and the run. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection

from vfl_common.config.recipe import Recipe, first_difference
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.channel import PROTOCOL
from vfl_common.text import clean

MAX_TEXT = 200  # characters of a device, a run or an address
MAX_RECIPE = 16_384  # a party's recipe that is longer than ours by more characters is not compared key by key


def admit(name: str, join: control_pb2.Join, recipe: Recipe, job: str, runs: Collection[str]) -> None:
    """Returns if the party may join.

    Args:
        runs: for a prediction, the trained runs of the parties that have already joined.

    Raises:
        PeerError: PROTOCOL_DIFFERS, ROLE_MISMATCH, MALFORMED_MESSAGE, RECIPE_DIFFERS.
    """
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
    if join.recipe_json != canonical:
        text = f"the recipe of {name} differs from the server's{_difference(canonical, join.recipe_json)}"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    if join.job != job:
        text = f"{name} wants to {clean(join.job, 20)}, but this server runs a {job} job"
        raise _refused(Code.RECIPE_DIFFERS, name, text)
    if job == "predict" and runs and join.run_id not in runs:
        text = f"{name} predicts with run {clean(join.run_id, 80)}, but the others with {', '.join(runs)}"
        raise _refused(Code.RECIPE_DIFFERS, name, text)


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
