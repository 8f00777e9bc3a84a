"""Writes the pages of `vfl report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vfl.report.page.baselines import find_baselines, make, possible
from vfl.report.page.facts import Facts
from vfl.report.page.party_page import party_page
from vfl.report.page.render import FILE, write
from vfl.report.page.run_page import run_page
from vfl.report.page.search_page import search_page
from vfl.report.page.several import several_page
from vfl.report.page.study_page import study_page
from vfl.report.reading import RunRecord
from vfl_common.config.task import ThresholdRule
from vfl_common.errors import Code, InputError

Threshold = ThresholdRule | float
# The file name of the page of several runs, in the folder of runs.
COMPARISON = "comparison.html"


def page_of_run(run: RunRecord, *, baselines: bool = False, threshold: str | None = None) -> Path:
    """Writes ``report.html`` into a run's folder, and returns its path.

    Args:
        run: the run.
        baselines: whether to train the missing baselines first.
        threshold: see ``parse_threshold``.

    Raises InputError.
    """
    rule = None if threshold is None else parse_threshold(threshold)
    facts = Facts(run)
    if baselines:
        existing = find_baselines(facts)
        make(facts, [kind for kind in possible(facts) if kind not in existing])
    return write(run_page(facts, find_baselines(facts), rule), run.folder / FILE)


def page_of_party(folder: Path) -> Path:
    """Writes ``report.html`` into a passive party's folder, and returns its path.

    Raises InputError.
    """
    return write(party_page(folder), folder / FILE)


def page_of_study(folder: Path) -> Path:
    """Writes ``report.html`` into a study's folder, and returns its path. Raises InputError."""
    return write(study_page(folder), folder / FILE)


def page_of_search(folder: Path) -> Path:
    """Writes ``report.html`` into a search's folder, and returns its path. Raises InputError."""
    return write(search_page(folder), folder / FILE)


def page_of_runs(runs: Sequence[RunRecord]) -> Path:
    """Writes ``comparison.html`` into the folder of the first run's runs, and returns its path.

    Raises InputError.
    """
    return write(several_page([Facts(run) for run in runs]), runs[0].folder.parent / COMPARISON)


def parse_threshold(text: str) -> Threshold:
    """Parses ``0.3``, ``f1``, ``rate=0.1`` or ``cost=1:5`` (the costs of a false positive and of a
    false negative). Raises InputError.
    """
    name, _, rest = text.partition("=")
    try:
        if name == "f1" and not rest:
            return ThresholdRule(rule="f1")
        if name == "rate":
            return ThresholdRule(rule="rate", rate=float(rest))
        if name == "cost":
            false, missed = map(float, rest.split(":"))
            return ThresholdRule(rule="cost", false_positive=false, false_negative=missed)
        threshold = float(text)
        if 0 < threshold < 1:
            return threshold
    except ValueError:
        pass
    raise InputError(
        Code.CONFIG_INVALID,
        f"--threshold: is not a threshold (got {text[:40]!r}). Give a number between 0 and 1, f1, "
        "rate=0.1, or cost=1:5.",
    )
