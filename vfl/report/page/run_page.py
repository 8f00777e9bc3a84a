"""The page of one finished run, for the party that has its summary."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vfl.report.charts import curves_by_phase, draw_curve, draw_own_curves, has_curve
from vfl.report.notes import about_exchanges, unprotected
from vfl.report.page import tables
from vfl.report.page.baselines import Baseline, how_to_get
from vfl.report.page.draw import picture, quality
from vfl.report.page.facts import Facts
from vfl.report.page.render import Page
from vfl.report.page.tables import Part, Table, Tile, name_of, value
from vfl.report.page.worth import Beside, beside, part_of
from vfl.report.quality.curves import decisions, tenths
from vfl.report.quality.kept import KeptRows
from vfl.report.quality.measures import FIRST, Estimate, measured
from vfl.report.runs import began_of
from vfl.report.table import is_one, size, splits
from vfl_common.config.task import ThresholdRule
from vfl_common.text import listed, percent
from vfl_party.models.metrics import threshold_of

# Baselines that stand at the top.
_TILES = ("alone", "combined")
# Parties whose exchanges have a table.
_MOST_PARTIES = 24
# Lines of a table of leaks.
_MOST_LEAKS = 40


def run_page(
    facts: Facts, baselines: Mapping[str, Baseline], rule: ThresholdRule | float | None
) -> Page:
    """Returns the page of a run. ``rule``: what chooses another threshold by the validation rows,
    or a threshold. Raises InputError if the kept predictions are damaged.
    """
    summary = facts.run.summary
    by_split = {name: measured(kept) for name, kept in facts.kept.items() if _is_split(name)}
    own = by_split.get(facts.judged, {})
    pairs = beside(facts, baselines, own)
    began = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(began_of(facts.folder)[0]))
    page = Page(
        f"{summary.name}: what the model is worth",
        f"Run {summary.run_id}, {began}; {summary.method}, seed {summary.seed}.",
        lead=_lead(facts, own, pairs),
        tiles=_tiles(facts, own, pairs),
        warnings=_warnings(facts),
        made=f"Made by vfl report of {summary.run_id}. It shows scores of people: keep it to "
        "those who may see them.",
    )
    page.parts = [
        part_of(facts, pairs, baselines),
        _quality(facts, by_split, rule),
        _learning(facts),
        _rows(facts),
        _left(facts),
        _cost(facts),
        _again(facts),
    ]
    return page


def _lead(facts: Facts, own: Mapping[str, Estimate], pairs: Sequence[Beside]) -> list[str]:
    summary = facts.run.summary
    found = [_what(facts)]
    if facts.passives:
        who = [
            f"{name} ({len(columns)} columns)" if (columns := facts.columns(name)) else name
            for name in facts.passives
        ]
        mine = facts.columns(facts.active)
        has = f"the labels and {len(mine)} columns" if mine else "the labels"
        rows = "those of these rows that they hold" if facts.partial else "the same rows"
        found.append(f"{facts.active} has {has}; {listed(who)} added columns about {rows}.")
    else:
        found.append(f"{facts.active} trained by itself.")
    kept = facts.kept.get(facts.judged)
    metric = FIRST[kept.kind] if kept is not None else ""
    if kept is not None and metric in own:
        one = own[metric]
        text = f"On {len(kept):,} {facts.judged} rows {name_of(metric)} is {value(one.value)}"
        text += f" (95 % interval {tables.between(one)})" if tables.between(one) else ""
        found.append(f"{text}: {tables.NAMES[metric][1]}.")
    elif summary.metrics:
        split = splits(summary)[-1]
        each = ", ".join(f"{name_of(n)} {value(v)}" for n, v in summary.metrics[split].items())
        found.append(
            f"On the {split} rows: {each}. No predictions were kept, so there are no curves."
        )
    return found + _was_it_worth(facts, metric, pairs)


def _was_it_worth(facts: Facts, metric: str, pairs: Sequence[Beside]) -> list[str]:
    if not facts.passives or not facts.kept:
        return []
    by_kind = {each.kind: each for each in pairs}
    alone = by_kind.get("alone") or by_kind.get("gbdt-alone")
    found = []
    if alone is not None:
        found.append(alone.says(metric))
    elif facts.recipe is not None and not facts.recipe.active.features:
        found.append(f"{facts.active} has no columns of its own: alone it could predict nothing.")
    elif how_to_get(facts):
        found.append(
            f"Nobody has trained {facts.active} alone on these rows yet, so this page cannot say "
            "what the others add; the next section says how to find out."
        )
    pooled = by_kind.get("combined") or by_kind.get("gbdt")
    if pooled is not None:
        found.append(pooled.says(metric))
    return found


def _what(facts: Facts) -> str:
    label = facts.label or "the label"
    kept = facts.kept.get(facts.judged)
    kind = kept.kind if kept is not None else facts.recipe.task.kind if facts.recipe else ""
    if kept is not None and kind == "binary":
        return f"The model gives each row the probability that {label} is {kept.classes[1]}."
    return {
        "binary": f"The model gives each row the probability of one of two values of {label}.",
        "multiclass": f"The model decides to which class of {label} each row belongs.",
        "multilabel": "The model gives each row the probability of each of several labels.",
        "regression": f"The model predicts {label}, a number, for each row.",
        "survival": f"The model ranks rows by how soon {label} ends.",
        "ranking": f"The model orders the rows of each query by {label}.",
    }.get(kind, "The model was trained by several parties.")


def _tiles(facts: Facts, own: Mapping[str, Estimate], pairs: Sequence[Beside]) -> list[Tile]:
    summary, found = facts.run.summary, []
    kept = facts.kept.get(facts.judged)
    if kept is not None and FIRST[kept.kind] in own:
        metric = FIRST[kept.kind]
        one = own[metric]
        interval = tables.between(one)
        note = f"{interval} (95 %)" if interval else ""
        found.append(Tile(f"{name_of(metric)}, {facts.judged} rows", value(one.value), note))
        tones = {"better": "good", "worse": "bad"}
        for each in (each for each in pairs if each.kind in _TILES and not each.few):
            gain = each.gain[metric]
            outcome = gain.better(metric)
            note = f"{value(each.theirs[metric].value)}; together is {outcome}"
            note = note.replace("together is no", "no")
            tone = tones.get(outcome, "")
            found.append(Tile(f"against {each.title}", f"{gain.value:+.4f}", note, tone))
    used = {each.name: each.common_rows for each in summary.parties if each.rows}
    if any(used.values()):
        held = {each.name: each.rows for each in summary.parties if each.rows}
        note = ", ".join(f"{percent(used[name], rows)} of {name}'s" for name, rows in held.items())
        what = "Rows in common" if is_one(used) else "Rows that count"
        found.append(Tile(what, f"{max(used.values()):,}", note))
    if facts.passives:
        total = summary.bytes.total
        found.append(Tile("Sent in all", size(total.message_bytes), f"{total.messages:,} messages"))
    found.append(Tile("Time to train", _duration(summary.wall_s), f"{summary.steps:,} steps"))
    return found


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _warnings(facts: Facts) -> list[str]:
    summary = facts.run.summary
    found = list(unprotected(summary))
    if summary.without:
        found.append(f"Trained without {listed(summary.without)}, who came too late.")
    if not summary.bytes.agrees:
        found.append("The two ends of a link counted different bytes.")
    return found


def _quality(
    facts: Facts, by_split: Mapping[str, Mapping[str, Estimate]], rule: ThresholdRule | float | None
) -> Part:
    part = Part("quality", "How good is the model?")
    summary = facts.run.summary
    if not by_split:
        if summary.metrics:
            part.tables.append(tables.reported(summary, splits(summary)))
        return part
    kept = facts.kept[facts.judged]
    part.text.append(f"The pictures show the {len(kept):,} {facts.judged} rows.")
    threshold = summary.metrics.get(facts.judged, {}).get("threshold")
    part.pictures += quality(kept, threshold)
    part.tables.append(tables.quality(by_split, facts.kept))
    if kept.kind == "binary" and 0 < kept.truth_N.sum() < len(kept):
        part.tables.append(_decided(facts, kept, threshold, rule))
        found = tenths(kept.is_positive_N, kept.scores_N)
        part.tables.append(tables.lifts(found, kept.classes[1]))
    elif kept.kind == "multiclass":
        part.tables += tables.by_class(kept)
    elif kept.kind == "multilabel":
        part.tables.append(_by_label(kept))
    return part


def _decided(
    facts: Facts, kept: KeptRows, threshold: float | None, rule: ThresholdRule | float | None
) -> Table:
    """Shows what the run's own threshold decides, and what others would."""
    lines = [("the run's own", decisions(kept, threshold))]
    by = facts.kept.get("validation")
    if isinstance(rule, float):
        lines.insert(0, ("asked for", decisions(kept, rule)))
    if by is not None and by is not kept:
        rules = [ThresholdRule(rule="f1"), *([rule] if isinstance(rule, ThresholdRule) else [])]
        for each in rules:
            at = threshold_of(each, by.scores_N, by.truth_N)
            lines.append((_said(each), decisions(kept, at)))
    found = tables.decided(lines, kept.classes)
    note = (
        "Rules choose by the validation rows. For costs or a rate of your own: vfl report RUN "
        "--threshold cost=1:5, or rate=0.1."
    )
    return Table(found.caption, found.heads, found.rows, note=note)


