"""The rules by which a claim of a paper is judged on our runs; a study file declares them before
the first run.

A difference counts as found if its mean over the seeds is above its standard error; of one seed,
if it is above 0. Values of the same seed are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from benchmarks.papers.describe import Place, Table, digits_of

Verdict = Literal["holds", "direction", "not found", "not run"]
# Of the paper's own difference, for a claim to hold.
SHARE = 0.5


@dataclass(frozen=True)
class Cells:
    """What was found: {place: a value for each seed}, beside the table."""

    table: Table
    values: Mapping[Place, tuple[float, ...]]

    def ours(self, data: str, line: str, column: str) -> tuple[float, ...]:
        return self.values.get((data, line, column), ())

    def lower(self, data: str, column: str) -> bool:
        """Returns whether less is better in a cell."""
        own = next(each for each in self.table.columns if each.name == column).lower
        return next(e for e in self.table.data if e.name == data).lower if own is None else own

    def digits(self, data: str) -> int:
        """Returns how many digits behind the point a data set's numbers have."""
        return digits_of(self.table, next(e for e in self.table.data if e.name == data))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.table.columns)


@dataclass(frozen=True)
class Finding:
    """The verdict on a data set, and what was found, in words."""

    data: str
    verdict: Verdict
    found: str


Judge = Callable[[Cells, str], tuple[Verdict, str]]


@dataclass(frozen=True)
class Claim:
    """What the paper says, and how it is judged for one data set."""

    says: str
    judge: Judge
    on: tuple[str, ...] = ()

    def findings(self, cells: Cells) -> Iterator[Finding]:
        """Judges each data set of which the table has cells."""
        for data in cells.table.data:
            if not self.on or data.name in self.on:
                yield Finding(data.name, *self.judge(cells, data.name))


def overall(findings: Sequence[Finding]) -> Verdict:
    """Returns one verdict: holds, or not found, if that is so wherever it was run, else
    direction.
    """
    seen = {each.verdict for each in findings} - {"not run"}
    if not seen:
        return "not run"
    return seen.pop() if len(seen) == 1 else "direction"


# -- the vocabulary
# ----------------------------------------------------------------------


# (line, column).
Cell = tuple[str, str]


def better(
    first: str,
    second: str,
    columns: Sequence[str] = (),
    *,
    share: float = SHARE,
    least: float | None = None,
) -> Judge:
    """One line is better than another, on the mean of the columns that both have.

    Holds if the difference is found and is at least ``share`` of the paper's own (for a data set
    that the paper does not have: of the mean of its data sets), or at least ``least`` where the
    paper has words in place of numbers. Direction: it is above 0 in the mean.
    """

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        pairs = [((first, each), (second, each)) for each in columns or cells.columns]
        return pair(pairs, share=share, least=least)(cells, data)

    return judge


def along(
    line: str, first: str, last: str, *, share: float = SHARE, least: float | None = None
) -> Judge:
    """A line is better in the column ``last`` than in ``first``; judged as ``better``."""
    return pair([((line, last), (line, first))], share=share, least=least)


def pair(
    pairs: Sequence[tuple[Cell, Cell]], *, share: float = SHARE, least: float | None = None
) -> Judge:
    """The first cell of each pair is better than the second, on the mean of the pairs; judged as
    ``better``.
    """

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        found = [each for each in (_gap(cells, data, *two) for two in pairs) if each]
        if not found:
            return "not run", ""
        by_seed = [fmean(each) for each in zip(*found, strict=False)]
        theirs = {
            each.name: [gap for two in pairs if (gap := _paper(cells, each.name, *two)) is not None]
            for each in cells.table.data
        }
        own = theirs[data] or [gap for each in theirs.values() for gap in each]
        wanted = fmean(own) if own else None
        bound = share * wanted if wanted is not None else least or 0.0
        return _verdict(by_seed, bound), _in_words(by_seed, wanted, least, cells.digits(data))

    return judge


def _gap(cells: Cells, data: str, first: Cell, second: Cell) -> list[float]:
    """Returns by how much the first cell is better, seed by seed; nothing if one was not run."""
    sign = -1.0 if cells.lower(data, first[1]) else 1.0
    ours, others = cells.ours(data, *first), cells.ours(data, *second)
    return [sign * (x - y) for x, y in zip(ours, others, strict=False)]


def _paper(cells: Cells, data: str, first: Cell, second: Cell) -> float | None:
    sign = -1.0 if cells.lower(data, first[1]) else 1.0
    ours, others = cells.table.paper((data, *first)), cells.table.paper((data, *second))
    return None if ours is None or others is None else sign * (ours - others)


