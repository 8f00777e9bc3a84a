"""Encoders and top models that cannot be imported from a module: classes and
functions of a notebook or a script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isclass, isroutine
from typing import Any

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError

_HERE: dict[str, Callable[..., Any]] = {}
_WORDS = {"encoder": "encoder", "top": "top model"}


def __getattr__(name: str) -> Callable[..., Any]:
    """Finds a factory by the name that it got here."""
    try:
        return _HERE[name]
    except KeyError:
        raise AttributeError(name) from None


def name_factories(tables: dict[str, Any]) -> dict[str, Any]:
    """Replaces each class or function that is an encoder or the top model by ``kind = "custom"``
    and the name of its factory.
    """
    model = tables.get("model")
    places = [(model, "encoder"), (model, "top")] if isinstance(model, dict) else []
    parties = (party for party in tables.get("parties", ()) if isinstance(party, dict))
    places += [(party, "encoder") for party in parties]
    for table, key in places:
        model_class = table.get(key)
        if (
            model_class is not None
            and not isinstance(model_class, dict | str)
            and not (isclass(model_class) or isroutine(model_class))
        ):
            raise InputError(
                Code.MODEL_INVALID,
                f"{key}: must be the class or function that makes the {_WORDS[key]} (got "
                f"{type(model_class).__name__}(…)). Give the class itself.",
            )
        if callable(model_class):
            table[key] = {"kind": "custom", "factory": factory(model_class)}
    return tables


def factory(made_by: Callable[..., Any]) -> str:
    """Returns ``module:name`` of a model's factory; one that cannot be imported is kept here."""
    module, name = (
        str(getattr(made_by, "__module__", "")),
        str(getattr(made_by, "__qualname__", "")),
    )
    if (
        name.isidentifier()
        and module != "__main__"
        and getattr(sys.modules.get(module), name, None) is made_by
    ):
        return f"{module}:{name}"
    own = name.rpartition(".")[2] if name.rpartition(".")[2].isidentifier() else "encoder"
    # A cell that was run again made another class of that name.
    while _HERE.get(own, made_by) is not made_by:
        own += "_"
    _HERE[own] = made_by
    return f"{__name__}:{own}"


def refuse_here(recipe: Recipe, what: str, instead: str = "processes=False") -> None:
    """Raises InputError if an encoder of the recipe, or its top model, is one that only this
    process has, and ``what`` cannot name it.

    ``instead``: the argument with which that does not matter.
    """
    model = only_here(recipe)
    if model is not None:
        raise InputError(
            Code.MODEL_INVALID,
            f"{model} of this notebook or script cannot be found by {what}. Put it into a "
            f"module, or set {instead}.",
        )


def only_here(recipe: Recipe) -> str | None:
    """Returns the model that only this process has, as in ``model: an encoder``; None if there is
    none.
    """
    for name, word, model in [
        ("model", "an encoder", recipe.model.encoder),
        ("model", "a top model", recipe.model.top),
        *((party.name, "an encoder", party.encoder) for party in recipe.parties),
    ]:
        if getattr(model, "kind", "") == "custom" and str(getattr(model, "factory", "")).startswith(
            f"{__name__}:"
        ):
            return f"{name}: {word}"
    return None
