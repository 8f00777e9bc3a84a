"""Makes the recipes of baselines: what a federation is worth is seen beside one party that trains
by itself.

Alone: a party with its own columns. Combined: one party with all columns, joined by id. The new
recipe keeps rows, seed and model, and its only party holds the ids that all parties hold, so
training, validation and test rows are the same; not with ``rows.partial``, which divides more rows,
in another order. Combined needs all data in one place, so there is
none between organisations. An active party has a baseline of its own from its party file: there its
rows are all of its table, also those that the others lack.
"""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

from vfl.simulation import BASELINES as BASELINES
from vfl_common.config.base import parse
from vfl_common.config.data import NO_FEATURES, DataSettings, ids_only
from vfl_common.config.division import divide, settings_of
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import listed

# The name of the party that has all columns.
COMBINED = "combined"
# These need the active party's table only.
ALONE = ("alone", "gbdt-alone")
# Keys of a phase about what crosses between parties, and about several parties.
_BETWEEN = ("codec", "transforms", "optimizers")
# Keys of a phase that trains for parties that may be missing; ``evaluate`` has another ``subsets``.
_MISSING = ("subsets", "party_dropout")
# Keys of [rows] about finding the rows in common.
_ALIGNMENT = ("align", "at_least", "alignment", "partial")
# Trees without a lower loss on the validation rows.
_PATIENCE = 50
Tables = dict[str, Any]


def baseline(tables: Tables, kind: str, base: Path, where: str) -> Tables:
    """Returns the recipe of a baseline of a federation.

    Args:
        tables: the federation's recipe as written.
        kind: one of BASELINES. ``alone``: the active party, with the recipe's phases; ``combined``:
            all columns; ``gbdt``: boosted trees over all columns; ``gbdt-alone``: over the active
            party's.
        base: the folder to which the recipe's paths are relative.
        where: the beginning of an error's sentence.

    Raises InputError.
    """
    if kind not in BASELINES:
        text = f"{where}: there is no baseline {kind!r}; give one of {', '.join(BASELINES)}"
        raise InputError(Code.CONFIG_INVALID, text)
    recipe = parse(Recipe, tables, where)
    if kind in ("combined", "gbdt"):
        made = combined(tables, recipe, base, where)
    else:
        made = alone(tables, recipe, recipe.active.name, base, where)
    return _by_itself(recipe, made, kind)


def of_party_file(path: Path, kind: str | None) -> Tables:
    """Returns the recipe in which the active party of a party file trains by itself, on all rows of
    its own table.

    ``kind``: as in ``baseline``. Raises InputError if it needs the others' tables, or if the party
    has no labels.
    """
    file = load_party(path)
    if kind not in ALONE:
        text = f"{path}: is a party file, and only this party's table is here"
        raise InputError(
            Code.CONFIG_INVALID,
            f"{text}; give --baseline alone or gbdt-alone, the files of all parties, or a "
            "recipe with [simulate]",
        )
    tables = read_tables(Path(file.recipe), "recipe")
    recipe = parse(Recipe, tables, file.recipe)
    if file.name != recipe.active.name:
        text = (
            f"{path}: name: {file.name} is not the active party of the recipe "
            f"({recipe.active.name}), so it has no"
        )
        raise InputError(
            Code.CONFIG_INVALID, f"{text} labels to learn alone; give the active party's file"
        )
    if file.data is None or not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: {file.name} has no features to learn from alone; add [data]",
        )
    place = {key: value for key, value in _roster(tables)[file.name].items() if key == "encoder"}
    if file.encoder is not None:
        place = {"encoder": file.encoder.model_dump(mode="json")}
    tables["simulate"] = {"threads": file.threads}
    return _by_itself(recipe, _one_party(tables, file.name, place, file.data, file.device), kind)


def _by_itself(recipe: Recipe, made: Tables, kind: str) -> Tables:
    """Returns the recipe of one party, ``made``, with the phases of the baseline ``kind`` and no
    earlier run.
    """
    # A baseline owes nothing to an earlier run, nothing crosses, and nobody is told.
    for key in ("start", "wire", "report"):
        made.pop(key, None)
    if kind.startswith("gbdt"):
        # Trees are grown in float32.
        made.get("model", {}).pop("precision", None)
        return made | {"phases": _trees(recipe, made["phases"])}
    return made | {"phases": by_oneself(made["phases"], made["parties"][0]["name"])}


def by_oneself(phases: list[Tables], name: str) -> list[Tables]:
    """Returns phases for the party ``name`` alone: with the optimizer that they have for it, and
    without what they say of tensors that cross between parties, and of parties that are missing. A
    student has nobody to learn from.
    """
    found = []
    for phase in (each for each in phases if each["kind"] != "student"):
        own = phase.get("optimizers", {}).get(name)
        left_out = _BETWEEN if phase["kind"] == "evaluate" else (*_BETWEEN, *_MISSING)
        kept = {key: value for key, value in phase.items() if key not in left_out}
        found.append(kept if own is None else kept | {"optimizer": own})
    return found


