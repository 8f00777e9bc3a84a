"""Finds each party's data if all run on one machine: its own, or its part of one data set."""

from __future__ import annotations

import difflib
from pathlib import Path

from vfl_common.config.base import parse
from vfl_common.config.data import NO_FEATURES, DataSettings, ViewSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PartySettings, SimulateSettings
from vfl_common.errors import Code, InputError


def settings_of(recipe: Recipe) -> SimulateSettings:
    """Returns the recipe's [simulate]. Raises InputError if it has none."""
    if recipe.simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe {recipe.name}: simulate: missing. Give the party files in place of the "
            "recipe, or each party's data: [simulate.data] and simulate.scheme, or a "
            "[simulate.parties.NAME] for each party.",
        )
    return recipe.simulate


def divide(recipe: Recipe, base: Path) -> dict[str, DataSettings]:
    """Returns each party's data: its own, or its part of the one data set. Relative paths start at
    ``base``.

    The parts go to the parties that have features, in roster order. An active party without
    features reads only the label. Raises InputError if a party has no data, or if the scheme does
    not fit the number of parties.
    """
    simulate = settings_of(recipe)
    roster = [party.name for party in recipe.parties]
    for key, named in (
        ("parties", simulate.parties),
        ("devices", simulate.devices),
        ("policies", simulate.policies),
    ):
        for name in named:
            if name not in roster:
                near = difflib.get_close_matches(name, roster, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"parties: {', '.join(roster)}"
                raise _invalid(recipe, f"{key}.{name}: no party of the recipe; {hint}")
    data = {}
    for party in recipe.parties:
        own = simulate.parties.get(party.name)
        if own is None and simulate.data is None:
            raise _invalid(
                recipe,
                f"parties.{party.name}: missing. Give every party its own data, or all a part.",
            )
        data[party.name] = (own or _part(recipe, simulate, party)).absolute(base.resolve())
    return data


def _part(recipe: Recipe, simulate: SimulateSettings, party: PartySettings) -> DataSettings:
    """Returns one party's part of the one data set."""
    whole = simulate.data
    assert whole is not None  # noqa: S101 - checked by the caller
    if whole.view is not None:
        raise _invalid(recipe, "data.view: simulate.scheme divides the data set. Remove the view.")
    if not party.features:
        return whole.model_copy(update=NO_FEATURES)
    sharing = recipe.sharing
    view = {"scheme": simulate.scheme, "part": sharing.index(party.name), "parts": len(sharing)}
    where = f"recipe {recipe.name}: simulate.scheme ({len(sharing)} parties share the data set)"
    return whole.model_copy(update={"view": parse(ViewSettings, view, where)})


def _invalid(recipe: Recipe, what: str) -> InputError:
    return InputError(Code.CONFIG_INVALID, f"recipe {recipe.name}: simulate.{what}")
