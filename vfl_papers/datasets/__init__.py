"""Data sets of ``vfl prepare``, one file each, found by name, and those of plug-ins."""

from __future__ import annotations

from vfl_papers.dataset import DataSet
from vfl_party.base.plugins import Registry

REGISTRY = Registry("vfl.datasets", "data set", __name__, "DATASET", shelves=True)


def load(name: str) -> DataSet:
    """Returns the data set of that name (``-`` stands for ``_``). Raises InputError, with the
    nearest name, for an unknown one.
    """
    known = name.replace("-", "_")
    return REGISTRY.check_type(REGISTRY.load(known, "prepare"), known, "prepare", DataSet)
