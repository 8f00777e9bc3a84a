"""Compares what two parties say when they join: protocols, recipes with their defaults, plug-ins.
Pure functions.
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

# Characters of a recipe with all defaults, beyond those of ours.
MAX_FILLED = 262_144


def require_alike(name: str, join: control_pb2.Join, other: str, said: control_pb2.Join) -> None:
    """Returns if party ``name``, which says ``join``, fits ``other``, which says ``said``.

    Raises PeerError: PROTOCOL_DIFFERS, RECIPE_DIFFERS, PLUGINS_DIFFER.
    """
    _compare_protocols(name, join, other, said)
    _compare_plugins(name, join.plugins, other, said.plugins)
    _compare_recipes(name, join, other, said)


def compared(join: control_pb2.Join) -> bytes:
    """Returns a digest of all that is compared between parties: those with the same one are alike,
    and fit the same others.
    """
    said = control_pb2.Join(
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
    return hashlib.sha256(said.SerializeToString(deterministic=True)).digest()


def range_of(join: control_pb2.Join) -> tuple[int, int]:
    """Returns the oldest and the newest protocol with which a party can take part; one of before
    says only one.
    """
    return join.oldest or join.protocol, join.protocol


def spelling_of(join: control_pb2.Join, size: int) -> Spelling:
    """Reads a party's recipe; ``size``: characters of ours. Raises ValueError or RecursionError if
    it cannot be one.
    """
    filled = json.loads(join.filled_json) if len(join.filled_json) <= size + MAX_FILLED else None
    if not isinstance(filled, dict):
        raise ValueError("no keys and values")
    return Spelling(filled, frozenset(join.written))


def at(found: tuple[str, Any, Any], other: str) -> str:
    """Words a difference: the key, the joining party's value, and that of ``other``."""
    key, here, there = found
    return f" at {clean(key, 80)}: {_short(here)} here, {_short(there)} at {other}"


def _compare_protocols(
    name: str, join: control_pb2.Join, other: str, said: control_pb2.Join
) -> None:
    """Raises PeerError if there is no protocol in which both can run the recipe."""
    (least, most), (lower, upper) = range_of(join), range_of(said)
    if least > upper:
        text = f"{name} needs protocol {least} for this recipe, and {other} speaks {upper}"
        raise _refused(
            Code.PROTOCOL_DIFFERS, name, f"{text}; install the version of {name} at {other}"
        )
    if lower > most:
        text = f"{name} speaks protocol {most}, and {other} needs {lower} for this recipe"
        raise _refused(
            Code.PROTOCOL_DIFFERS, name, f"{text}; install the version of {other} at {name}"
        )


def _compare_recipes(name: str, join: control_pb2.Join, other: str, said: control_pb2.Join) -> None:
    """Raises PeerError if the recipes differ, or the defaults of methods, of which the server knows
    nothing.
    """
    if not join.filled_json or not said.filled_json or join.filled_json == said.filled_json:
        return
    text = f"the recipe of {name} differs from that of {other}"
    try:
        found = spelling_of(join, len(said.filled_json)).difference(
            spelling_of(said, len(said.filled_json))
        )
    except (ValueError, RecursionError):
        raise _refused(Code.RECIPE_DIFFERS, name, f"{text} and is not JSON") from None
    if found is not None:
        raise _refused(Code.RECIPE_DIFFERS, name, f"{text}{at(found, other)}")


def _compare_plugins(
    name: str, ours: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> None:
    """Raises PeerError if a plug-in that both parties have is not the same. Some are needed at one
    party alone.
    """
    for plugin in sorted(ours.keys() & theirs.keys()):
        if ours[plugin] != theirs[plugin]:
            is_ = (
                f"is {clean(ours[plugin], 80)} at {name} and {clean(theirs[plugin], 80)} at {other}"
            )
            text = f"the plug-in {clean(plugin, 80)} {is_}; install the same version at both"
            raise _refused(Code.PLUGINS_DIFFER, name, text)


def _refused(code: Code, name: str, text: str) -> PeerError:
    return PeerError(code, text, party=name)


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
