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
    # Names of satellites (vfl_leaks, vfl_papers) are not in __all__: they go when a satellite does.
    from vfl.library.data import Data
    from vfl.library.forecast import Forecast, forecast
    from vfl.library.model import Model
    from vfl.library.recipe import Recipe
    from vfl.library.rounds import Round
    from vfl.library.run import Run
    from vfl.library.simulate import simulate
    from vfl.library.study import Study, study
    from vfl.production.compare import Comparison, compare
    from vfl.searching.found import Search
    from vfl.searching.search import search
    from vfl_common.errors import Code, VflError
    from vfl_leaks.api import Leaks as Leaks
    from vfl_leaks.api import leaks as leaks
    from vfl_papers.prepare import PreparedData as PreparedData
    from vfl_papers.prepare import prepare as prepare
    from vfl_party.base.deal import deal

__all__ = [
    "Code",
    "Comparison",
    "Data",
    "Forecast",
    "Model",
    "Recipe",
    "Round",
    "Run",
    "Search",
    "Study",
    "VflError",
    "compare",
    "deal",
    "forecast",
    "search",
    "simulate",
    "study",
]

_MODULES = {
    "Code": "vfl_common.errors",
    "Comparison": "vfl.production.compare",
    "Data": "vfl.library.data",
    "Forecast": "vfl.library.forecast",
    "Model": "vfl.library.model",
    "Recipe": "vfl.library.recipe",
    "Round": "vfl.library.rounds",
    "Run": "vfl.library.run",
    "Search": "vfl.searching.found",
    "Study": "vfl.library.study",
    "VflError": "vfl_common.errors",
    "compare": "vfl.production.compare",
    "deal": "vfl_party.base.deal",
    "forecast": "vfl.library.forecast",
    "search": "vfl.searching.search",
    "simulate": "vfl.library.simulate",
    "study": "vfl.library.study",
}

for _name in (
    "vfl",
    "vfl_common",
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
