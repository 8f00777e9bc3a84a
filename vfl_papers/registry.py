"""Finds the data sets of ``vfl prepare`` by name, ours and those of plug-ins."""

from __future__ import annotations

from vfl_papers import images, tables
from vfl_papers.dataset import DataSet
from vfl_party.base.plugins import PlugIns

_DATASETS = {**images.DATASETS, **tables.DATASETS}
REGISTRY = PlugIns("vfl.datasets", "data set", ours=tuple(_DATASETS))


def load(name: str) -> DataSet:
    """Returns the data set of that name, in which ``-`` stands for ``_``. Raises InputError, with
    the nearest name, for an unknown one.
    """
    key = name.replace("-", "_")
    if key in _DATASETS:
        return _DATASETS[key]
    return REGISTRY.check_type(REGISTRY.load(key, "prepare"), key, "prepare", DataSet)
