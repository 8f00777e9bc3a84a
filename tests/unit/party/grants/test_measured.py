"""What a person reads before signing has the figures of the pages of results, and fits a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vfl_party
from vfl_common.bundle import LABELS
from vfl_party.grants.measured import MEASURED, Measured, measured
from vfl_party.grants.shown import Leaving
from vfl_party.phases.course import REGISTRY

PAGES = Path(vfl_party.__file__).parent.parent / "docs" / "results"
_NUMBER = re.compile(r"\d\.\d+")


@pytest.mark.parametrize("each", MEASURED, ids=lambda each: f"{min(each.phases)} {each.role}")
def test_every_figure_is_on_its_page(each: Measured) -> None:
    page = (PAGES / each.page).read_text()
    for figure in each.figures:
        assert figure in page, figure
    # Each number of a line with a point is one of its figures.
    known = " ".join(each.figures)
    assert all(number in known for number in _NUMBER.findall(each.line)), each.line


def test_the_phases_exist() -> None:
    known = {*REGISTRY.names(), "predict"}
    assert {phase for each in MEASURED for phase in each.phases} <= known


def test_what_was_not_measured_has_no_line() -> None:
    assert measured("open", "passive", "rows") is None
    found = measured("splitnn", "active", "gradient")
    assert found is not None
    assert found.page == "leaks-labels.md"
    assert {each.kind.label for each in MEASURED} <= {*LABELS.values()}


def test_each_thing_that_a_peer_gets_of_a_kind_has_a_line() -> None:
    carried, chain = "sizes int64 [2]; tags uint8 [tags]", "policy: careful -> identity"
    leaving = Leaving("align", "align", "server", "rows", 2_000, None, 24_080, carried, chain)
    assert list(leaving.lines) == [
        ("align", "server", "rows", "2,000", "?", "24,080", "sizes int64 [2]", chain),
        ("", "", "", "", "", "", "tags uint8 [tags]", ""),
    ]
