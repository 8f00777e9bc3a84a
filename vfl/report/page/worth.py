"""Was it worth asking the others? Baselines on the same rows, and what each party adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vfl.report.page.baselines import ALONE, KINDS, Baseline, how_to_get, possible
from vfl.report.page.draw import bars, intervals
from vfl.report.page.facts import Facts, read_json
from vfl.report.page.svg import BLUE, GREEN, GREY, ORANGE
from vfl.report.page.tables import Part, Table, between, name_of, value
from vfl.report.quality.kept import KeptRows
from vfl.report.quality.measures import FIRST, LOWER, Estimate, compared, measured
from vfl_common.summary import Worth

# Columns in a picture of importance.
_MOST_COLUMNS = 20
# Rows of a table of subsets of parties.
_MOST_SUBSETS = 64
# With fewer rows in common than these, and than each model has tested, nothing is compared.
_FEW_ROWS = 30


@dataclass(frozen=True)
class Beside:
    """A run and a baseline on the rows that both have tested. ``mine``, ``theirs``: the metrics of
    each; ``gain``: mine minus theirs.
    """

    kind: str
    title: str
    run_id: str
    rows: int
    of: int
    mine: Mapping[str, Estimate]
    theirs: Mapping[str, Estimate]
    gain: Mapping[str, Estimate]

    @property
    def few(self) -> bool:
        """Whether both have tested too few of the same rows: the baseline has divided others."""
        return self.rows < min(_FEW_ROWS, self.of)

    def says(self, metric: str) -> str:
        """One sentence about the metric that decides."""
        if self.few:
            on = f"only {self.rows:,} of the {self.of:,} rows were tested by both"
            return f"Beside {self.title} nothing can be said: {on}."
        mine, theirs, gain = self.mine[metric], self.theirs[metric], self.gain[metric]
        outcome = gain.better(metric)
        numbers = f"{name_of(metric)} {value(mine.value)} against {value(theirs.value)}"
        interval = f"a difference of {gain.value:+.4f} (95 % interval {between(gain, '+')})"
        on = f"on the same {self.rows:,} rows"
        if outcome == "no difference shown":
            return f"Beside {self.title}, no difference is shown {on}: {numbers}, {interval}."
        return f"Together is {outcome} than {self.title} {on}: {numbers}, {interval}."


def beside(
    facts: Facts, found: Mapping[str, Baseline], own: Mapping[str, Estimate]
) -> list[Beside]:
    """Compares a run with its baselines on the rows by which it is judged. ``own``: its metrics
    there.
    """
    kept = facts.kept.get(facts.judged)
    if kept is None:
        return []
    pairs = []
    for kind, baseline in found.items():
        other = baseline.kept.get(facts.judged)
        both = None if other is None else kept.beside(other)
        if both is None:
            continue
        mine = own if len(both[0]) == len(kept) else measured(both[0])
        theirs, gain = compared(*both)
        if FIRST[kept.kind] in gain:
            title = KINDS[kind].format(active=facts.active)
            run_id = baseline.folder.name
            pairs.append(Beside(kind, title, run_id, len(both[0]), len(kept), mine, theirs, gain))
    return pairs


def part_of(facts: Facts, pairs: Sequence[Beside], found: Mapping[str, Baseline]) -> Part:
    """Returns the section about baselines and about what each party adds."""
    part = Part("worth", "Was it worth asking the others?")
    kept = facts.kept.get(facts.judged)
    if kept is not None:
        metric = FIRST[kept.kind]
        part.text += [each.says(metric) for each in pairs if each.few]
        if enough := [each for each in pairs if not each.few]:
            _baselines(part, enough, metric)
        if facts.partial and pairs:
            part.text.append("Baselines have the rows that all parties hold, and divide them anew.")
    missing = [kind for kind in possible(facts) if kind not in found]
    if missing and kept is not None:
        _missing(part, facts, missing)
    _without(part, facts, found)
    _holders(part, facts)
    _each_party(part, facts)
    return part


def _baselines(part: Part, pairs: Sequence[Beside], metric: str) -> None:
    name = name_of(metric)
    first = pairs[0]
    lines = [("together", *_three(first.mine[metric]), BLUE)]
    lines += [(each.title, *_three(each.theirs[metric]), GREY) for each in pairs]
    note = f"{name} with 95 % intervals"
    part.pictures.append(intervals("base", note, note, lines, name))
    colors = {"better": GREEN, "worse": ORANGE, "no difference shown": GREY}
    gains = [
        (each.title, *_three(each.gain[metric]), colors[each.gain[metric].better(metric)])
        for each in pairs
    ]
    less = " (below 0 is better)" if metric in LOWER else ""
    what = f"Together minus each: difference of {name}"
    part.pictures.append(intervals("gain-of", what, what, gains, f"{name}{less}", zero=True))
    part.tables.append(_table(pairs))


def _table(pairs: Sequence[Beside]) -> Table:
    """Returns a row for each metric, and a column for each baseline."""
    first = pairs[0]
    rows = []
    for metric in dict.fromkeys(m for each in pairs for m in each.gain if m != "bias"):
        cells = [
            f"{each.gain[metric].value:+.4f} ({between(each.gain[metric], '+')})"
            if metric in each.gain
            else ""
            for each in pairs
        ]
        own = first.mine.get(metric)
        rows.append([name_of(metric), value(own.value) if own is not None else "", *cells])
    note = "Intervals of 95 %, paired: both models on the same rows. "
    note += "; ".join(f"{each.title}: {each.rows:,} rows, {each.run_id}" for each in pairs) + "."
    if any(each.rows < each.of for each in pairs):
        note += f" {first.of:,} rows were judged; a baseline has tested only some of them."
    heads = ["metric", "together", *(f"minus {each.title}" for each in pairs)]
    return Table("Together, and its difference from each baseline", heads, rows, note=note)


def _three(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _missing(part: Part, facts: Facts, missing: Sequence[str]) -> None:
    command = how_to_get(facts)
    names = "; ".join(KINDS[kind].format(active=facts.active) for kind in missing)
    if not command:
        return
    if facts.party_files:
        part.commands.append((f"Not yet trained on these rows: {names}. To do it, run:", command))
    else:
        what = (
            f"{facts.active} has not yet trained alone beside this run. To do it, run with its own "
            "party file, and with --out if the runs are elsewhere:"
        )
        part.commands.append((what, command))


def _without(part: Part, facts: Facts, baselines: Mapping[str, Baseline]) -> None:
    """Shows what the trained model is worth if a party is away, where the run has measured it, and
    whether the active party's own model would be better.
    """
    whole = facts.kept.get(facts.judged)
    rows: list[list[str]] = []
    better: list[str] = []
    for split, kept in facts.kept.items():
        if whole is None or not split.startswith(f"{facts.judged} without "):
            continue
        metric = FIRST[kept.kind]
        both = whole.beside(kept)
        if both is None:
            continue
        own, found = compared(*both)
        if metric in found:
            cells = [value(own[metric].value), f"{found[metric].value:+.4f}"]
            rows.append([split, *cells, between(found[metric], "+")])
            better += _better_alone(facts, kept, baselines)
    if rows and whole is not None:
        part.text += better
        name = name_of(FIRST[whole.kind])
        heads = ["rows", name, "with all minus this", "95 % interval"]
        note = "The same model, as it scores with --without."
        part.tables.append(Table("If a party is away", heads, rows, note=note))


def _better_alone(facts: Facts, kept: KeptRows, baselines: Mapping[str, Baseline]) -> Iterator[str]:
    """Yields a sentence for each model of the active party alone that is better than the trained
    one on the rows ``kept``, which it has scored without a party.
    """
    metric = FIRST[kept.kind]
    for kind in ALONE:
        other = baselines[kind].kept.get(facts.judged) if kind in baselines else None
        both = None if other is None else other.beside(kept)
        if both is None or len(both[0]) < min(_FEW_ROWS, len(kept)):
            continue
        theirs, gain = compared(*both)
        if metric in gain and gain[metric].better(metric) == "better":
            title = KINDS[kind].format(active=facts.active)
            own = measured(both[0])[metric]
            yield (
                f"{title} is better than the federation on {kept.split} rows: {name_of(metric)} "
                f"{value(own.value)} against {value(theirs[metric].value)} on the same "
                f"{len(both[0]):,} rows, a difference of {gain[metric].value:+.4f} (95 % interval "
                f"{between(gain[metric], '+')}). Score such rows with that model, or train a "
                "student for them."
            )


def _holders(part: Part, facts: Facts) -> None:
    """Shows how good the model is for the rows of each set of parties that hold them."""
    rows, name = [], ""
    for split, kept in facts.kept.items():
        if not split.startswith(f"{facts.judged} with "):
            continue
        metric = FIRST[kept.kind]
        name, found = name_of(metric), measured(kept).get(metric)
        cells = ["–", ""] if found is None else [value(found.value), between(found)]
        rows.append([split, f"{len(kept):,}", *cells])
    if rows:
        heads = ["rows", "how many", name, "95 % interval"]
        note = "Each row is in one line: that of exactly the parties that hold it."
        part.tables.append(Table("By who holds a row", heads, rows, note=note))


def _each_party(part: Part, facts: Facts) -> None:
    """Shows Shapley values and subsets, and the importance of columns, if the run has them."""
    worth = facts.run.summary.worth
    if worth is not None:
        _shapley(part, worth)
        _subsets(part, worth)
    for party in (facts.active, *facts.passives):
        importance(part, party, read_json(facts.folder / party / "importance.json"))


def _shapley(part: Part, worth: Worth) -> None:
    metric = name_of(worth.metric)
    lines = [(name, each.value, each.error) for name, each in worth.shapley.items()]
    if not lines:
        return
    what = f"What each party adds to {metric} (Shapley values)"
    said = ", ".join(f"{name} {added:+.4f}" for name, added, _ in lines)
    part.pictures.append(bars("shapley", what, f"{what}: {said}", lines, metric))
    rows = [[name, f"{added:+.4f}", f"{error:.4f}"] for name, added, error in lines]
    note = f"On {worth.split} rows. They add up to the metric of all parties minus that of none."
    part.tables.append(Table(what, ["party", "adds", "error"], rows, note=note))


def _subsets(part: Part, worth: Worth) -> None:
    found = worth.subsets[:_MOST_SUBSETS]
    rows = [
        [", ".join(each.parties) or "none", _or_nothing(each.validation), _or_nothing(each.test)]
        for each in found
    ]
    if rows:
        what = f"{name_of(worth.metric)} of each subset of parties"
        part.tables.append(Table(what, ["parties", "validation", "test"], rows))


def _or_nothing(number: float | None) -> str:
    return "" if number is None else value(number)


def importance(part: Part, party: str, found: Mapping[str, Any]) -> None:
    """Adds the importance of a party's columns, as it has measured it; nothing without it."""
    if not found:
        return
    try:
        metric = name_of(str(found["metric"]))
        lines = [
            (str(each["name"]), float(each["value"]), float(each.get("error") or 0.0))
            for each in found["columns"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        part.warnings.append(f"importance.json of {party} cannot be read.")
        return
    lines.sort(key=lambda each: -each[1])
    if not lines:
        return
    what = f"Columns of {party}: how much {metric} falls without each"
    best = ", ".join(f"{name} {fall:.4f}" for name, fall, _ in lines[:3])
    key = f"imp{sum(map(ord, party))}-{len(part.pictures)}"
    part.pictures.append(bars(key, what, f"{what}; first: {best}", lines[:_MOST_COLUMNS], metric))
    rows = [[name, f"{fall:.4f}", f"{error:.4f}"] for name, fall, error in lines]
    part.tables.append(Table(what, ["column", "falls by", "error"], rows))
