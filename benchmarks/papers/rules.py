"""The rules by which a claim of a paper is judged on our runs.

A claim about a difference holds if the difference is at least a floor and a paired t-test over the
seeds (or over the folds of one seed) finds it, two-sided, at the level ``ALPHA``. It is contradicted
if the test finds the opposite. A claim of equality holds if two one-sided tests put the difference
inside an equivalence bound. Everything else is undecided. The p-values of a table are corrected
together by Holm's method. A claim is not judged if a cell that it compares is missing, or if both
sides are at the level of an untrained network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from benchmarks.papers.describe import Place, Scale, Table, digits_of, has, resolved, run_at

# (line, column).
Cell = tuple[str, str]
Verdict = Literal["holds", "contradicted", "undecided", "not run"]
ALPHA = 0.05
# The smallest difference that counts, as a share of a metric's range: half a point of accuracy.
FLOOR = 0.005


@dataclass(frozen=True)
class Cells:
    """The values of a table's cells: {place: a value for each seed and fold}.

    ``runs``: how many values a whole cell has; None if that is not known.
    """

    table: Table
    values: Mapping[Place, tuple[float, ...]]
    scale: Scale = "small"
    runs: int | None = None

    def ours(self, data: str, line: str, column: str) -> tuple[float, ...]:
        """Returns the values of a cell; empty if some of its runs are missing."""
        values = self.values.get((data, line, column), ())
        return values if self.runs in (None, len(values)) else ()

    def shared(self, data: str, first: str, second: str) -> list[str]:
        """Returns the columns in which two lines have cells at this scale."""
        table = run_at(self.table, self.scale)
        own = next(each for each in self.table.data if each.name == data)
        lines = [each for each in table.lines if each.name in (first, second)]
        if len(lines) < 2:
            return []
        return [c.name for c in table.columns if all(has(line, own, c) for line in lines)]

    def at_scale(self, pairs: Sequence[tuple[Cell, Cell]]) -> list[tuple[Cell, Cell]]:
        """Returns the pairs of which the scale runs both lines and both columns."""
        table = run_at(self.table, self.scale)
        lines = {each.name for each in table.lines}
        columns = {each.name for each in table.columns}
        return [two for two in pairs if all(e[0] in lines and e[1] in columns for e in two)]

    def lower(self, data: str, column: str) -> bool:
        """Returns whether less is better in a cell."""
        own = next(each for each in self.table.columns if each.name == column).lower
        return next(e for e in self.table.data if e.name == data).lower if own is None else own

    def trained(self, data: str, line: str, column: str) -> bool:
        """Returns whether the mean of a cell is better than an untrained network's."""
        settings = next(each for each in self.table.data if each.name == data)
        level = resolved(settings.untrained, self.scale)
        column_ = next(each for each in self.table.columns if each.name == column)
        if level is None or column_.measures_other:
            return True
        mean = fmean(self.ours(data, line, column))
        return bool(mean < level if self.lower(data, column) else mean > level)

    def digits(self, data: str) -> int:
        """Returns how many digits behind the point a data set's numbers have."""
        return digits_of(self.table, next(e for e in self.table.data if e.name == data))

    def floor(self, data: str) -> float:
        """Returns the smallest difference that counts, in the table's unit."""
        settings = next(e for e in self.table.data if e.name == data)
        return FLOOR * (100.0 if self.table.percent and not settings.lower else 1.0)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.table.columns)


@dataclass(frozen=True)
class Outcome:
    """What a rule says of a data set before Holm's correction.

    Args:
        verdict: of the test, if ``p`` stays below ``ALPHA``.
        words: the difference and its spread.
        p: of the test; None for what is counted or computed, which needs no test.
    """

    verdict: Verdict
    words: str
    p: float | None = None


@dataclass(frozen=True)
class Finding:
    """The verdict on a data set, and the difference in words."""

    data: str
    verdict: Verdict
    found: str


Judge = Callable[[Cells, str], Outcome]
NOT_RUN = Outcome("not run", "")


@dataclass(frozen=True)
class Claim:
    """A statement, and the rule that judges it for one data set.

    Args:
        says: the statement.
        judge: the rule.
        on: the data sets of which the claim is made; empty for all.
        ours: whether the statement is the project's own and not the paper's.
    """

    says: str
    judge: Judge
    on: tuple[str, ...] = ()
    ours: bool = False


def judge_all(cells: Cells) -> list[tuple[Claim, list[Finding]]]:
    """Judges each claim of a table on each data set, with Holm's correction over all tests."""
    outcomes = [
        (claim, data.name, claim.judge(cells, data.name))
        for claim in cells.table.claims
        for data in cells.table.data
        if not claim.on or data.name in claim.on
    ]
    p_values = holm([each.p for _, _, each in outcomes if each.p is not None])
    corrected = iter(p_values)
    found: dict[int, list[Finding]] = {id(claim): [] for claim in cells.table.claims}
    for claim, data_name, outcome in outcomes:
        verdict, words = outcome.verdict, outcome.words
        if outcome.p is not None:
            p = next(corrected)
            verdict = verdict if p <= ALPHA else "undecided"
            words += f", p = {p:.2g}"
        found[id(claim)].append(Finding(data_name, verdict, words))
    return [(claim, found[id(claim)]) for claim in cells.table.claims]


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number by Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
    return corrected


