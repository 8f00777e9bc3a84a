"""Encoders and top models that are defined in a notebook or a script, so that other processes
cannot import them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isclass, isroutine
from typing import Any

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError

_FACTORIES: dict[str, Callable[..., Any]] = {}
_WORDS = {"encoder": "encoder", "top": "top model"}


def __getattr__(name: str) -> Callable[..., Any]:
    """Returns the factory that ``factory`` stored under ``name``."""
    try:
        return _FACTORIES[name]
    except KeyError:
        raise AttributeError(name) from None


def name_factories(tables: dict[str, Any]) -> dict[str, Any]:
    """Replaces encoders and top models in a recipe's tables that are classes or functions by tables
    with ``kind = "custom"`` and the name of the factory.
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
    """Returns ``module:name`` of a model's factory. A factory that cannot be imported is stored in
    this module.
    """
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
    stored_name = name.rpartition(".")[2] if name.rpartition(".")[2].isidentifier() else "encoder"
    # A notebook cell that runs again defines another class with the same name.
    while _FACTORIES.get(stored_name, made_by) is not made_by:
        stored_name += "_"
    _FACTORIES[stored_name] = made_by
    return f"{__name__}:{stored_name}"


def require_importable(recipe: Recipe, what: str, instead: str = "processes=False") -> None:
    """Raises InputError if only this process has an encoder or the top model of the recipe.

    ``what``: the file or process that cannot find the model. ``instead``: an argument without which
    the model must be importable.
    """
    model = find_unimportable_model(recipe)
    if model is not None:
        raise InputError(
            Code.MODEL_INVALID,
            f"{model} of this notebook or script cannot be found by {what}. Put it into a "
            f"module, or set {instead}.",
        )


def find_unimportable_model(recipe: Recipe) -> str | None:
    """Returns a text such as ``model: an encoder`` for a model that only this process has; None if
    other processes can import all models.
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
