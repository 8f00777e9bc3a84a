"""Attacks of the leak meter. A module has the attacks that read the same data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from vfl_leaks.scene import Attack
from vfl_party.base.plugins import PlugIns

# {attack: the module that exports it, under its name in capital letters}
_MODULES = {
    "clusters": "batches",
    "columns": "columns",
    "completion": "completion",
    "cosine": "batches",
    "direct": "batches",
    "encodings": "encodings",
    "epochs": "epochs",
    "images": "images",
    "initial": "initial",
    "inventions": "forged_trees",
    "nodes": "trees",
    "norm": "batches",
    "probes": "forged_trees",
    "reidentify": "columns",
    "residuals": "epochs",
    "sides": "trees",
    "sums": "trees",
    "tops": "shared_weights",
    "uploads": "shared_weights",
}


@dataclass(frozen=True)
class _Attacks(PlugIns):
    """The attacks of this package, whose modules are imported when they are first needed, of
    plug-ins and of a run.
    """

    def load(self, name: str, where: str) -> Any:
        if name in _MODULES and name not in self._get_plugins():
            module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
            return getattr(module, name.upper())
        return super().load(name, where)


REGISTRY = _Attacks("vfl.attacks", "attack", ours=tuple(_MODULES))


def load(kind: str, where: str) -> Attack:
    """Returns the attack ``kind``. Raises InputError that names ``where`` if there is none."""
    return REGISTRY.check_type(REGISTRY.load(kind, where), kind, where, Attack)
