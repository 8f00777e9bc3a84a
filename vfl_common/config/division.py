"""Finds each party's data when all parties run on one machine: its own source, or its part of one
data set.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from vfl_common.config.base import parse
from vfl_common.config.data import NO_FEATURES, DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PartySettings, SimulateSettings
from vfl_common.config.view import ViewSettings
from vfl_common.errors import Code, InputError


def get_simulate_settings(recipe: Recipe) -> SimulateSettings:
    """Returns the recipe's table [simulate]. Raises InputError if the recipe has none."""
    if recipe.simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe {recipe.name}: simulate: missing. Give the party files in place of the "
            "recipe, or each party's data: [simulate.data] and simulate.scheme, or a "
            "[simulate.parties.NAME] for each party.",
        )
    return recipe.simulate


def divide(recipe: Recipe, base: Path) -> dict[str, DataSettings]:
    """Returns each party's data: its own source, or its part of the shared data set. Relative paths
    start at ``base``.

    The parts are assigned to the parties that have features, in the order of the recipe. An active
    party without features reads only the label. Raises InputError if a party has no data, or if the
    scheme does not fit the number of parties.
    """
    simulate = get_simulate_settings(recipe)
    roster = [party.name for party in recipe.parties]
    for key, settings in (
        ("parties", simulate.parties),
        ("devices", simulate.devices),
        ("policies", simulate.policies),
    ):
        for name in settings:
            if name not in roster:
                suggestions = difflib.get_close_matches(name, roster, n=1)
                hint = (
                    f"did you mean {suggestions[0]!r}?"
                    if suggestions
                    else f"parties: {', '.join(roster)}"
                )
                raise _invalid(recipe, f"{key}.{name}: not a party of the recipe; {hint}")
    data = {}
    for party in recipe.parties:
        own_data = simulate.parties.get(party.name)
        if own_data is None and simulate.data is None:
            raise _invalid(
                recipe,
                f"parties.{party.name}: missing. Add it, or add simulate.data for all parties.",
            )
        data[party.name] = (own_data or _select_part(recipe, simulate, party)).absolute(
            base.resolve()
        )
    return data


def _select_part(recipe: Recipe, simulate: SimulateSettings, party: PartySettings) -> DataSettings:
    """Returns one party's part of the shared data set."""
    shared_data = simulate.data
    assert shared_data is not None  # noqa: S101 - checked by the caller
    if shared_data.view is not None:
        raise _invalid(recipe, "data.view: simulate.scheme divides the data set. Remove the view.")
    if not party.features:
        return shared_data.model_copy(update=NO_FEATURES)
    sharers = recipe.sharing
    view = {"scheme": simulate.scheme, "part": sharers.index(party.name), "parts": len(sharers)}
    where = f"recipe {recipe.name}: simulate.scheme ({len(sharers)} parties share the data set)"
    return shared_data.model_copy(update={"view": parse(ViewSettings, view, where)})


def _invalid(recipe: Recipe, what: str) -> InputError:
    return InputError(Code.CONFIG_INVALID, f"recipe {recipe.name}: simulate.{what}")
