"""The page of a passive party, from its own folder: what it sent and which metrics it received."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vfl.summary.picture import draw_own_curves, has_curve
from vfl.summary.reading import OWN_SPLITS, Rounds, read_history
from vfl.summary.rounds import PartyFolder
from vfl.summary.table import format_size
from vfl_common.bundle import CONTROL, Entry, read_entries
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Arithmetic
from vfl_common.text import list_names
from vfl_lab.report.draw import draw_picture
from vfl_lab.report.facts import read_column_names, read_json
from vfl_lab.report.render import (
    NAMES,
    PageSection,
    PageTable,
    ReportPage,
    Tile,
    format_metric,
    get_metric_name,
    make_arithmetic_tables,
)
from vfl_lab.report.worth import add_importance

# The file with the metrics from the active party, which ``vfl_party.methods.evaluate`` writes.
TOLD = "told.json"


def make_party_page(folder: Path) -> ReportPage:
    """Returns the page of one passive party. ``folder``: its folder of the run.

    Raises InputError if its ledger is damaged.
    """
    source = PartyFolder(folder)
    entries = read_entries(folder / "ledger.json")
    metrics = _read_metrics(folder)
    columns = read_column_names(folder)
    try:
        recipe = RunFolder(folder, source.run_id).recipe()
    except InputError:
        recipe = None
    rounds = read_history(folder)
    page = ReportPage(
        f"{source.party} in {recipe.name if recipe else source.run_id}",
        f"Run {source.run_id} from the view of {source.party}. The active party has the scores and "
        "labels.",
        lead=_write_lead(source, recipe, metrics, columns),
        tiles=_make_tiles(entries, metrics, rounds[-1].values["seconds"] if rounds else None),
        made=f"Made by vfl report at {source.party} from {source.run_id}.",
    )
    by_phase: dict[str, Rounds] = {}
    for line in rounds:
        by_phase.setdefault(line.phase, {})[line.round] = line.metrics
    page.parts = [
        _make_quality_section(metrics),
        _make_columns_section(source.party, columns, folder),
        _make_learning_section(source.party, by_phase),
        _make_messages_section(entries),
        _make_about_section(source, recipe),
    ]
    return page


def _read_metrics(folder: Path) -> dict[str, dict[str, float]]:
    """Reads {split: {metric: value}} from the active party; empty without metrics."""
    content = read_json(folder / TOLD)
    return {
        split: {
            str(name): float(one) for name, one in named.items() if isinstance(one, int | float)
        }
        for split, named in content.items()
        if isinstance(named, dict)
    }


def _write_lead(
    source: PartyFolder,
    recipe: Recipe | None,
    metrics: Mapping[str, Mapping[str, float]],
    columns: list[str],
) -> list[str]:
    active = recipe.active.name if recipe is not None else "the active party"
    own = f"{len(columns)} columns" if columns else "its columns"
    others = [p.name for p in recipe.passives if p.name != source.party] if recipe else []
    with_others = f", together with {list_names(others)}" if others else ""
    sentences = [
        f"{source.party} took part with {own}{with_others}. {active} has the labels and the "
        "scores.",
        "The table of this party never left it. Values computed from it did: see below.",
    ]
    if metrics:
        split = "test" if "test" in metrics else list(metrics)[-1]
        values = ", ".join(
            f"{get_metric_name(name)} {format_metric(one)}" for name, one in metrics[split].items()
        )
        sentences.append(f"Metrics of the model on the {split} rows, from {active}: {values}.")
    else:
        sentences.append(
            f"{active} has sent no metrics: the recipe has none in report.tell_passives, or the "
            "evaluation has not run yet."
        )
    return sentences


def _make_tiles(
    entries: list[Entry], metrics: Mapping[str, Mapping[str, float]], seconds: float | None
) -> list[Tile]:
    split = "test" if "test" in metrics else next(reversed(list(metrics)), "")
    tiles = [
        Tile(f"{get_metric_name(name)}, {split} rows", format_metric(one))
        for name, one in metrics.get(split, {}).items()
    ]
    for direction in ("sent", "received"):
        own = [entry for entry in entries if entry.direction == direction]
        count = sum(entry.messages for entry in own)
        total = format_size(sum(entry.message_bytes for entry in own))
        tiles.append(Tile(direction.capitalize(), total, f"{count:,} messages"))
    if seconds is not None:
        tiles.append(Tile("Time", f"{seconds:.1f} s", "since the last start"))
    return tiles


def _make_quality_section(metrics: Mapping[str, Mapping[str, float]]) -> PageSection:
    part = PageSection("quality", "How good is the model?")
    names = list(dict.fromkeys(name for named in metrics.values() for name in named))
    if names:
        rows = [
            [
                get_metric_name(name),
                *(format_metric(metrics[split].get(name, float("nan"))) for split in metrics),
                NAMES.get(name, ("", ""))[1],
            ]
            for name in names
        ]
        heads = ["metric", *metrics, "what it means"]
        words = frozenset({0, len(heads) - 1})
        part.tables.append(PageTable("Metrics from the active party", heads, rows, words))
    return part


def _make_columns_section(party: str, columns: list[str], folder: Path) -> PageSection:
    part = PageSection("columns", "How important are your columns?")
    add_importance(part, party, read_json(folder / "importance.json"))
    if columns:
        rows = [[f"{at}", name] for at, name in enumerate(columns, 1)]
        part.tables.append(
            PageTable("Columns of this party", ["", "name"], rows, frozenset({0, 1}))
        )
        if not part.pictures:
            part.text.append("The importance of the columns was not measured in this run.")
    return part


def _make_learning_section(party: str, by_phase: Mapping[str, Rounds]) -> PageSection:
    part = PageSection("learning", "How it learned")
    for at, (phase, rounds) in enumerate(by_phase.items()):
        losses = any(
            "loss" in named.get(split, {}) for named in rounds.values() for split in OWN_SPLITS
        )
        if has_curve(rounds) and losses:
            draw = partial(draw_own_curves, parties={party: rounds})
            title = f"{phase}: own loss"
            part.pictures.append(draw_picture(f"own{at}", title, f"{title} by round", draw))
    return part


def _make_messages_section(entries: list[Entry]) -> PageSection:
    part = PageSection("left", "Messages of this party")
    for direction, title in (("sent", "Sent"), ("received", "Received")):
        rows = [
            [
                f"{entry.phase}: {entry.kind}",
                entry.peer,
                f"{entry.messages:,}",
                format_size(entry.payload_bytes),
                format_size(entry.message_bytes),
            ]
            for entry in sorted(entries, key=lambda one: one.phase == CONTROL)
            if entry.direction == direction
        ]
        if rows:
            heads = ["phase and kind", "peer", "messages", "tensors", "bytes"]
            part.tables.append(PageTable(title, heads, rows, frozenset({0, 1})))
    part.text.append(
        "Control is the session with the server. Run vfl-party check with your party file to see "
        "the content and the defences of each exchange."
    )
    return part


def _make_about_section(source: PartyFolder, recipe: Recipe | None) -> PageSection:
    part = PageSection("again", "This run")
    facts: dict[str, Any] = source.read("run.json")
    rows = [["run", source.run_id], ["party", source.party]]
    if recipe is not None:
        rows += [["recipe", recipe.name], ["method", recipe.method], ["seed", f"{recipe.seed}"]]
        rows += [["parties", list_names([party.name for party in recipe.parties])]]
    rows += [["digest of the recipe", str(facts.get("recipe_digest", "unknown"))]]
    rows += [["finished", "yes" if source.finished else "no"]]
    part.tables.append(PageTable("Facts of this run", ["what", "is"], rows, frozenset({0, 1})))
    with contextlib.suppress(ValueError):
        computed = Arithmetic.model_validate(facts.get("arithmetic"))
        part.tables += make_arithmetic_tables({source.party: computed})
    return part