def _verdict(gaps: Sequence[float], least: float) -> Verdict:
    middle = fmean(gaps)
    if middle > 0 and middle > standard_error(gaps) and middle >= least:
        return "holds"
    return "direction" if middle > 0 else "not found"


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _in_words(gaps: Sequence[float], wanted: float | None, least: float | None, digits: int) -> str:
    spread = f" ± {stdev(gaps):.{digits}f}" if len(gaps) > 1 else ""
    beside = f" (at least {least:g})" if least is not None else ""
    beside = f" (paper {wanted:+.{digits}f})" if wanted is not None else beside
    return f"{fmean(gaps):+.{digits}f}{spread}{beside}"


def close(first: str, second: str, most: float, columns: Sequence[str] = ()) -> Judge:
    """One line is at most ``most`` worse than another, on the mean of the columns. Direction: at
    most twice that.
    """

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        pairs = [((first, each), (second, each)) for each in columns or cells.columns]
        return near(pairs, most)(cells, data)

    return judge


def near(pairs: Sequence[tuple[Cell, Cell]], most: float) -> Judge:
    """The first cell of each pair is at most ``most`` worse than the second, on the mean of the
    pairs. Direction: at most twice that.
    """

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        gaps = [fmean(gap) for two in pairs if (gap := _gap(cells, data, *two))]
        if not gaps:
            return "not run", ""
        middle = fmean(gaps)
        verdict: Verdict = (
            "holds" if middle >= -most else "direction" if middle >= -2 * most else "not found"
        )
        return verdict, f"{middle:+.{cells.digits(data)}f} (at most {most:g} below)"

    return judge


def ratio(first: str, second: str, least: float, columns: Sequence[str] = ()) -> Judge:
    """One line's number is at least ``least`` times another's, such as bytes or seconds, in the
    geometric mean of the columns. Direction: it is larger.
    """

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        found = [
            math.log(fmean(a) / fmean(b))
            for column in columns or cells.columns
            if (a := cells.ours(data, first, column)) and (b := cells.ours(data, second, column))
        ]
        if not found:
            return "not run", ""
        times = math.exp(fmean(found))
        verdict: Verdict = (
            "holds" if times >= least else "direction" if times > 1.0 else "not found"
        )
        return verdict, f"{times:.3g} times (paper at least {least:g})"

    return judge


def best(line: str, columns: Sequence[str] = ()) -> Judge:
    """A line has the best mean of all lines, in every column. Direction: in half of them."""

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        wins, of = 0, 0
        for column in columns or cells.columns:
            means = {
                each.name: fmean(values)
                for each in cells.table.lines
                if (values := cells.ours(data, each.name, column))
            }
            if line in means and len(means) > 1:
                pick = min if cells.lower(data, column) else max
                wins, of = wins + (means[line] == pick(means.values())), of + 1
        if not of:
            return "not run", ""
        verdict: Verdict = "holds" if wins == of else "direction" if 2 * wins >= of else "not found"
        return verdict, f"best in {wins} of {of} columns"

    return judge


def within(most: float, lines: Sequence[str] = ()) -> Judge:
    """Each number is at most ``most`` from the paper's. Direction: half of them are."""

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        away = [
            abs(fmean(values) - paper)
            for place, values in cells.values.items()
            if place[0] == data and (not lines or place[1] in lines) and values
            if (paper := cells.table.paper(place)) is not None
        ]
        if not away:
            return "not run", ""
        near = sum(each <= most for each in away)
        verdict: Verdict = (
            "holds" if near == len(away) else "direction" if 2 * near >= len(away) else "not found"
        )
        return verdict, f"{near} of {len(away)} numbers within {most:g} of the paper's"

    return judge


def below(line: str, most: float, columns: Sequence[str] = ()) -> Judge:
    """A line's numbers are below a bound. Direction: at most a tenth above it."""

    def judge(cells: Cells, data: str) -> tuple[Verdict, str]:
        means = [
            fmean(values)
            for column in columns or cells.columns
            if (values := cells.ours(data, line, column))
        ]
        if not means:
            return "not run", ""
        worst = max(means)
        verdict: Verdict = (
            "holds" if worst < most else "direction" if worst < 1.1 * most else "not found"
        )
        return verdict, f"at most {worst:.{cells.digits(data)}f} (below {most:g})"

    return judge
