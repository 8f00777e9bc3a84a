"""Attacks of the leak meter: one file each, found by its name, and those of plug-ins."""

from __future__ import annotations

import sys

from vfl_party.attacks.scene import Attack
from vfl_party.plugins import Room

ROOM = Room("vfl.attacks", "attack", sys.modules[__name__], "ATTACK")


def load(kind: str, where: str) -> Attack:
    """Returns the attack ``kind``. Raises InputError that names ``where`` if there is none."""
    return ROOM.checked(ROOM.load(kind, where), kind, where, Attack)
