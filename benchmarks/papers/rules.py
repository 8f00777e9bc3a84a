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

    def having(self, data: str, lines: Sequence[str], column: str) -> tuple[Cell, ...]:
        """Returns the cells of some lines in a column, of those that the scale runs."""
        table = run_at(self.table, self.scale)
        own = next(each for each in self.table.data if each.name == data)
        columns = [each for each in table.columns if each.name == column]
        return tuple(
            (line.name, column)
            for line in table.lines
            if line.name in lines and columns and has(line, own, columns[0])
        )

    def sign(self, data: str, column: str) -> float:
        """Returns -1 if less is better in a cell, else 1."""
        own = next(each for each in self.table.columns if each.name == column).lower
        settings = next(each for each in self.table.data if each.name == data)
        return -1.0 if (settings.lower if own is None else own) else 1.0

    def level(self, data: str, column: str) -> float | None:
        """Returns the metric of an untrained network; None if the column shows something else."""
        settings = next(each for each in self.table.data if each.name == data)
        own = next(each for each in self.table.columns if each.name == column)
        level: float | None = resolved(settings.untrained, self.scale)
        return None if own.measures_other else level

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


# What decides a claim on one data set at one scale; ``resolve`` makes it from the table.
Kind = Literal["difference", "equivalence", "ratio", "best", "below"]


@dataclass(frozen=True)
class Comparison:
    """Cells that one seed's difference is made of: the best of ``firsts`` less the best of
    ``seconds``. ``sign``: -1 where less is better.
    """

    firsts: tuple[Cell, ...]
    seconds: tuple[Cell, ...]
    sign: float = 1.0


@dataclass(frozen=True)
class Test:
    """A test of a claim, as plain data.

    Args:
        kind: ``difference`` and ``best`` test a mean difference, ``equivalence`` whether it is
            inside a bound, ``ratio`` a mean quotient, and ``below`` a mean number.
        comparisons: their mean is tested.
        limit: the floor of a difference, the bound of an equivalence, the smallest quotient, or
            the number that is not reached.
        one_sided: of an equivalence: whether the first may be better by any amount.
        counted: whether the numbers are counted or computed, and need no test.
        level: the metric of an untrained network; None if the cells show something else.
    """

    kind: Kind
    comparisons: tuple[Comparison, ...]
    limit: float
    one_sided: bool = False
    counted: bool = False
    level: float | None = None


@dataclass(frozen=True)
class Rule:
    """How a claim is judged: ``comparisons`` returns the cells that are compared on a data set."""

    kind: Kind
    comparisons: Callable[[Cells, str], list[Comparison]]
    limit: float | None = None
    one_sided: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Claim:
    """A statement, and the rule that judges it for one data set.

    Args:
        says: the statement.
        rule: the rule.
        on: the data sets of which the claim is made; empty for all.
        ours: whether the statement is the project's own and not the paper's.
    """

    says: str
    rule: Rule
    on: tuple[str, ...] = ()
    ours: bool = False


def resolve(table: Table, scale: Scale) -> list[tuple[Claim, str, Test | None]]:
    """Returns (claim, data set, test) of a table; None where the scale runs none of its cells."""
    cells, found = Cells(table, {}, scale), []
    for claim in table.claims:
        for data in run_at(table, scale).data:
            if not claim.on or data.name in claim.on:
                found.append((claim, data.name, _test(cells, claim.rule, data.name)))
    return found


def _test(cells: Cells, rule: Rule, data: str) -> Test | None:
    comparisons = rule.comparisons(cells, data)
    if not comparisons:
        return None
    limit = cells.floor(data) if rule.limit is None else rule.limit
    places = [cell for each in comparisons for cell in (*each.firsts, *each.seconds)]
    levels = {cells.level(data, column) for _, column in places}
    level = levels.pop() if len(levels) == 1 else None
    return Test(rule.kind, tuple(comparisons), limit, rule.one_sided, rule.counted, level)


def judge_all(cells: Cells) -> list[tuple[Claim, list[Finding]]]:
    """Judges each claim of a table on each data set, with Holm's correction over all tests."""
    found: dict[int, list[Finding]] = {id(claim): [] for claim in cells.table.claims}
    resolved_tests = resolve(cells.table, cells.scale)
    outcomes = [judge(cells, data, test) for _, data, test in resolved_tests]
    corrected = iter(holm([each.p for each in outcomes if each.p is not None]))
    for (claim, data, _), outcome in zip(resolved_tests, outcomes, strict=True):
        verdict, words = outcome.verdict, outcome.words
        if outcome.p is not None:
            p = next(corrected)
            verdict = verdict if p <= ALPHA else "undecided"
            words += f", p = {p:.2g}"
        found[id(claim)].append(Finding(data, verdict, words))
    return [(claim, found[id(claim)]) for claim in cells.table.claims]


