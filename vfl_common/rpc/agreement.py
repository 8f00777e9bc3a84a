"""Compares the protocols, recipes with their defaults, and plug-ins of two parties that join. Pure
functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vfl_common.config.spelling import Spelling
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.text import clean

# The most characters by which a peer's recipe with all defaults may be longer than ours.
MAX_FILLED = 262_144


def require_alike(name: str, join: control_pb2.Join, other: str, theirs: control_pb2.Join) -> None:
    """Raises PeerError (PROTOCOL_DIFFERS, RECIPE_DIFFERS, PLUGINS_DIFFER) if party ``name``, which
    joins with ``join``, does not fit ``other``, which joined with ``theirs``.
    """
    _compare_protocols(name, join, other, theirs)
    _compare_plugins(name, join.plugins, other, theirs.plugins)
    _compare_recipes(name, join, other, theirs)


def digest_of_compared(join: control_pb2.Join) -> bytes:
    """Returns a digest of all fields that are compared: parties with the same digest fit each
    other, and the same others.
    """
    fields = control_pb2.Join(
        role=join.role,
        protocol=join.protocol,
        oldest=join.oldest,
        job=join.job,
        run_id=join.run_id,
        recipe_json=join.recipe_json,
        filled_json=join.filled_json,
        written=join.written,
        plugins=join.plugins,
    )
    return hashlib.sha256(fields.SerializeToString(deterministic=True)).digest()


def range_of(join: control_pb2.Join) -> tuple[int, int]:
    """Returns the oldest and the newest protocol of a party; an older release names only one."""
    return join.oldest or join.protocol, join.protocol


def spelling_of(join: control_pb2.Join, size: int) -> Spelling:
    """Reads a party's recipe; ``size``: the characters of ours. Raises ValueError or RecursionError
    if it cannot be read.
    """
    filled = json.loads(join.filled_json) if len(join.filled_json) <= size + MAX_FILLED else None
    if not isinstance(filled, dict):
        raise ValueError("not keys and values")
    return Spelling(filled, frozenset(join.written))


def at(difference: tuple[str, Any, Any], other: str) -> str:
    """Returns a difference in words: the key, the joining party's value, and that of ``other``."""
    key, here, there = difference
    return f" at {clean(key, 80)}: {_short(here)} here, {_short(there)} at {other}"


def _compare_protocols(
    name: str, join: control_pb2.Join, other: str, theirs: control_pb2.Join
) -> None:
    """Raises PeerError if both can run the recipe in no common protocol."""
    (oldest, newest), (other_oldest, other_newest) = range_of(join), range_of(theirs)
    if oldest > other_newest:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} needs protocol {oldest} for this recipe, and {other} speaks {other_newest}. "
            f"Install the version of {name} at {other}.",
            party=name,
        )
    if other_oldest > newest:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {newest}, and {other} needs {other_oldest} for this recipe. "
            f"Install the version of {other} at {name}.",
            party=name,
        )


def _compare_recipes(
    name: str, join: control_pb2.Join, other: str, theirs: control_pb2.Join
) -> None:
    """Raises PeerError if the recipes differ, or the defaults of methods, which the server does not
    know.
    """
    if not join.filled_json or not theirs.filled_json or join.filled_json == theirs.filled_json:
        return
    size = len(theirs.filled_json)
    try:
        difference = spelling_of(join, size).difference(spelling_of(theirs, size))
    except (ValueError, RecursionError):
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"the recipe of {name} differs from that of {other} and is not JSON",
            party=name,
        ) from None
    if difference is not None:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"the recipe of {name} differs from that of {other}{at(difference, other)}",
            party=name,
        )


def _compare_plugins(
    name: str, ours: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> None:
    """Raises PeerError if the parties have different versions of a plug-in. Only one party may need
    some of them.
    """
    for plugin in sorted(ours.keys() & theirs.keys()):
        if ours[plugin] != theirs[plugin]:
            raise PeerError(
                Code.PLUGINS_DIFFER,
                f"the plug-in {clean(plugin, 80)} is {clean(ours[plugin], 80)} at {name} and "
                f"{clean(theirs[plugin], 80)} at {other}. Install the same version at both.",
                party=name,
            )


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