def overall(findings: Sequence[Finding]) -> Verdict:
    """Returns one verdict: that of all data sets that were run, if they agree; else undecided."""
    seen = {each.verdict for each in findings} - {"not run"}
    if not seen:
        return "not run"
    return seen.pop() if len(seen) == 1 else "undecided"


# -- the vocabulary
# ----------------------------------------------------------------------


def better(
    first: str, second: str, columns: Sequence[str] = (), *, floor: float | None = None
) -> Judge:
    """One line is better than another, on the mean of the columns that the table has of both.

    Args:
        first, second: names of lines.
        columns: those that count; empty for all that both lines have.
        floor: the smallest difference that counts, in the table's unit; None for ``FLOOR``.
    """

    def judge(cells: Cells, data: str) -> Outcome:
        names = columns or cells.shared(data, first, second)
        return pair([((first, e), (second, e)) for e in names], floor=floor)(cells, data)

    return judge


def along(line: str, first: str, last: str, *, floor: float | None = None) -> Judge:
    """A line is better in the column ``last`` than in ``first``; judged as ``better``."""
    return pair([((line, last), (line, first))], floor=floor)


def pair(pairs: Sequence[tuple[Cell, Cell]], *, floor: float | None = None) -> Judge:
    """The first cell of each pair is better than the second, on the mean of the pairs; judged as
    ``better``.
    """

    def judge(cells: Cells, data: str) -> Outcome:
        gaps = _gaps(cells, data, pairs)
        if gaps is None:
            return NOT_RUN
        if not _some_trained(cells, data, pairs):
            return Outcome("undecided", f"{_in_words(gaps, cells.digits(data))}, untrained")
        smallest = cells.floor(data) if floor is None else floor
        verdict: Verdict = (
            "undecided"
            if abs(fmean(gaps)) < smallest
            else "holds"
            if fmean(gaps) > 0
            else "contradicted"
        )
        words = _in_words(gaps, cells.digits(data)) + _of_paper(cells, data, pairs)
        if len(gaps) < 2:
            return Outcome("undecided", f"{words}, one run")
        return Outcome(verdict, words, 2 * _p_above(gaps, 0.0, abs(fmean(gaps))))

    return judge


def close(first: str, second: str, bound: float, columns: Sequence[str] = ()) -> Judge:
    """Two lines differ by at most ``bound`` on the mean of the columns: an equivalence test."""

    def judge(cells: Cells, data: str) -> Outcome:
        names = columns or cells.shared(data, first, second)
        return near([((first, e), (second, e)) for e in names], bound)(cells, data)

    return judge


def near(pairs: Sequence[tuple[Cell, Cell]], bound: float, *, one_sided: bool = False) -> Judge:
    """The cells of each pair differ by at most ``bound`` on the mean of the pairs.

    Holds if two one-sided tests put the difference inside the bound (Schuirmann 1987); contradicted
    if a test puts it outside. ``one_sided``: the first cell may be better by any amount.
    """

    def judge(cells: Cells, data: str) -> Outcome:
        gaps = _gaps(cells, data, pairs)
        if gaps is None:
            return NOT_RUN
        words = f"{_in_words(gaps, cells.digits(data))} (bound {bound:g})"
        if not _some_trained(cells, data, pairs):
            return Outcome("undecided", f"{words}, untrained")
        if len(gaps) < 2:
            return Outcome("undecided", f"{words}, one run")
        above = _p_above(gaps, -bound)
        below = 0.0 if one_sided else _p_above([-each for each in gaps], -bound)
        inside = max(above, below)
        outside = 1 - above if one_sided else min(1 - above, 1 - below) * 2
        if inside <= outside:
            return Outcome("holds", words, inside)
        return Outcome("contradicted", words, min(1.0, outside))

    return judge


def ratio(
    first: str,
    second: str,
    smallest: float,
    columns: Sequence[str] = (),
    *,
    counted: bool = False,
) -> Judge:
    """One line's number, such as bytes or seconds, is at least ``smallest`` times another's, in the
    geometric mean of the columns.

    ``counted``: the numbers are counted or computed: they need no test. Otherwise judged as
    ``better``, on logarithms.
    """

    def judge(cells: Cells, data: str) -> Outcome:
        names = columns or cells.shared(data, first, second)
        logs = [
            [math.log(a / b) for a, b in zip(ones, others, strict=True)]
            for column in names
            if (ones := cells.ours(data, first, column))
            and len(others := cells.ours(data, second, column)) == len(ones)
        ]
        if not logs or len(logs) < len(names):
            return NOT_RUN
        by_seed = [fmean(each) for each in zip(*logs, strict=True)]
        words = f"{math.exp(fmean(by_seed)):.3g} times (paper at least {smallest:g})"
        gaps = [each - math.log(smallest) for each in by_seed]
        verdict: Verdict = "holds" if fmean(gaps) >= 0 else "contradicted"
        if counted:
            return Outcome(verdict, words)
        if len(gaps) < 2:
            return Outcome("undecided", f"{words}, one run")
        return Outcome(verdict, words, 2 * _p_above(gaps, 0.0, abs(fmean(gaps))))

    return judge