def _said(rule: ThresholdRule) -> str:
    if rule.rule == "rate":
        return f"a share of {rule.rate:g} is chosen"
    if rule.rule == "cost":
        return f"least cost ({rule.false_positive:g} : {rule.false_negative:g})"
    return "highest F1"


def _by_label(kept: KeptRows) -> Table:
    rows = []
    for at, name in enumerate(kept.classes):
        own = KeptRows(
            kept.split,
            "binary",
            kept.keys,
            (f"not {name}", name),
            kept.truth_N[:, at],
            kept.scores_NO[:, at : at + 1],
            (kept.scores_NO[:, at] > 0.5).astype(int),
        )
        found = measured(own, 200)
        rows.append(
            [
                name,
                f"{int(own.truth_N.sum()):,}",
                *(
                    value(found[m].value) if m in found else "–"
                    for m in ("auc", "accuracy", "precision", "recall", "f1", "brier")
                ),
            ]
        )
    heads = ["label", "rows with it", "AUC", "accuracy", "precision", "recall", "F1", "Brier score"]
    return Table("Each label", heads, rows)


def _learning(facts: Facts) -> Part:
    part = Part("learning", "How it learned")
    rounds, own = curves_by_phase(facts.run)
    for at, (phase, found) in enumerate(rounds.items()):
        title = f"{phase}: loss"
        if phase in own:
            draw = partial(draw_own_curves, parties=own[phase])
            part.pictures.append(picture(f"own{at}", title, f"{title} of each party", draw))
        elif has_curve(found):
            draw = partial(draw_curve, rounds=found, names=["loss"])
            part.pictures.append(picture(f"loss{at}", title, f"{title} by round", draw))
        for name in _curved(found):
            title = f"{phase}: {name_of(name)}"
            draw = partial(draw_curve, rounds=found, names=[name])
            part.pictures.append(picture(f"{name}{at}", title, f"{title} by round", draw))
    return part


