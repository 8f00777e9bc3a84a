"""Makes the recipes of the baselines: one party with the labels, and nobody else.

Solo: a party with its own part of the columns. Combine: one party with all columns. The new recipe keeps rows, seed,
model and phases. Its only party holds all ids of the data set, so its rows are those of the federation.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any

from vfl_common.config.recipe import Recipe, SimulateSettings
from vfl_common.errors import Code, InputError

COMBINED = "combined"  # the name of the party that has all columns
Tables = dict[str, Any]


def alone(tables: Tables, recipe: Recipe, name: str, where: str) -> Tables:
    """Returns the recipe in which ``name`` trains by itself, on the columns that it has in the federation.

    Args:
        tables: the federation's recipe as written; ``recipe`` is the parsed form.
        where: the beginning of an error's sentence.

    Raises InputError if there is no such party, or it cannot have the labels.
    """
    party, simulate = recipe.party(name), _simulate(recipe)
    if party is None:
        known = [each.name for each in recipe.parties]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"parties: {', '.join(known)}"
        raise InputError(Code.CONFIG_INVALID, f"{where}: alone: {name!r} is no party of the recipe; {hint}")
    if not party.features:
        raise InputError(Code.CONFIG_INVALID, f"{where}: alone: {name} has no features to learn from")
    given = tables["simulate"]
    if name not in simulate.parties:
        parts = recipe.sharing
        view = {"scheme": simulate.scheme, "part": parts.index(name), "parts": len(parts)}
        data = _whole(given, simulate, where, "alone") | {"view": view}
    elif party.role == "active":
        data = given["parties"][name]
    else:
        text = f"{where}: alone: {name} has its own data (simulate.parties.{name}), which have no labels"
        raise InputError(Code.CONFIG_INVALID, f"{text}; take a party that shares simulate.data, or the active party")
    place = {key: value for key, value in _roster(tables)[name].items() if key == "encoder"}
    return _one_party(tables, name, place, data, simulate.devices.get(name))


def combined(tables: Tables, recipe: Recipe, where: str) -> Tables:
    """Returns the recipe in which one party, ``COMBINED``, has the whole data set and the recipe's ``model.encoder``.

    The arguments are those of ``alone``. Raises InputError if parties have their own data.
    """
    simulate = _simulate(recipe)
    if simulate.parties:
        text = f"{where}: combined: {next(iter(simulate.parties))} has its own data (simulate.parties)"
        raise InputError(Code.CONFIG_INVALID, f"{text}, so it is not known who has which columns; give simulate.data")
    data = _whole(tables["simulate"], simulate, where, "combined")
    return _one_party(tables, COMBINED, {}, data, simulate.devices.get(recipe.active.name))


def _simulate(recipe: Recipe) -> SimulateSettings:
    assert recipe.simulate is not None  # noqa: S101 - studies require it
    return recipe.simulate


def _whole(given: Tables, simulate: SimulateSettings, where: str, key: str) -> Tables:
    if simulate.data is None:
        raise InputError(Code.CONFIG_INVALID, f"{where}: {key}: needs one data set for all (simulate.data)")
    if simulate.data.view is not None:  # as in a federation that divides it
        text = f"{where}: {key}: simulate.data.view: simulate.scheme divides the data set"
        raise InputError(Code.CONFIG_INVALID, f"{text}; remove the view")
    return dict(given["data"])


def _roster(tables: Tables) -> dict[str, Tables]:
    return {party["name"]: party for party in tables["parties"]}


def _one_party(tables: Tables, name: str, place: Tables, data: Tables, device: str | None) -> Tables:
    made = copy.deepcopy(tables)
    made["parties"] = [{"name": name, "role": "active", **place}]
    simulate = {key: value for key, value in made["simulate"].items() if key not in ("data", "scheme", "devices")}
    simulate["parties"] = {name: data}
    if device is not None:
        simulate["devices"] = {name: device}
    made["simulate"] = simulate
    return made
