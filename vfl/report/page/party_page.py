"""The page of a passive party, from its own folder: what it gave, and what it was told."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vfl.report.charts import draw_own_curves, has_curve
from vfl.report.page.draw import picture
from vfl.report.page.facts import columns_of, read_json
from vfl.report.page.render import Page
from vfl.report.page.tables import NAMES, Part, Table, Tile, arithmetic, name_of, value
from vfl.report.page.worth import importance
from vfl.report.reading import OWN, Rounds, history
from vfl.report.rounds import Source
from vfl.report.table import size
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.ledger import CONTROL, Entry, read_entries
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Arithmetic
from vfl_common.text import listed

# What the active party has told, as ``vfl_party.methods.evaluate`` writes it.
TOLD = "told.json"


def party_page(folder: Path) -> Page:
    """Returns the page of one passive party. ``folder``: its own in the run. Raises InputError if
    its ledger is damaged.
    """
    source = Source(folder)
    entries = read_entries(folder / "ledger.json")
    told = _told(folder)
    columns = columns_of(folder)
    try:
        recipe = RunFolder(folder, source.run_id).recipe()
    except InputError:
        recipe = None
    rounds = history(folder)
    page = Page(
        f"{source.party} in {recipe.name if recipe else source.run_id}",
        f"Run {source.run_id}, as {source.party} has seen it. The scores and labels are at the "
        "active party.",
        lead=_lead(source, recipe, told, columns),
        tiles=_tiles(entries, told, rounds[-1].values["seconds"] if rounds else None),
        made=f"Made by vfl report at {source.party}, of {source.run_id}.",
    )
    by_phase: dict[str, Rounds] = {}
    for each in rounds:
        by_phase.setdefault(each.phase, {})[each.round] = each.metrics
    page.parts = [
        _quality(told),
        _columns(source.party, columns, folder),
        _learning(source.party, by_phase),
        _crossed(entries),
        _about(source, recipe),
    ]
    return page


def _told(folder: Path) -> dict[str, dict[str, float]]:
    """Reads {split: {metric: value}} of what the active party has told; empty if nothing."""
    found = read_json(folder / TOLD)
    return {
        split: {
            str(name): float(one) for name, one in named.items() if isinstance(one, int | float)
        }
        for split, named in found.items()
        if isinstance(named, dict)
    }


def _lead(
    source: Source,
    recipe: Recipe | None,
    told: Mapping[str, Mapping[str, float]],
    columns: list[str],
) -> list[str]:
    active = recipe.active.name if recipe is not None else "the active party"
    gave = f"{len(columns)} columns" if columns else "its columns"
    others = [p.name for p in recipe.passives if p.name != source.party] if recipe else []
    beside = f", beside {listed(others)}" if others else ""
    found = [
        f"{source.party} took part with {gave}{beside}. {active} has the labels and the scores.",
        "The table of this party never left it. What was computed from it did: see below.",
    ]
    if told:
        split = "test" if "test" in told else list(told)[-1]
        said = ", ".join(f"{name_of(name)} {value(one)}" for name, one in told[split].items())
        found.append(f"{active} has told how good the model is on the {split} rows: {said}.")
    else:
        found.append(
            f"{active} has told no metric: the recipe has none in report.tell_passives, or the "
            "evaluation is still to come."
        )
    return found


def _tiles(
    entries: list[Entry], told: Mapping[str, Mapping[str, float]], seconds: float | None
) -> list[Tile]:
    split = "test" if "test" in told else next(reversed(list(told)), "")
    found = [
        Tile(f"{name_of(name)}, {split} rows", value(one))
        for name, one in told.get(split, {}).items()
    ]
    for direction in ("sent", "received"):
        own = [each for each in entries if each.direction == direction]
        count = sum(each.messages for each in own)
        total = size(sum(each.message_bytes for each in own))
        found.append(Tile(direction.capitalize(), total, f"{count:,} messages"))
    if seconds is not None:
        found.append(Tile("Time", f"{seconds:.1f} s", "of the last start"))
    return found


def _quality(told: Mapping[str, Mapping[str, float]]) -> Part:
    part = Part("quality", "How good is the model?")
    names = list(dict.fromkeys(name for named in told.values() for name in named))
    if names:
        rows = [
            [
                name_of(name),
                *(value(told[split].get(name, float("nan"))) for split in told),
                NAMES.get(name, ("", ""))[1],
            ]
            for name in names
        ]
        heads = ["metric", *told, "what it means"]
        words = frozenset({0, len(heads) - 1})
        part.tables.append(Table("Metrics that the active party has told", heads, rows, words))
    return part


def _columns(party: str, columns: list[str], folder: Path) -> Part:
    part = Part("columns", "What your columns are worth")
    importance(part, party, read_json(folder / "importance.json"))
    if columns:
        rows = [[f"{at}", name] for at, name in enumerate(columns, 1)]
        part.tables.append(Table("Columns of this party", ["", "name"], rows, frozenset({0, 1})))
        if not part.pictures:
            part.text.append("Nobody has measured in this run what each column is worth.")
    return part


def _learning(party: str, by_phase: Mapping[str, Rounds]) -> Part:
    part = Part("learning", "How it learned")
    for at, (phase, rounds) in enumerate(by_phase.items()):
        losses = any("loss" in named.get(split, {}) for named in rounds.values() for split in OWN)
        if has_curve(rounds) and losses:
            draw = partial(draw_own_curves, parties={party: rounds})
            title = f"{phase}: own loss"
            part.pictures.append(picture(f"own{at}", title, f"{title} by round", draw))
    return part


def _crossed(entries: list[Entry]) -> Part:
    part = Part("left", "What left this party, and what came")
    for direction, title in (("sent", "What left"), ("received", "What came")):
        rows = [
            [
                f"{each.phase}: {each.kind}",
                each.peer,
                f"{each.messages:,}",
                size(each.payload_bytes),
                size(each.message_bytes),
            ]
            for each in sorted(entries, key=lambda one: one.phase == CONTROL)
            if each.direction == direction
        ]
        if rows:
            heads = ["phase and kind", "peer", "messages", "tensors", "bytes"]
            part.tables.append(Table(title, heads, rows, frozenset({0, 1})))
    part.text.append(
        "Control is the session with the server. What each exchange carries, and which defences "
        "it passes, vfl-party check prints with your party file."
    )
    return part


def _about(source: Source, recipe: Recipe | None) -> Part:
    part = Part("again", "This run")
    facts: dict[str, Any] = source.read("run.json")
    rows = [["run", source.run_id], ["party", source.party]]
    if recipe is not None:
        rows += [["recipe", recipe.name], ["method", recipe.method], ["seed", f"{recipe.seed}"]]
        rows += [["parties", listed([each.name for each in recipe.parties])]]
    rows += [["digest of the recipe", str(facts.get("recipe_digest", "unknown"))]]
    rows += [["finished", "yes" if source.finished else "no"]]
    part.tables.append(Table("Facts of this run", ["what", "is"], rows, frozenset({0, 1})))
    with contextlib.suppress(ValueError):
        computed = Arithmetic.model_validate(facts.get("arithmetic"))
        part.tables += arithmetic({source.party: computed})
    return part
