"""The section about the benefit of the federation: baselines, and the contribution of each
party.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vfl_common.config.task import LOWER_IS_BETTER
from vfl_common.summary import Worth
from vfl_lab.report.draw import BLUE, GREEN, GREY, ORANGE, draw_bars, draw_intervals
from vfl_lab.report.facts import (
    ALONE,
    KINDS,
    Baseline,
    Facts,
    get_training_command,
    list_possible_baselines,
    read_json,
)
from vfl_lab.report.quality import Estimate, SplitPredictions, estimate_gain, estimate_metrics
from vfl_lab.report.render import (
    PageSection,
    PageTable,
    format_interval,
    format_metric,
    get_metric_name,
)
from vfl_party.base.statistics import MAIN_METRICS

# Maximum number of columns in a picture of importance.
_MAX_COLUMNS = 20
# Maximum number of rows in a table of subsets of parties.
_MAX_SUBSETS = 64
# Minimum number of common test rows for a comparison, unless all test rows are common.
_FEW_ROWS = 30


@dataclass(frozen=True)
class BaselineComparison:
    """A run and a baseline on their common test rows.

    ``rows``: their number, of the ``of`` test rows of the run. ``mine``, ``theirs``: the metrics of
    the run and of the baseline; ``gain``: mine minus theirs. ``few_of_class``: sentences about too
    few rows of the smaller class.
    """

    kind: str
    title: str
    run_id: str
    rows: int
    of: int
    mine: Mapping[str, Estimate]
    theirs: Mapping[str, Estimate]
    gain: Mapping[str, Estimate]
    few_of_class: str = ""

    @property
    def few(self) -> bool:
        """Whether there are too few common test rows, because the baseline has split them
        otherwise.
        """
        return self.rows < min(_FEW_ROWS, self.of)

    def says(self, metric: str) -> str:
        """Returns one sentence about the deciding metric."""
        if self.few:
            return (
                f"The run cannot be compared with {self.title}: only {self.rows:,} of {self.of:,} "
                "test rows are common."
            )
        mine, theirs, gain = self.mine[metric], self.theirs[metric], self.gain[metric]
        outcome = gain.better(metric)
        interval = format_interval(gain, "+")
        numbers = (
            f"{get_metric_name(metric)} {format_metric(mine.value)} against "
            f"{format_metric(theirs.value)}, a difference of "
            f"{gain.value:+.4f} ({f'95 % interval {interval}' if interval else 'no interval'})"
        )
        claim = {
            "no difference shown": f"No significant difference between together and {self.title}",
            "no verdict": f"No verdict on together and {self.title}",
        }.get(outcome, f"Together is {outcome} than {self.title}")
        if self.rows == self.of:
            rows = f"the same {self.rows:,} rows"
        else:
            rows = f"the same rows, {self.rows:,} of {self.of:,} test rows"
        return " ".join(filter(None, (f"{claim} on {rows}: {numbers}.", self.few_of_class)))


def compare_with_baselines(
    facts: Facts, baselines: Mapping[str, Baseline], own: Mapping[str, Estimate]
) -> list[BaselineComparison]:
    """Compares a run with its baselines on the rows that it is judged by.

    ``own``: the metrics of the run on these rows.
    """
    predictions = facts.predictions.get(facts.judged)
    if predictions is None:
        return []
    pairs = []
    for kind, baseline in baselines.items():
        other = baseline.predictions.get(facts.judged)
        both = None if other is None else predictions.pair_with(other)
        if both is None:
            continue
        mine = own if len(both[0]) == len(predictions) else estimate_metrics(both[0])
        theirs, gain = estimate_gain(*both)
        if MAIN_METRICS[predictions.kind] in gain:
            title = KINDS[kind].format(active=facts.active)
            run_id = baseline.folder.name
            pairs.append(
                BaselineComparison(
                    kind,
                    title,
                    run_id,
                    len(both[0]),
                    len(predictions),
                    mine,
                    theirs,
                    gain,
                    both[0].describe_few_rows(),
                )
            )
    return pairs


def make_worth_section(
    facts: Facts, pairs: Sequence[BaselineComparison], baselines: Mapping[str, Baseline]
) -> PageSection:
    """Returns the section about baselines and the contribution of each party."""
    part = PageSection("worth", "Benefit of the federation")
    predictions = facts.predictions.get(facts.judged)
    if predictions is not None:
        metric = MAIN_METRICS[predictions.kind]
        part.text += [pair.says(metric) for pair in pairs if pair.few]
        if enough := [pair for pair in pairs if not pair.few]:
            _add_baselines(part, enough, metric)
        if facts.partial and pairs:
            part.text.append("Baselines use the rows that all parties have, with their own splits.")
    missing = [kind for kind in list_possible_baselines(facts) if kind not in baselines]
    if missing and predictions is not None:
        _add_missing_baselines(part, facts, missing)
    _add_absences(part, facts, baselines)
    _add_holders(part, facts)
    _add_contributions(part, facts)
    return part


def _add_baselines(part: PageSection, pairs: Sequence[BaselineComparison], metric: str) -> None:
    name = get_metric_name(metric)
    first = pairs[0]
    lines = [("together", *_get_bounds(first.mine[metric]), BLUE)]
    lines += [(pair.title, *_get_bounds(pair.theirs[metric]), GREY) for pair in pairs]
    note = f"{name} with 95 % intervals"
    part.pictures.append(draw_intervals("base", note, note, lines, name))
    colors = {"better": GREEN, "worse": ORANGE, "no difference shown": GREY}
    gains = [
        (
            pair.title,
            *_get_bounds(pair.gain[metric]),
            colors.get(pair.gain[metric].better(metric), GREY),
        )
        for pair in pairs
    ]
    less = " (negative is better)" if metric in LOWER_IS_BETTER else ""
    what = f"Together minus each: difference of {name}"
    part.pictures.append(draw_intervals("gain-of", what, what, gains, f"{name}{less}", zero=True))
    part.tables.append(_make_table(pairs))


def _make_table(pairs: Sequence[BaselineComparison]) -> PageTable:
    """Returns a row for each metric, and a column for each baseline."""
    first = pairs[0]
    rows = []
    for metric in dict.fromkeys(m for pair in pairs for m in pair.gain if m != "bias"):
        cells = [
            f"{pair.gain[metric].value:+.4f} ({format_interval(pair.gain[metric], '+') or '–'})"
            if metric in pair.gain
            else ""
            for pair in pairs
        ]
        own = first.mine.get(metric)
        rows.append(
            [get_metric_name(metric), format_metric(own.value) if own is not None else "", *cells]
        )
    runs = "; ".join(f"{pair.title}: {pair.rows:,} rows, {pair.run_id}" for pair in pairs)
    partly = (
        f" The run has {first.of:,} test rows, of which a baseline has only some."
        if any(pair.rows < pair.of for pair in pairs)
        else ""
    )
    note = f"Paired 95 % intervals: both models on the same rows. {runs}.{partly}"
    heads = ["metric", "together", *(f"minus {pair.title}" for pair in pairs)]
    return PageTable("Together, and its difference from each baseline", heads, rows, note=note)


def _get_bounds(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _add_missing_baselines(part: PageSection, facts: Facts, missing: Sequence[str]) -> None:
    command = get_training_command(facts)
    names = "; ".join(KINDS[kind].format(active=facts.active) for kind in missing)
    if not command:
        return
    if facts.party_files:
        part.commands.append((f"Not yet trained on these rows: {names}. To do so, run:", command))
    elif set(ALONE) <= {*missing}:
        what = (
            f"{facts.active} has not trained a local-only baseline yet. To do so, run this with "
            "its party file, and with --out if the runs are elsewhere:"
        )
        part.commands.append((what, command))


def _add_absences(part: PageSection, facts: Facts, baselines: Mapping[str, Baseline]) -> None:
    """Shows the quality of the model without a party, if the run has measured it, and whether the
    active party's own model is better.
    """
    whole = facts.predictions.get(facts.judged)
    rows: list[list[str]] = []
    better: list[str] = []
    for split, predictions in facts.predictions.items():
        if whole is None or not split.startswith(f"{facts.judged} without "):
            continue
        metric = MAIN_METRICS[predictions.kind]
        both = whole.pair_with(predictions)
        if both is None:
            continue
        own, gains = estimate_gain(*both)
        if metric in gains:
            cells = [format_metric(own[metric].value), f"{gains[metric].value:+.4f}"]
            rows.append([split, *cells, format_interval(gains[metric], "+")])
            better += _yield_better_alone(facts, predictions, baselines)
    if rows and whole is not None:
        part.text += better
        name = get_metric_name(MAIN_METRICS[whole.kind])
        heads = ["rows", name, "with all minus this", "95 % interval"]
        note = "The same model, scoring with --without."
        part.tables.append(PageTable("Quality without a party", heads, rows, note=note))


def _yield_better_alone(
    facts: Facts, predictions: SplitPredictions, baselines: Mapping[str, Baseline]
) -> Iterator[str]:
    """Yields a sentence for each model of the active party alone that is better than the trained
    one on the rows of ``predictions``, which it has scored without a party.
    """
    metric = MAIN_METRICS[predictions.kind]
    for kind in ALONE:
        other = baselines[kind].predictions.get(facts.judged) if kind in baselines else None
        both = None if other is None else other.pair_with(predictions)
        if both is None or len(both[0]) < min(_FEW_ROWS, len(predictions)):
            continue
        theirs, gain = estimate_gain(*both)
        if metric in gain and gain[metric].better(metric) == "better":
            title = KINDS[kind].format(active=facts.active)
            own = estimate_metrics(both[0])[metric]
            yield (
                f"{title} is better than the federation on {predictions.split} rows: "
                f"{get_metric_name(metric)} {format_metric(own.value)} against "
                f"{format_metric(theirs[metric].value)} "
                f"on the same {len(both[0]):,} rows, a difference of {gain[metric].value:+.4f} "
                f"(95 % interval {format_interval(gain[metric], '+')}). Score such rows with that "
                "model, or train a student for them."
            )


def _add_holders(part: PageSection, facts: Facts) -> None:
    """Shows the quality of the model on the rows of each set of parties."""
    rows, name = [], ""
    for split, predictions in facts.predictions.items():
        if not split.startswith(f"{facts.judged} with "):
            continue
        metric = MAIN_METRICS[predictions.kind]
        name, estimate = get_metric_name(metric), estimate_metrics(predictions).get(metric)
        cells = (
            ["–", ""]
            if estimate is None
            else [format_metric(estimate.value), format_interval(estimate)]
        )
        rows.append([split, f"{len(predictions):,}", *cells])
    if rows:
        heads = ["rows", "number", name, "95 % interval"]
        note = "Each row counts in one line: that of exactly the parties that have it."
        part.tables.append(PageTable("Quality by parties that have a row", heads, rows, note=note))


def _add_contributions(part: PageSection, facts: Facts) -> None:
    """Shows Shapley values and subsets, and the importance of columns, if the run has them."""
    worth = facts.run.summary.worth
    if worth is not None:
        _add_shapley(part, worth)
        _add_subsets(part, worth)
    for party in (facts.active, *facts.passives):
        add_importance(part, party, read_json(facts.folder / party / "importance.json"))


def _add_shapley(part: PageSection, worth: Worth) -> None:
    metric = get_metric_name(worth.metric)
    lines = [(name, share.value, share.error) for name, share in worth.shapley.items()]
    if not lines:
        return
    what = f"Contribution of each party to {metric} (Shapley values)"
    values = ", ".join(f"{name} {added:+.4f}" for name, added, _ in lines)
    part.pictures.append(draw_bars("shapley", what, f"{what}: {values}", lines, metric))
    rows = [[name, f"{added:+.4f}", f"{error:.4f}"] for name, added, error in lines]
    note = f"On {worth.split} rows. They add up to the metric of all parties minus that of none."
    part.tables.append(PageTable(what, ["party", "adds", "error"], rows, note=note))


def _add_subsets(part: PageSection, worth: Worth) -> None:
    subsets = worth.subsets[:_MAX_SUBSETS]
    rows = [
        [
            ", ".join(subset.parties) or "none",
            _format_or_empty(subset.validation),
            _format_or_empty(subset.test),
        ]
        for subset in subsets
    ]
    if rows:
        what = f"{get_metric_name(worth.metric)} of each subset of parties"
        part.tables.append(PageTable(what, ["parties", "validation", "test"], rows))


def _format_or_empty(number: float | None) -> str:
    return "" if number is None else format_metric(number)


def add_importance(part: PageSection, party: str, content: Mapping[str, Any]) -> None:
    """Adds the importance of a party's columns to ``part``, if the party has measured it."""
    if not content:
        return
    try:
        metric = get_metric_name(str(content["metric"]))
        lines = [
            (str(column["name"]), float(column["value"]), float(column.get("error") or 0.0))
            for column in content["columns"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        part.warnings.append(f"importance.json of {party} cannot be read.")
        return
    lines.sort(key=lambda line: -line[1])
    if not lines:
        return
    what = f"Columns of {party}: decrease of {metric} without each"
    best = ", ".join(f"{name} {fall:.4f}" for name, fall, _ in lines[:3])
    key = f"imp{sum(map(ord, party))}-{len(part.pictures)}"
    part.pictures.append(
        draw_bars(key, what, f"{what}; first: {best}", lines[:_MAX_COLUMNS], metric)
    )
    rows = [[name, f"{fall:.4f}", f"{error:.4f}"] for name, fall, error in lines]
    part.tables.append(PageTable(what, ["column", "decrease", "error"], rows))
