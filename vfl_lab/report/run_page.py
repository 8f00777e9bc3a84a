"""The page of one finished run, for the party that has its summary."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vfl.summary.picture import curves_by_phase, draw_curve, draw_own_curves, has_curve
from vfl.summary.reading import find_begin_time
from vfl.summary.table import (
    describe_exchanges,
    format_size,
    list_splits,
    uses_same_rows,
    yield_protection_notes,
)
from vfl_common.config.task import ThresholdRule
from vfl_common.text import format_percent, list_names
from vfl_lab.report import render
from vfl_lab.report.draw import draw_picture, draw_quality
from vfl_lab.report.facts import Baseline, Facts, get_training_command
from vfl_lab.report.quality import (
    Estimate,
    SplitPredictions,
    count_decisions,
    divide_into_tenths,
    estimate_metrics,
)
from vfl_lab.report.render import (
    PageSection,
    PageTable,
    ReportPage,
    Tile,
    format_metric,
    get_metric_name,
)
from vfl_lab.report.worth import BaselineComparison, compare_with_baselines, make_worth_section
from vfl_party.base.statistics import MAIN_METRICS
from vfl_party.models.metrics import choose_threshold_of_scores

# Baselines that have a tile at the top.
_TILES = ("alone", "combined")
# Maximum number of parties whose exchanges have a table.
_MAX_PARTIES = 24
# Maximum number of lines in the table of leaks.
_MAX_LEAKS = 40


def make_run_page(
    facts: Facts, baselines: Mapping[str, Baseline], rule: ThresholdRule | float | None
) -> ReportPage:
    """Returns the page of a run.

    ``rule``: another threshold, or a rule that chooses one by the validation rows. Raises
    InputError if the stored predictions are damaged.
    """
    summary = facts.run.summary
    by_split = {
        name: estimate_metrics(predictions)
        for name, predictions in facts.predictions.items()
        if _is_split(name)
    }
    own = by_split.get(facts.judged, {})
    pairs = compare_with_baselines(facts, baselines, own)
    began = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(find_begin_time(facts.folder)[0]))
    page = ReportPage(
        f"{summary.name}: quality and cost of the model",
        f"Run {summary.run_id}, {began}; {summary.method}, seed {summary.seed}.",
        lead=_write_lead(facts, own, pairs),
        tiles=_make_tiles(facts, own, pairs),
        warnings=_list_warnings(facts),
        made=f"Made by vfl report from {summary.run_id}. It shows scores of people: share it only "
        "with those who may see them.",
    )
    page.parts = [
        make_worth_section(facts, pairs, baselines),
        _make_quality_section(facts, by_split, rule),
        _make_learning_section(facts),
        _make_rows_section(facts),
        _make_exchanges_section(facts),
        _make_cost_section(facts),
        _make_repeat_section(facts),
    ]
    return page


def _write_lead(
    facts: Facts, own: Mapping[str, Estimate], pairs: Sequence[BaselineComparison]
) -> list[str]:
    summary = facts.run.summary
    sentences = [_describe_run(facts)]
    if facts.passives:
        who = [
            f"{name} ({len(columns)} columns)" if (columns := facts.columns(name)) else name
            for name in facts.passives
        ]
        mine = facts.columns(facts.active)
        has = f"the labels and {len(mine)} columns" if mine else "the labels"
        rows = "those of these rows that they have" if facts.partial else "the same rows"
        sentences.append(f"{facts.active} has {has}; {list_names(who)} added columns for {rows}.")
    else:
        sentences.append(f"{facts.active} trained alone.")
    predictions = facts.predictions.get(facts.judged)
    metric = MAIN_METRICS[predictions.kind] if predictions is not None else ""
    if predictions is not None and metric in own:
        one = own[metric]
        interval = (
            f" (95 % interval {render.format_interval(one)})" if render.format_interval(one) else ""
        )
        sentences.append(
            f"On {len(predictions):,} {facts.judged} rows, {get_metric_name(metric)} is "
            f"{format_metric(one.value)}"
            f"{interval}: {render.NAMES[metric][1]}."
        )
    elif summary.metrics:
        split = list_splits(summary)[-1]
        values = ", ".join(
            f"{get_metric_name(n)} {format_metric(v)}" for n, v in summary.metrics[split].items()
        )
        sentences.append(
            f"On the {split} rows: {values}. No predictions were stored, so there are no curves."
        )
    return sentences + _compare_in_words(facts, metric, pairs)


def _compare_in_words(facts: Facts, metric: str, pairs: Sequence[BaselineComparison]) -> list[str]:
    if not facts.passives or not facts.predictions:
        return []
    by_kind = {pair.kind: pair for pair in pairs}
    alone = by_kind.get("alone") or by_kind.get("gbdt-alone")
    sentences = []
    if alone is not None:
        sentences.append(alone.says(metric))
    elif facts.recipe is not None and not facts.recipe.active.features:
        sentences.append(f"{facts.active} has no columns, so it cannot predict anything alone.")
    elif get_training_command(facts):
        sentences.append(
            f"No local-only baseline of {facts.active} was trained on these rows yet, so this page "
            "cannot say what the others contribute; the next section shows how to train it."
        )
    pooled = by_kind.get("combined") or by_kind.get("gbdt")
    if pooled is not None:
        sentences.append(pooled.says(metric))
    return sentences


def _describe_run(facts: Facts) -> str:
    label = facts.label or "the label"
    predictions = facts.predictions.get(facts.judged)
    kind = (
        predictions.kind
        if predictions is not None
        else facts.recipe.task.kind
        if facts.recipe
        else ""
    )
    if predictions is not None and kind == "binary":
        return f"The model gives each row the probability that {label} is {predictions.classes[1]}."
    return {
        "binary": f"The model gives each row the probability of one of two values of {label}.",
        "multiclass": f"The model decides to which class of {label} each row belongs.",
        "multilabel": "The model gives each row the probability of each of several labels.",
        "regression": f"The model predicts {label}, a number, for each row.",
        "survival": f"The model ranks rows by the predicted time of {label}.",
        "ranking": f"The model orders the rows of each query by {label}.",
    }.get(kind, "Several parties trained the model.")


def _make_tiles(
    facts: Facts, own: Mapping[str, Estimate], pairs: Sequence[BaselineComparison]
) -> list[Tile]:
    summary, tiles = facts.run.summary, []
    predictions = facts.predictions.get(facts.judged)
    if predictions is not None and MAIN_METRICS[predictions.kind] in own:
        metric = MAIN_METRICS[predictions.kind]
        one = own[metric]
        interval = render.format_interval(one)
        note = f"{interval} (95 %)" if interval else ""
        tiles.append(
            Tile(f"{get_metric_name(metric)}, {facts.judged} rows", format_metric(one.value), note)
        )
        tones = {"better": "good", "worse": "bad"}
        for pair in (pair for pair in pairs if pair.kind in _TILES and not pair.few):
            gain = pair.gain[metric]
            outcome = gain.better(metric)
            verdict = outcome if outcome.startswith("no ") else f"together is {outcome}"
            note = f"{format_metric(pair.theirs[metric].value)}; {verdict}"
            tone = tones.get(outcome, "")
            tiles.append(Tile(f"against {pair.title}", f"{gain.value:+.4f}", note, tone))
    used = {party.name: party.common_rows for party in summary.parties if party.rows}
    if any(used.values()):
        held = {party.name: party.rows for party in summary.parties if party.rows}
        note = ", ".join(
            f"{format_percent(used[name], rows)} of {name}'s" for name, rows in held.items()
        )
        what = "Common rows" if uses_same_rows(used) else "Rows used"
        tiles.append(Tile(what, f"{max(used.values()):,}", note))
    if facts.passives:
        total = summary.bytes.total
        tiles.append(
            Tile("Total sent", format_size(total.message_bytes), f"{total.messages:,} messages")
        )
    tiles.append(
        Tile("Time to train", _format_duration(summary.wall_s), f"{summary.steps:,} steps")
    )
    return tiles


def _format_duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _list_warnings(facts: Facts) -> list[str]:
    summary = facts.run.summary
    warnings = list(yield_protection_notes(summary))
    predictions = facts.predictions.get(facts.judged)
    if predictions is not None and (few := predictions.describe_few_rows()):
        warnings.append(f"{facts.judged} rows: {few}")
    if summary.without:
        warnings.append(f"Trained without {list_names(summary.without)}, which joined too late.")
    if not summary.bytes.agrees:
        warnings.append("The two ends of a link counted different numbers of bytes.")
    return warnings


def _make_quality_section(
    facts: Facts, by_split: Mapping[str, Mapping[str, Estimate]], rule: ThresholdRule | float | None
) -> PageSection:
    part = PageSection("quality", "How good is the model?")
    summary = facts.run.summary
    if not by_split:
        if summary.metrics:
            part.tables.append(render.make_run_metrics_table(summary, list_splits(summary)))
        return part
    predictions = facts.predictions[facts.judged]
    part.text.append(f"The pictures show the {len(predictions):,} {facts.judged} rows.")
    threshold = summary.metrics.get(facts.judged, {}).get("threshold")
    part.pictures += draw_quality(predictions, threshold)
    part.tables.append(render.make_quality_table(by_split, facts.predictions))
    if predictions.kind == "binary" and 0 < predictions.truth_N.sum() < len(predictions):
        part.tables.append(_make_threshold_table(facts, predictions, threshold, rule))
        groups = divide_into_tenths(predictions.is_positive_N, predictions.scores_N)
        part.tables.append(render.make_lift_table(groups, predictions.classes[1]))
    elif predictions.kind == "multiclass":
        part.tables += render.make_class_tables(predictions)
    elif predictions.kind == "multilabel":
        part.tables.append(_make_label_table(predictions))
    return part


def _make_threshold_table(
    facts: Facts,
    predictions: SplitPredictions,
    threshold: float | None,
    rule: ThresholdRule | float | None,
) -> PageTable:
    """Returns the decisions of the run's own threshold and of others."""
    lines = [("of the run", count_decisions(predictions, threshold))]
    by = facts.predictions.get("validation")
    if isinstance(rule, float):
        lines.insert(0, ("of --threshold", count_decisions(predictions, rule)))
    if by is not None and by is not predictions:
        rules = [ThresholdRule(rule="f1"), *([rule] if isinstance(rule, ThresholdRule) else [])]
        for other in rules:
            at = choose_threshold_of_scores(other, by.scores_N, by.truth_N)
            lines.append((_describe_rule(other), count_decisions(predictions, at)))
    table = render.make_threshold_table(lines, predictions.classes)
    note = (
        "Rules choose by the validation rows. To set your own costs or rate, use vfl report RUN "
        "--threshold cost=1:5, or rate=0.1."
    )
    return PageTable(table.caption, table.heads, table.rows, note=note)


