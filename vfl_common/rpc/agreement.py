"""Compares the protocols, the recipes with their defaults, and the plug-ins of two parties that
join. All functions are pure.
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

# The maximum number of characters by which a peer's recipe with all defaults may be longer than
# ours.
MAX_FILLED = 262_144


def require_compatible(
    name: str, join: control_pb2.Join, other: str, theirs: control_pb2.Join
) -> None:
    """Raises PeerError (PROTOCOL_DIFFERS, RECIPE_DIFFERS, PLUGINS_DIFFER) if the party ``name`` is
    not compatible with the party ``other``. ``join`` and ``theirs``: the messages with which they
    joined.
    """
    _compare_protocols(name, join, other, theirs)
    _compare_plugins(name, join.plugins, other, theirs.plugins)
    _compare_recipes(name, join, other, theirs)


def digest_of_compared(join: control_pb2.Join) -> bytes:
    """Returns a digest of all compared fields. Parties with the same digest are compatible with
    each other and with the same other parties.
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


def get_protocol_range(join: control_pb2.Join) -> tuple[int, int]:
    """Returns the oldest and the newest protocol of a party. An older release sends only one
    protocol.
    """
    return join.oldest or join.protocol, join.protocol


def read_spelling(join: control_pb2.Join, size: int) -> Spelling:
    """Reads a party's recipe with its defaults. ``size``: the length of the other party's recipe,
    which limits this one. Raises ValueError or RecursionError if the recipe cannot be read.
    """
    filled = json.loads(join.filled_json) if len(join.filled_json) <= size + MAX_FILLED else None
    if not isinstance(filled, dict):
        raise ValueError("the recipe is too long or is not a JSON object")
    return Spelling(filled, frozenset(join.written))


def at(difference: tuple[str, Any, Any], other: str) -> str:
    """Describes a difference between two recipes: the key, the joining party's value, and the value
    at ``other``.
    """
    key, here, there = difference
    return f" at {clean(key, 80)}: {_format_short(here)} here, {_format_short(there)} at {other}"


def _compare_protocols(
    name: str, join: control_pb2.Join, other: str, theirs: control_pb2.Join
) -> None:
    """Raises PeerError if the parties have no common protocol for the recipe."""
    (oldest, newest), (other_oldest, other_newest) = (
        get_protocol_range(join),
        get_protocol_range(theirs),
    )
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
    """Raises PeerError if the recipes, or the defaults of their methods, differ. The server does
    not know the defaults.
    """
    if not join.filled_json or not theirs.filled_json or join.filled_json == theirs.filled_json:
        return
    size = len(theirs.filled_json)
    try:
        difference = read_spelling(join, size).difference(read_spelling(theirs, size))
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
    name: str, own_versions: Mapping[str, str], other: str, other_versions: Mapping[str, str]
) -> None:
    """Raises PeerError if the parties have different versions of a plug-in. A plug-in that only one
    party has is not compared.
    """
    for plugin in sorted(own_versions.keys() & other_versions.keys()):
        if own_versions[plugin] != other_versions[plugin]:
            raise PeerError(
                Code.PLUGINS_DIFFER,
                f"the plug-in {clean(plugin, 80)} is {clean(own_versions[plugin], 80)} at {name} "
                f"and {clean(other_versions[plugin], 80)} at {other}. Install the same version at "
                "both.",
                party=name,
            )


def _format_short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