def _trees(recipe: Recipe, phases: list[Tables]) -> list[Tables]:
    """Returns the recipe's own phase of boosted trees, or one that stops early if there are surely
    validation rows.
    """
    own = [phase for phase in phases if phase["kind"] == "gbdt"]
    stops = recipe.rows.validation and recipe.rows.split != "column"
    return own or [{"kind": "gbdt"} | ({"early_stopping": _PATIENCE} if stops else {})]


def alone(tables: Tables, recipe: Recipe, name: str, base: Path, where: str) -> Tables:
    """Returns the recipe in which ``name`` trains by itself, on the columns that it has in the
    federation.

    Args:
        tables: the federation's recipe as written; ``recipe`` is the parsed form.
        name: the party.
        base: the folder to which the recipe's paths are relative.
        where: the beginning of an error's sentence.

    Raises InputError if there is no such party, or it cannot have the labels.
    """
    party = recipe.party(name)
    if party is None:
        known = [each.name for each in recipe.parties]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"parties: {', '.join(known)}"
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: alone: {name!r} is no party of the recipe; {hint}"
        )
    if not party.features:
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: alone: {name} has no features to learn from"
        )
    if party.role == "passive" and name in settings_of(recipe).parties:
        text = (
            f"{where}: alone: {name} has its own data (simulate.parties.{name}), which have no "
            "labels"
        )
        raise InputError(
            Code.CONFIG_INVALID,
            f"{text}; take a party that shares simulate.data, or the active party",
        )
    place = {key: value for key, value in _roster(tables)[name].items() if key == "encoder"}
    device = settings_of(recipe).devices.get(name)
    data = divide(recipe, base)
    own = data[name]
    # The others' ids say which rows are in common.
    if recipe.rows.align == "psi" and settings_of(recipe).parties:
        others = {each: ids_only(settings) for each, settings in data.items() if each != name}
        own = _joined({name: own, **others}, in_common=True)
    return _one_party(tables, name, place, own, device)


def combined(tables: Tables, recipe: Recipe, base: Path, where: str) -> Tables:
    """Returns the recipe in which one party, ``COMBINED``, has all columns and the recipe's
    ``model.encoder``.

    The arguments are those of ``alone``. If parties have their own data, they are joined by id,
    each prepared as its settings say. Raises InputError.
    """
    simulate, data = settings_of(recipe), divide(recipe, base)
    device = simulate.devices.get(recipe.active.name)
    if simulate.data is not None and not simulate.parties:
        return _one_party(tables, COMBINED, {}, simulate.data.absolute(base), device)
    if COMBINED in (recipe.server, *data):
        text = (
            f"{where}: combined: {COMBINED!r} is the name of the party with all columns; "
            "rename yours"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    # The first has the label.
    names = [recipe.active.name, *(party.name for party in recipe.passives)]
    if not recipe.active.features:
        data[names[0]] = data[names[0]].model_copy(update=NO_FEATURES)
    joined = _joined({name: data[name] for name in names}, in_common=recipe.rows.align == "psi")
    return _one_party(tables, COMBINED, {}, joined, device)


def _joined(parts: dict[str, DataSettings], *, in_common: bool) -> DataSettings:
    """Returns the settings of tables joined by id; the first has the label."""
    first = next(iter(parts.values()))
    return DataSettings(
        source=f"the joined tables of {listed(list(parts))}",
        id=first.id,
        label=first.label or ("target" if first.is_named else None),
        labels=first.labels,
        event=first.event,
        group=first.group,
        weight=first.weight,
        label_scale=first.label_scale,
        parts=parts,
        in_common=in_common,
    )


def _roster(tables: Tables) -> dict[str, Tables]:
    return {party["name"]: party for party in tables["parties"]}


def _one_party(
    tables: Tables, name: str, place: Tables, data: DataSettings, device: str | None
) -> Tables:
    made = copy.deepcopy(tables)
    width = _roster(tables).get(name, {}).get("embedding_size")
    if width is not None:
        made["model"] = made["model"] | {"embedding_size": width}
    made["parties"] = [{"name": name, "role": "active", **place}]
    simulate = {
        key: value
        for key, value in made["simulate"].items()
        if key not in ("data", "scheme", "devices", "policies")
    }
    simulate["parties"] = {name: data.model_dump(mode="json", exclude_defaults=True)}
    if device is not None:
        simulate["devices"] = {name: device}
    made["simulate"] = simulate
    made["rows"] = {
        key: value for key, value in made.get("rows", {}).items() if key not in _ALIGNMENT
    }
    return made