def _describe_rule(rule: ThresholdRule) -> str:
    if rule.rule == "rate":
        return f"chooses a share of {rule.rate:g}"
    if rule.rule == "cost":
        return f"lowest cost ({rule.false_positive:g} : {rule.false_negative:g})"
    return "highest F1"


def _make_label_table(predictions: SplitPredictions) -> PageTable:
    rows = []
    for at, name in enumerate(predictions.classes):
        own = SplitPredictions(
            predictions.split,
            "binary",
            predictions.keys,
            (f"not {name}", name),
            predictions.truth_N[:, at],
            predictions.scores_NO[:, at : at + 1],
            (predictions.scores_NO[:, at] > 0.5).astype(int),
        )
        estimates = estimate_metrics(own, 200)
        rows.append(
            [
                name,
                f"{int(own.truth_N.sum()):,}",
                *(
                    format_metric(estimates[m].value) if m in estimates else "–"
                    for m in ("auc", "accuracy", "precision", "recall", "f1", "brier")
                ),
            ]
        )
    heads = ["label", "rows with it", "AUC", "accuracy", "precision", "recall", "F1", "Brier score"]
    return PageTable("Each label", heads, rows)


def _make_learning_section(facts: Facts) -> PageSection:
    part = PageSection("learning", "How it learned")
    rounds, own = curves_by_phase(facts.run)
    for at, (phase, lines) in enumerate(rounds.items()):
        title = f"{phase}: loss"
        if phase in own:
            draw = partial(draw_own_curves, parties=own[phase])
            part.pictures.append(draw_picture(f"own{at}", title, f"{title} of each party", draw))
        elif has_curve(lines):
            draw = partial(draw_curve, rounds=lines, names=["loss"])
            part.pictures.append(draw_picture(f"loss{at}", title, f"{title} by round", draw))
        for name in _find_metrics_with_curve(lines):
            title = f"{phase}: {get_metric_name(name)}"
            draw = partial(draw_curve, rounds=lines, names=[name])
            part.pictures.append(draw_picture(f"{name}{at}", title, f"{title} by round", draw))
    return part


