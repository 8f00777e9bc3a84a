"""Encoders that have no module of their own to be imported from: classes and functions of a notebook or a script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_HERE: dict[str, Callable[..., Any]] = {}


def __getattr__(name: str) -> Callable[..., Any]:
    """Finds a factory by the name that it got here."""
    try:
        return _HERE[name]
    except KeyError:
        raise AttributeError(name) from None


def named(tables: dict[str, Any]) -> dict[str, Any]:
    """Puts ``kind = "custom"`` and a factory's name where a recipe has a class or a function as an encoder."""
    model = tables.get("model")
    places = [model] if isinstance(model, dict) else []
    places += [party for party in tables.get("parties", ()) if isinstance(party, dict)]
    for table in places:
        if callable(table.get("encoder")):
            table["encoder"] = {"kind": "custom", "factory": factory(table["encoder"])}
    return tables


def factory(made_by: Callable[..., Any]) -> str:
    """Returns ``module:name`` of an encoder's factory; one that cannot be imported is kept here."""
    module, name = str(getattr(made_by, "__module__", "")), str(getattr(made_by, "__qualname__", ""))
    if name.isidentifier() and module != "__main__" and getattr(sys.modules.get(module), name, None) is made_by:
        return f"{module}:{name}"
    own = name.rpartition(".")[2] if name.rpartition(".")[2].isidentifier() else "encoder"
    while _HERE.get(own, made_by) is not made_by:  # a cell that was run again made another class of that name
        own += "_"
    _HERE[own] = made_by
    return f"{__name__}:{own}"


def is_here(settings: Any) -> bool:
    """Whether an encoder's settings name a factory that only this process has."""
    return getattr(settings, "kind", "") == "custom" and settings.factory.startswith(f"{__name__}:")