def best_of(firsts: Sequence[str], seconds: Sequence[str], columns: Sequence[str] = ()) -> Judge:
    """The best of some lines is better than the best of others, seed by seed, on the mean of the
    columns; judged as ``better``.
    """

    def judge(cells: Cells, data: str) -> Outcome:
        gaps = []
        for column in columns or cells.columns:
            sign = -1.0 if cells.lower(data, column) else 1.0
            ours = [v for each in firsts if (v := cells.ours(data, each, column))]
            others = [v for each in seconds if (v := cells.ours(data, each, column))]
            if ours and others:
                tops = [max(sign * v for v in of_seed) for of_seed in zip(*ours, strict=True)]
                next_best = [
                    max(sign * v for v in of_seed) for of_seed in zip(*others, strict=True)
                ]
                gaps.append([a - b for a, b in zip(tops, next_best, strict=True)])
        if not gaps:
            return NOT_RUN
        by_seed = [fmean(each) for each in zip(*gaps, strict=True)]
        words = _in_words(by_seed, cells.digits(data))
        if len(by_seed) < 2:
            return Outcome("undecided", f"{words}, one run")
        small = abs(fmean(by_seed)) < cells.floor(data)
        verdict: Verdict = (
            "undecided" if small else "holds" if fmean(by_seed) > 0 else "contradicted"
        )
        return Outcome(verdict, words, 2 * _p_above(by_seed, 0.0, abs(fmean(by_seed))))

    return judge


def below(line: str, bound: float, columns: Sequence[str] = ()) -> Judge:
    """A line's numbers are below a bound on the mean of the columns; a one-sided test."""

    def judge(cells: Cells, data: str) -> Outcome:
        found = [v for column in columns or cells.columns if (v := cells.ours(data, line, column))]
        if not found:
            return NOT_RUN
        gaps = [bound - fmean(each) for each in zip(*found, strict=True)]
        words = f"{bound - fmean(gaps):.{cells.digits(data)}f} (below {bound:g})"
        if len(gaps) < 2:
            return Outcome("undecided", f"{words}, one run")
        verdict: Verdict = "holds" if fmean(gaps) > 0 else "contradicted"
        return Outcome(verdict, words, _p_above(gaps, 0.0, abs(fmean(gaps))))

    return judge


# -- tests
# ----------------------------------------------------------------------


def _gaps(cells: Cells, data: str, pairs: Sequence[tuple[Cell, Cell]]) -> list[float] | None:
    """Returns by how much the first cells are better, seed by seed; None if a cell is missing."""
    found = []
    for first, second in cells.at_scale(pairs):
        sign = -1.0 if cells.lower(data, first[1]) else 1.0
        ours, others = cells.ours(data, *first), cells.ours(data, *second)
        if not ours or len(ours) != len(others):
            return None
        found.append([sign * (x - y) for x, y in zip(ours, others, strict=True)])
    return [fmean(each) for each in zip(*found, strict=True)] if found else None


def _some_trained(cells: Cells, data: str, pairs: Sequence[tuple[Cell, Cell]]) -> bool:
    return any(cells.trained(data, *cell) for two in cells.at_scale(pairs) for cell in two)


def _of_paper(cells: Cells, data: str, pairs: Sequence[tuple[Cell, Cell]]) -> str:
    """Returns the paper's own difference on the same data set, in words; empty if it has none."""
    theirs = []
    for first, second in pairs:
        sign = -1.0 if cells.lower(data, first[1]) else 1.0
        ours, others = cells.table.paper((data, *first)), cells.table.paper((data, *second))
        if ours is None or others is None:
            return ""
        theirs.append(sign * (ours - others))
    return f" (paper {fmean(theirs):+.{cells.digits(data)}f})"


def _p_above(values: Sequence[float], bound: float, effect: float | None = None) -> float:
    """Returns the one-sided p-value that the mean is not above ``bound``, by Student's t.

    ``effect``: the distance of the mean from the bound that is tested, for two-sided tests.
    """
    distance = fmean(values) - bound if effect is None else effect
    # What differs by rounding alone does not differ.
    error = standard_error(values)
    if error <= 1e-12:
        return 0.0 if distance > 1e-12 else 1.0
    return float(stats.t.sf(distance / error, len(values) - 1))


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; 0 for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _in_words(gaps: Sequence[float], digits: int) -> str:
    spread = f" ± {stdev(gaps):.{digits}f}" if len(gaps) > 1 else ""
    return f"{fmean(gaps):+.{digits}f}{spread}"