def _find_metrics_with_curve(rounds: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[str]:
    counts: dict[str, int] = {}
    for by_split in rounds.values():
        for name in {n for named in by_split.values() for n in named if n in MAIN_METRICS.values()}:
            counts[name] = counts.get(name, 0) + 1
    return [name for name, count in counts.items() if count > 1]


# How rows are split, by ``rows.split`` of the recipe.
_DIVIDED = {
    "random": "at random, by the seed",
    "stratified": "at random, with the same share of each class in every split",
    "grouped": "at random, each group in one split",
    "column": "by a column of the active party",
}


def _is_split(name: str) -> bool:
    """Whether predictions are for a whole split, with all parties that have its rows."""
    return not any(word in name for word in (" without ", " with "))


def _make_rows_section(facts: Facts) -> PageSection:
    part = PageSection("rows", "Who took part, with which rows")
    summary, recipe = facts.run.summary, facts.recipe
    part.tables.append(render.make_parties_table(summary))
    part.tables += render.make_arithmetic_tables(
        {party.name: party.arithmetic for party in summary.parties}
    )
    predictions = {n: k for n, k in facts.predictions.items() if _is_split(n)}
    if recipe is not None:
        rows = recipe.rows
        shares = {"validation": rows.validation, "test": rows.share_for_tests}
        shares = {"train": 1 - sum(shares.values()), **shares}
        part.text.append(f"Rows are split {_DIVIDED[rows.split]}.")
        cells = [
            [
                name,
                render.format_share(share) if rows.split != "column" else "by a column",
                f"{len(predictions[name]):,}" if name in predictions else "–",
            ]
            for name, share in shares.items()
        ]
        part.tables.append(
            PageTable("Rows by split", ["rows", "share", "with stored predictions"], cells)
        )
    named = {name: facts.columns(name) for name in (facts.active, *facts.passives)}
    lines = [
        [name, f"{len(columns)}", ", ".join(columns)] for name, columns in named.items() if columns
    ]
    if lines:
        part.tables.append(
            PageTable(
                "Columns of each party whose folder is here",
                ["party", "columns", "names"],
                lines,
                frozenset({0, 2}),
            )
        )
    return part


def _make_exchanges_section(facts: Facts) -> PageSection:
    part = PageSection("left", "What left each party")
    summary = facts.run.summary
    if summary.privacy is not None:
        part.text.append(f"Differential privacy: {summary.privacy.statement}")
    part.text += describe_exchanges(summary)
    exchange_tables = render.make_exchange_tables(summary)
    part.tables += exchange_tables[:_MAX_PARTIES]
    if len(exchange_tables) > _MAX_PARTIES:
        part.text.append(
            f"The first {_MAX_PARTIES} of {len(exchange_tables):,} parties are shown; summary.json "
            "has all."
        )
    if part.tables:
        part.text.append(
            "These exchanges were declared before the run and counted during it. Tables never "
            "leave a party; values computed from them do. A passive party's own defences are on "
            "its own page."
        )
        _add_leaks(part, facts)
    return part


def _add_leaks(part: PageSection, facts: Facts) -> None:
    """Shows the result of a rehearsal of attacks, if it is in the folder of the run."""
    lines = _list_leaks(facts.leaks)
    if lines:
        note = str(facts.leaks.get("rehearsal", "A rehearsal of the recipe, not this run."))
        heads = ["attack", "by", "reads", "from", "unit", "leak (lower bound)", "by chance"]
        part.tables.append(
            PageTable(
                "What a rehearsal could read (vfl leaks)",
                heads,
                lines[:_MAX_LEAKS],
                frozenset(range(5)),
                note,
            )
        )
    else:
        what = "What attacks can read from these exchanges was not measured yet. To do so, run:"
        files = " ".join(shlex.quote(str(path)) for path in facts.party_files)
        command = f"vfl leaks {files or 'RECIPE'} --out {shlex.quote(str(facts.folder))}"
        part.commands.append((what, command))


def _list_leaks(report: Mapping[str, Any]) -> list[list[str]]:
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
            for recipe in report.get("recipes", [])
            for line in recipe["lines"]
            if not line.get("detail")
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _make_cost_section(facts: Facts) -> PageSection:
    part = PageSection("cost", "What it cost")
    summary = facts.run.summary
    if summary.bytes.by_link:
        part.tables.append(render.make_bytes_table(summary, facts.run.phases))
    if any(party.times for party in summary.parties):
        part.tables.append(render.make_seconds_table(summary))
    total = summary.bytes.total
    if facts.passives:
        part.text.append(
            f"The processes sent {format_size(total.message_bytes)} in {total.messages:,} "
            f"messages, of which {format_size(total.payload_bytes)} were tensors."
        )
    return part


def _make_repeat_section(facts: Facts) -> PageSection:
    part = PageSection("again", "How to run it again")
    summary = facts.run.summary
    versions = sorted({party.version for party in summary.parties if party.version})
    rows = [
        ["run", summary.run_id],
        ["recipe", summary.name],
        ["digest of the recipe", summary.recipe_digest],
        ["seed", f"{summary.seed}"],
        ["method", summary.method],
        *([["preset", summary.preset]] if summary.preset else []),
        ["version of vfl", list_names(versions) or "unknown"],
        ["interruptions", f"{summary.interruptions}"],
    ]
    part.tables.append(PageTable("Facts of this run", ["what", "is"], rows, frozenset({0, 1})))
    if facts.party_files:
        files = " ".join(shlex.quote(str(path)) for path in facts.party_files)
        part.commands.append(("With the tables on this machine:", f"vfl simulate {files}"))
    else:
        part.commands.append(
            (
                "At the server, then at each party, with their present files:",
                "vfl-server run RECIPE --fresh; vfl-party run PARTY-FILE --fresh",
            )
        )
    return part