def _curved(rounds: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[str]:
    counts: dict[str, int] = {}
    for by_split in rounds.values():
        for name in {n for named in by_split.values() for n in named if n in FIRST.values()}:
            counts[name] = counts.get(name, 0) + 1
    return [name for name, count in counts.items() if count > 1]


# By ``rows.split`` of the recipe.
_DIVIDED = {
    "random": "at random, by the seed",
    "stratified": "at random, with the same share of each class in every split",
    "grouped": "at random, each group in one split",
    "column": "as a column of the active party says",
}


def _is_split(name: str) -> bool:
    """Whether predictions are of a whole split, with all parties that hold its rows."""
    return not any(word in name for word in (" without ", " with "))


def _rows(facts: Facts) -> Part:
    part = Part("rows", "Who took part, with which rows")
    summary, recipe = facts.run.summary, facts.recipe
    part.tables.append(tables.parties(summary))
    part.tables += tables.arithmetic({each.name: each.arithmetic for each in summary.parties})
    kept = {n: k for n, k in facts.kept.items() if _is_split(n)}
    if recipe is not None:
        rows = recipe.rows
        shares = {"validation": rows.validation, "test": rows.share_for_tests}
        shares = {"train": 1 - sum(shares.values()), **shares}
        part.text.append(f"Rows are divided {_DIVIDED[rows.split]}.")
        cells = [
            [
                name,
                tables.share(share) if rows.split != "column" else "by a column",
                f"{len(kept[name]):,}" if name in kept else "–",
            ]
            for name, share in shares.items()
        ]
        part.tables.append(
            Table("Rows by split", ["rows", "share", "with kept predictions"], cells)
        )
    named = {name: facts.columns(name) for name in (facts.active, *facts.passives)}
    lines = [
        [name, f"{len(columns)}", ", ".join(columns)] for name, columns in named.items() if columns
    ]
    if lines:
        part.tables.append(
            Table(
                "Columns of each party whose folder is here",
                ["party", "columns", "names"],
                lines,
                frozenset({0, 2}),
            )
        )
    return part


def _left(facts: Facts) -> Part:
    part = Part("left", "What left each party")
    summary = facts.run.summary
    if summary.privacy is not None:
        part.text.append(f"Differential privacy: {summary.privacy.statement}")
    part.text += about_exchanges(summary)
    found = tables.left(summary)
    part.tables += found[:_MOST_PARTIES]
    if len(found) > _MOST_PARTIES:
        part.text.append(
            f"Of {len(found):,} parties the first {_MOST_PARTIES} are shown; summary.json has all."
        )
    if part.tables:
        part.text.append(
            "These exchanges were declared before the run and counted during it. Tables never "
            "leave a party; what is computed from them does. A passive party's own defences stand "
            "in its own page."
        )
        _leaks(part, facts)
    return part


def _leaks(part: Part, facts: Facts) -> None:
    """Shows what a rehearsal has measured, if its result lies beside the run."""
    lines = _leak_lines(facts.leaks)
    if lines:
        note = str(facts.leaks.get("rehearsal", "A rehearsal of the recipe, not this run itself."))
        heads = ["attack", "by", "reads", "from", "unit", "leak, at least", "by chance"]
        part.tables.append(
            Table(
                "What a rehearsal could read (vfl leaks)",
                heads,
                lines[:_MOST_LEAKS],
                frozenset(range(5)),
                note,
            )
        )
    else:
        what = "Nobody has measured yet what can be read from these exchanges. To do it, run:"
        files = " ".join(shlex.quote(str(path)) for path in facts.party_files)
        command = f"vfl leaks {files or 'RECIPE'} --out {shlex.quote(str(facts.folder))}"
        part.commands.append((what, command))


def _leak_lines(found: Mapping[str, Any]) -> list[list[str]]:
    try:
        return [
            [
                str(line["attack"]),
                str(line["attacker"]),
                str(line["of"]),
                str(line["place"]),
                str(line["unit"]),
                f"{float(line['value']['mean']):.3f}",
                f"{float(line['chance']['mean']):.3f}" if line.get("chance") else "–",
            ]
            for recipe in found.get("recipes", [])
            for line in recipe["lines"]
            if not line.get("detail")
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _cost(facts: Facts) -> Part:
    part = Part("cost", "What it cost")
    summary = facts.run.summary
    if summary.bytes.by_link:
        part.tables.append(tables.by_phase(summary, facts.run.phases))
    if any(party.times for party in summary.parties):
        part.tables.append(tables.seconds(summary))
    total = summary.bytes.total
    if facts.passives:
        part.text.append(
            f"{size(total.message_bytes)} in {total.messages:,} messages crossed between the "
            f"processes, {size(total.payload_bytes)} of it tensors."
        )
    return part


def _again(facts: Facts) -> Part:
    part = Part("again", "How to run it again")
    summary = facts.run.summary
    versions = sorted({each.version for each in summary.parties if each.version})
    rows = [
        ["run", summary.run_id],
        ["recipe", summary.name],
        ["digest of the recipe", summary.recipe_digest],
        ["seed", f"{summary.seed}"],
        ["method", summary.method],
        *([["preset", summary.preset]] if summary.preset else []),
        ["version of vfl", listed(versions) or "unknown"],
        ["interruptions", f"{summary.interruptions}"],
    ]
    part.tables.append(Table("Facts of this run", ["what", "is"], rows, frozenset({0, 1})))
    if facts.party_files:
        files = " ".join(shlex.quote(str(path)) for path in facts.party_files)
        part.commands.append(("With the tables on this machine:", f"vfl simulate {files}"))
    else:
        part.commands.append(
            (
                "At the server, then at each party, with the files that they already have:",
                "vfl-server serve RECIPE --fresh; vfl-party run PARTY-FILE --fresh",
            )
        )
    return part