def judge(cells: Cells, data: str, test: Test | None) -> Outcome:
    """Returns what a test says before Holm's correction."""
    gaps = None if test is None else _gaps(cells, data, test)
    if test is None or gaps is None:
        return Outcome("not run", "")
    words = _in_words(cells, data, test, gaps)
    mean = fmean(gaps)
    if test.counted:
        return Outcome("holds" if mean >= 0 else "contradicted", words)
    if len(gaps) < 2:
        return Outcome("undecided", f"{words}, one run")
    if not _some_trained(cells, data, test):
        return Outcome("undecided", f"{words}, untrained")
    if test.kind == "equivalence":
        above = _p_above(gaps, -test.limit)
        below = 0.0 if test.one_sided else _p_above([-each for each in gaps], -test.limit)
        inside = max(above, below)
        outside = 1 - above if test.one_sided else 2 * min(1 - above, 1 - below)
        if inside <= outside:
            return Outcome("holds", words, inside)
        return Outcome("contradicted", words, min(1.0, outside))
    small = test.kind in ("difference", "best") and abs(mean) < test.limit
    verdict: Verdict = "undecided" if small else "holds" if mean > 0 else "contradicted"
    p = _p_above(gaps if mean > 0 else [-each for each in gaps], 0.0)
    return Outcome(verdict, words, min(1.0, 2 * p))


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
) -> Rule:
    """Returns the rule that one line is better than another, on the mean of the columns that the
    table has of both.

    Args:
        first, second: names of lines.
        columns: those that count; empty for all that both lines have.
        floor: the smallest difference that counts, in the table's unit; None for ``FLOOR``.
    """
    return Rule("difference", _lines(first, second, columns), floor)


def along(line: str, first: str, last: str, *, floor: float | None = None) -> Rule:
    """Returns the rule that a line is better in the column ``last`` than in ``first``; judged as
    ``better``.
    """
    return pair([((line, last), (line, first))], floor=floor)


def pair(pairs: Sequence[tuple[Cell, Cell]], *, floor: float | None = None) -> Rule:
    """Returns the rule that the first cell of each pair is better than the second, on the mean of
    the pairs; judged as ``better``.
    """
    return Rule("difference", _pairs(pairs), floor)


def close(first: str, second: str, bound: float, columns: Sequence[str] = ()) -> Rule:
    """Returns the rule that two lines differ by at most ``bound`` on the mean of the columns; judged
    as ``near``.
    """
    return Rule("equivalence", _lines(first, second, columns), bound)


def near(pairs: Sequence[tuple[Cell, Cell]], bound: float, *, one_sided: bool = False) -> Rule:
    """Returns the rule that the cells of each pair differ by at most ``bound`` on the mean of the
    pairs.

    It holds if two one-sided tests put the difference inside the bound (Schuirmann 1987), and is
    contradicted if a test puts it outside. ``one_sided``: the first cell may be better by any amount.
    """
    return Rule("equivalence", _pairs(pairs), bound, one_sided)


def ratio(
    first: str,
    second: str,
    smallest: float,
    columns: Sequence[str] = (),
    *,
    counted: bool = False,
) -> Rule:
    """Returns the rule that one line's number, such as bytes or seconds, is at least ``smallest``
    times another's, in the geometric mean of the columns. ``counted``: without a test.
    """
    return Rule("ratio", _lines(first, second, columns), smallest, counted=counted)


def best_of(firsts: Sequence[str], seconds: Sequence[str], columns: Sequence[str] = ()) -> Rule:
    """Returns the rule that the best of some lines is better than the best of others, seed by seed,
    on the mean of the columns; judged as ``better``.
    """

    def comparisons(cells: Cells, data: str) -> list[Comparison]:
        found = []
        for column in columns or cells.columns:
            ours = cells.having(data, firsts, column)
            others = cells.having(data, seconds, column)
            if ours and others:
                found.append(Comparison(ours, others, cells.sign(data, column)))
        return found

    return Rule("best", comparisons)


