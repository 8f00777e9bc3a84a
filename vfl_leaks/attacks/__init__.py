"""Attacks of the leak meter, one file per attack, in packages by the kind of data they read."""

from __future__ import annotations

from vfl_leaks.scene.scene import Attack
from vfl_party.base.plugins import Registry

REGISTRY = Registry("vfl.attacks", "attack", __name__, "ATTACK", shelves=True)


def load(kind: str, where: str) -> Attack:
    """Returns the attack ``kind``. Raises InputError that names ``where`` if there is none."""
    return REGISTRY.check_type(REGISTRY.load(kind, where), kind, where, Attack)
