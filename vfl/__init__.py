"""Vertical federated learning: the library, and the ``vfl`` program.

>>> import vfl
>>> run = vfl.simulate("digits.toml")  # doctest: +SKIP
>>> run.metrics["test"]["accuracy"]  # doctest: +SKIP
0.9777

``docs/reference/api.md`` lists every public name. Each name is imported on first use,
and torch when a run needs it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

# This import sets an environment variable of MKL, which must happen before torch is imported.
import vfl_party  # noqa: F401

if TYPE_CHECKING:
    # The names of satellites are not in __all__, because they are removed with their packages.
    from vfl.library.data import Data
    from vfl.library.forecast import Forecast, forecast
    from vfl.library.model import Model, Round
    from vfl.library.recipe import Recipe
    from vfl.library.run import Run
    from vfl.library.simulate import simulate
    from vfl_common.errors import Code, VflError
    from vfl_hub.library import Hub as Hub
    from vfl_lab.production.compare import Comparison as Comparison
    from vfl_lab.production.compare import compare as compare
    from vfl_lab.searching.search import search as search
    from vfl_lab.searching.trials import Search as Search
    from vfl_lab.study import Study as Study
    from vfl_lab.study import study as study
    from vfl_leaks.api import Leaks as Leaks
    from vfl_leaks.api import leaks as leaks
    from vfl_papers.prepare import PreparedData as PreparedData
    from vfl_papers.prepare import prepare as prepare
    from vfl_party.base.seeds import deal

__all__ = [
    "Code",
    "Data",
    "Forecast",
    "Model",
    "Recipe",
    "Round",
    "Run",
    "VflError",
    "deal",
    "forecast",
    "simulate",
]

_MODULES = {
    "Code": "vfl_common.errors",
    "Data": "vfl.library.data",
    "Forecast": "vfl.library.forecast",
    "Model": "vfl.library.model",
    "Recipe": "vfl.library.recipe",
    "Round": "vfl.library.model",
    "Run": "vfl.library.run",
    "VflError": "vfl_common.errors",
    "deal": "vfl_party.base.seeds",
    "forecast": "vfl.library.forecast",
    "simulate": "vfl.library.simulate",
}

for _name in (
    "vfl",
    "vfl_common",
    "vfl_governance",
    "vfl_lab",
    "vfl_leaks",
    "vfl_papers",
    "vfl_party",
    "vfl_serve",
    "vfl_server",
):
    # The application that uses the library configures logging, so the library prints no log itself.
    logging.getLogger(_name).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    # Other packages add names to ``vfl`` with entry points in the group ``vfl.library``.
    for entry_point in entry_points(group="vfl.library", name=name):
        return entry_point.load()
    raise AttributeError(f"module 'vfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(entry.name for entry in entry_points(group="vfl.library"))})
