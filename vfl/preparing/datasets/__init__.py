"""Data sets of ``vfl prepare``: one file each, on a shelf by what a row is, found by its name, and
those of plug-ins.
"""

from __future__ import annotations

from vfl.preparing.dataset import DataSet
from vfl_party.base.plugins import Registry

REGISTRY = Registry("vfl.datasets", "data set", __name__, "DATASET", shelves=True)


def load(name: str) -> DataSet:
    """Returns the data set of that name; ``-`` in it is ``_``. Raises InputError, with the nearest
    name, if there is none.
    """
    known = name.replace("-", "_")
    return REGISTRY.checked(REGISTRY.load(known, "prepare"), known, "prepare", DataSet)
