"""Makes the recipes of baselines, with which a federation is compared.

The baseline ``alone`` is one party with its own columns. ``combined`` is one party with all
columns, joined by id. A baseline has the same rows, seed and model as the federation, and its only
party holds the ids that all parties hold. The training, validation and test rows are therefore the
same, except with ``rows.partial``, which divides more rows in another order. ``combined`` needs all
data in one place, so it is impossible between organisations.

A baseline can also be made from an active party's file. It then uses all rows of the party's table.
"""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

from vfl.simulation import BASELINES as BASELINES
from vfl_common.config.base import parse, read_tables
from vfl_common.config.data import NO_FEATURES, DataSettings, without_features
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe, divide, get_simulate_settings
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names

# The name of the party that has all columns.
COMBINED = "combined"
# These baselines need only the active party's table.
ALONE = ("alone", "gbdt-alone")
# The keys of a phase that need several parties.
_BETWEEN = ("codec", "transforms", "optimizers")
# The keys of a phase about training for missing parties. In ``evaluate``, ``subsets`` has another
# meaning.
_MISSING = ("subsets", "party_dropout")
# The keys of [rows] about entity alignment.
_ALIGNMENT = ("align", "psi", "at_least", "alignment", "partial", "keys", "key_rules", "fuzzy")
# Training stops after this many trees without a lower validation loss.
_PATIENCE = 50
Tables = dict[str, Any]


def baseline(tables: Tables, kind: str, base: Path, where: str) -> Tables:
    """Returns the recipe of a baseline of a federation.

    Args:
        tables: the federation's recipe as written.
        kind: one of BASELINES: ``alone`` (the active party, with the recipe's phases), ``combined``
            (all columns), ``gbdt`` (boosted trees over all columns) or ``gbdt-alone`` (boosted
            trees over the active party's columns).
        base: the folder to which the recipe's paths are relative.
        where: the place for errors.

    Raises InputError.
    """
    if tables.get("rows", {}).get("align") == "fuzzy":
        raise InputError(
            Code.CONFIG_INVALID,
            f'{where}: rows.align = "fuzzy" has no baseline, because only the run links the rows. '
            "Link the tables first, and use digest or psi.",
        )
    if kind not in BASELINES:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: unknown baseline {kind!r}. Choose one of {', '.join(BASELINES)}.",
        )
    recipe = parse(Recipe, tables, where)
    if kind in ("combined", "gbdt"):
        alone_tables = combine_columns(tables, recipe, base, where)
    else:
        alone_tables = alone(tables, recipe, recipe.active.name, base, where)
    return _set_phases(recipe, alone_tables, kind)


def make_from_party_file(path: Path, kind: str | None) -> Tables:
    """Returns the recipe in which the active party of a party file trains by itself, on all rows of
    its own table.

    ``kind``: as in ``baseline``. Raises InputError if the baseline needs the tables of all parties,
    or if the party has no labels.
    """
    file = load_party(path)
    if kind not in ALONE:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is a party file, and this baseline needs all tables. Give --baseline "
            "alone or gbdt-alone, the files of all parties, or a recipe with [simulate].",
        )
    tables = read_tables(Path(file.recipe), "recipe")
    recipe = parse(Recipe, tables, file.recipe)
    if file.name != recipe.active.name:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: name: {file.name} is not the active party ({recipe.active.name}), and has "
            "no labels to learn alone. Give the active party's file.",
        )
    if file.data is None or not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: {file.name} has no features to learn from alone. Add [data].",
        )
    place = {
        key: value for key, value in _get_parties(tables)[file.name].items() if key == "encoder"
    }
    if file.encoder is not None:
        place = {"encoder": file.encoder.model_dump(mode="json")}
    tables["simulate"] = {"threads": file.threads}
    return _set_phases(
        recipe, _make_one_party(tables, file.name, place, file.data, file.device), kind
    )


def _set_phases(recipe: Recipe, tables: Tables, kind: str) -> Tables:
    """Replaces the phases in the tables of a recipe of one party by those of the baseline ``kind``,
    and removes the settings that need other parties or an earlier run.
    """
    # A baseline does not continue a run, send messages, or report.
    for key in ("start", "wire", "report"):
        tables.pop(key, None)
    if kind.startswith("gbdt"):
        # The boosted trees always use float32.
        tables.get("model", {}).pop("precision", None)
        return tables | {"phases": _select_tree_phases(recipe, tables["phases"])}
    return tables | {"phases": adapt_phases(tables["phases"], tables["parties"][0]["name"])}


def adapt_phases(phases: list[Tables], name: str) -> list[Tables]:
    """Returns the phases for a party that trains by itself: with the optimizer of ``name``, and
    without settings that need other parties. A student is left out, because it learns from other
    parties.
    """
    result = []
    for phase in (phase for phase in phases if phase["kind"] != "student"):
        own = phase.get("optimizers", {}).get(name)
        left_out = _BETWEEN if phase["kind"] == "evaluate" else (*_BETWEEN, *_MISSING)
        settings = {key: value for key, value in phase.items() if key not in left_out}
        result.append(settings if own is None else settings | {"optimizer": own})
    return result


