"""Codecs, which write numbers on the wire: one file a codec, found by its name."""

from __future__ import annotations

import sys

from vfl_party.filter import Filter
from vfl_party.plugins import Room

ROOM = Room("vfl.codecs", "codec", sys.modules[__name__], "CODEC")


def make(name: str, where: str) -> Filter:
    """Makes a codec by name. Raises InputError that names ``where`` if there is none."""
    return ROOM.make(name, where, Filter)
