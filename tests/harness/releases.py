"""Recipes as other releases have them."""

from __future__ import annotations

from typing import Any

from pydantic import create_model

from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import RunSettings


def newer(tables: dict[str, Any], default: Any = 7) -> Recipe:
    """Reads a recipe as a release does that knows one more key, ``run.audit_every``, with a
    default.
    """
    run = create_model("Run", __base__=RunSettings, audit_every=(int, default))
    recipe = create_model("Newer", __base__=Recipe, run=(run, run()))
    return recipe.model_validate(tables)