def _select_tree_phases(recipe: Recipe, phases: list[Tables]) -> list[Tables]:
    """Returns the recipe's own phases of boosted trees. If there are none, it returns a new phase,
    which stops early if the recipe guarantees validation rows.
    """
    own = [phase for phase in phases if phase["kind"] == "gbdt"]
    stops = recipe.rows.validation and recipe.rows.split != "column"
    return own or [{"kind": "gbdt"} | ({"early_stopping": _PATIENCE} if stops else {})]


def alone(tables: Tables, recipe: Recipe, name: str, base: Path, where: str) -> Tables:
    """Returns the recipe in which ``name`` trains by itself, on the columns that it has in the
    federation.

    Args:
        tables: the federation's recipe as written.
        recipe: the federation's recipe, parsed.
        name: the party.
        base: the folder to which the recipe's paths are relative.
        where: the place for errors.

    Raises InputError if there is no such party, or if it has no features or cannot get the labels.
    """
    party = recipe.party(name)
    if party is None:
        known = [each.name for each in recipe.parties]
        near = difflib.get_close_matches(name, known, n=1)
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: alone: {name!r} is not a party of the recipe. Choose "
            f"{repr(near[0]) if near else 'one of ' + ', '.join(known)}.",
        )
    if not party.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: alone: {name} has no features to learn from. Choose another party.",
        )
    if party.role == "passive" and name in get_simulate_settings(recipe).parties:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: alone: {name} has its own data (simulate.parties.{name}) without labels. "
            "Choose a party that shares simulate.data, or the active party.",
        )
    place = {key: value for key, value in _get_parties(tables)[name].items() if key == "encoder"}
    device = get_simulate_settings(recipe).devices.get(name)
    data = divide(recipe, base)
    own = data[name]
    # The common rows depend on the ids of the other parties.
    if recipe.rows.align == "psi" and get_simulate_settings(recipe).parties:
        others = {
            other: without_features(settings) for other, settings in data.items() if other != name
        }
        own = _join_tables({name: own, **others}, recipe)
    return _make_one_party(tables, name, place, own, device)


def combine_columns(tables: Tables, recipe: Recipe, base: Path, where: str) -> Tables:
    """Returns the recipe in which one party, ``COMBINED``, has all columns and the recipe's
    ``model.encoder``.

    The arguments are those of ``alone``. If parties have their own tables, the tables are joined by
    id, each with its own preprocessing. Raises InputError.
    """
    simulate, data = get_simulate_settings(recipe), divide(recipe, base)
    device = simulate.devices.get(recipe.active.name)
    if simulate.data is not None and not simulate.parties:
        return _make_one_party(tables, COMBINED, {}, simulate.data.absolute(base), device)
    if COMBINED in (recipe.server, *data):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: combined: {COMBINED!r} is reserved for the party with all columns. "
            "Rename the party.",
        )
    # The first table has the label.
    names = [recipe.active.name, *(party.name for party in recipe.passives)]
    if not recipe.active.features:
        data[names[0]] = data[names[0]].model_copy(update=NO_FEATURES)
    joined = _join_tables({name: data[name] for name in names}, recipe)
    return _make_one_party(tables, COMBINED, {}, joined, device)


def _join_tables(parts: dict[str, DataSettings], recipe: Recipe) -> DataSettings:
    """Returns the data settings of tables that are joined by id, or by the recipe's keys. The first
    table has the label.
    """
    parts = {name: settings.with_id_rules(recipe.rows) for name, settings in parts.items()}
    label_table = next(iter(parts.values()))
    return DataSettings(
        source=f"the joined tables of {list_names(list(parts))}",
        id=label_table.id,
        label=label_table.label or ("target" if label_table.is_named else None),
        labels=label_table.labels,
        event=label_table.event,
        group=label_table.group,
        weight=label_table.weight,
        label_scale=label_table.label_scale,
        parts=parts,
        in_common=recipe.rows.align == "psi",
    )


def _get_parties(tables: Tables) -> dict[str, Tables]:
    return {party["name"]: party for party in tables["parties"]}


def _make_one_party(
    tables: Tables, name: str, party_keys: Tables, data: DataSettings, device: str | None
) -> Tables:
    changed = copy.deepcopy(tables)
    width = _get_parties(tables).get(name, {}).get("embedding_size")
    if width is not None:
        changed["model"] = changed["model"] | {"embedding_size": width}
    changed["parties"] = [{"name": name, "role": "active", **party_keys}]
    simulate = {
        key: value
        for key, value in changed["simulate"].items()
        if key not in ("data", "scheme", "devices", "policies")
    }
    simulate["parties"] = {name: data.model_dump(mode="json", exclude_defaults=True)}
    if device is not None:
        simulate["devices"] = {name: device}
    changed["simulate"] = simulate
    changed["rows"] = {
        key: value for key, value in changed.get("rows", {}).items() if key not in _ALIGNMENT
    }
    return changed