def below(line: str, bound: float, columns: Sequence[str] = ()) -> Rule:
    """Returns the rule that a line's numbers are below a bound on the mean of the columns."""

    def comparisons(cells: Cells, data: str) -> list[Comparison]:
        names = columns or cells.columns
        return [Comparison(c, ()) for each in names if (c := cells.having(data, [line], each))]

    return Rule("below", comparisons, bound)


def _lines(
    first: str, second: str, columns: Sequence[str]
) -> Callable[[Cells, str], list[Comparison]]:
    def comparisons(cells: Cells, data: str) -> list[Comparison]:
        names = columns or cells.columns
        return _pairs([((first, each), (second, each)) for each in names])(cells, data)

    return comparisons


def _pairs(pairs: Sequence[tuple[Cell, Cell]]) -> Callable[[Cells, str], list[Comparison]]:
    def comparisons(cells: Cells, data: str) -> list[Comparison]:
        return [
            Comparison((first,), (second,), cells.sign(data, first[1]))
            for first, second in pairs
            if all(cells.having(data, [line], column) for line, column in (first, second))
        ]

    return comparisons


# -- tests
# ----------------------------------------------------------------------


def _gaps(cells: Cells, data: str, test: Test) -> list[float] | None:
    """Returns the difference that is tested, seed by seed; None if a value is missing."""
    found = []
    for each in test.comparisons:
        ours = [cells.ours(data, *cell) for cell in each.firsts]
        others = [cells.ours(data, *cell) for cell in each.seconds]
        if not all(ours + others) or len({len(values) for values in ours + others}) > 1:
            return None
        firsts = [max(each.sign * v for v in seed) for seed in zip(*ours, strict=True)]
        if test.kind == "below":
            found.append([test.limit - v for v in firsts])
            continue
        seconds = [max(each.sign * v for v in seed) for seed in zip(*others, strict=True)]
        if test.kind == "ratio":
            quotients = [abs(a / b) / test.limit for a, b in zip(firsts, seconds, strict=True)]
            found.append([math.log(quotient) for quotient in quotients])
        else:
            found.append([a - b for a, b in zip(firsts, seconds, strict=True)])
    return [fmean(seed) for seed in zip(*found, strict=True)]


def _some_trained(cells: Cells, data: str, test: Test) -> bool:
    """Returns whether a cell of the test is better than an untrained network's level."""
    if test.level is None:
        return True
    level = test.level
    return any(
        each.sign * fmean(cells.ours(data, *cell)) > each.sign * level
        for each in test.comparisons
        for cell in (*each.firsts, *each.seconds)
    )


def _p_above(values: Sequence[float], bound: float) -> float:
    """Returns the one-sided p-value of a mean above ``bound``, by Student's t."""
    distance, error = fmean(values) - bound, standard_error(values)
    # What differs by rounding alone does not differ.
    if error <= 1e-12:
        return 0.0 if distance > 1e-12 else 1.0
    return float(stats.t.sf(distance / error, len(values) - 1))


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; 0 for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _in_words(cells: Cells, data: str, test: Test, gaps: Sequence[float]) -> str:
    digits = cells.digits(data)
    if test.kind == "ratio":
        times = math.exp(fmean(gaps)) * test.limit
        return f"{times:.3g} times (claimed: at least {test.limit:g})"
    if test.kind == "below":
        return f"{test.limit - fmean(gaps):.{digits}f} (claimed: below {test.limit:g})"
    spread = f" ± {stdev(gaps):.{digits}f}" if len(gaps) > 1 else ""
    words = f"{fmean(gaps):+.{digits}f}{spread}"
    if test.kind == "equivalence":
        return f"{words} (bound {test.limit:g})"
    theirs = [_of_paper(cells, data, each) for each in test.comparisons]
    known = [each for each in theirs if each is not None]
    whole = known and len(known) == len(theirs)
    return words + (f" (paper {fmean(known):+.{digits}f})" if whole else "")


def _of_paper(cells: Cells, data: str, comparison: Comparison) -> float | None:
    """Returns the paper's own difference; None if it has not all of its numbers."""
    ours = [cells.table.paper((data, *cell)) for cell in comparison.firsts]
    others = [cells.table.paper((data, *cell)) for cell in comparison.seconds]
    if not all(each is not None for each in (*ours, *others)):
        return None
    best = [max(comparison.sign * v for v in of if v is not None) for of in (ours, others)]
    return best[0] - best[1]
