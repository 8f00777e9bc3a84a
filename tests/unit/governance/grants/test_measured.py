"""What a person reads before signing has the figures of the pages, and fits a screen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import vfl_party
from tests.harness.present import present
from vfl_common.bundle import LABELS
from vfl_governance.grants.shown import MEASURED, Leaving, Measured, get_measurement
from vfl_party.phases.course import REGISTRY

PAGES = Path(vfl_party.__file__).parent.parent / "docs"
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
    known = {*REGISTRY.names(), "predict", "align"}
    assert {phase for each in MEASURED for phase in each.phases} <= known


def test_what_was_not_measured_has_no_line() -> None:
    assert get_measurement("open", "passive", "rows") is None
    assert get_measurement("align", "passive", "rows", "tags uint8 [tags]") is None
    assert get_measurement("align", "active", "rows", "rows encodings uint8 [up, 128]")
    found = present(get_measurement("splitnn", "active", "gradient"))
    assert found.page == "results/leaks-labels.md"
    assert {each.kind.label for each in MEASURED} <= {*LABELS.values()}


def test_each_thing_that_a_peer_gets_of_a_kind_has_a_line() -> None:
    carried, chain = "sizes int64 [2]; tags uint8 [tags]", "policy: careful -> identity"
    leaving = Leaving("align", "align", "server", "rows", 2_000, None, 24_080, carried, chain)
    assert list(leaving.lines) == [
        ("align", "server", "rows", "2,000", "?", "24,080", "sizes int64 [2]", chain),
        ("", "", "", "", "", "", "tags uint8 [tags]", ""),
    ]


def test_a_figure_without_a_defence_is_not_given_for_an_exchange_that_has_one() -> None:
    carried = "embedding z float32 [rows, 8]"
    plain = Leaving("split", "splitnn", "bank", "embedding", 9, 1, 1, carried, "policy -> identity")
    assert plain.transforms == ()
    chain = "noise (sigma = 1) -> policy: careful -> identity"
    noisy = replace(plain, defences=chain)
    assert noisy.transforms == ("noise (sigma = 1)",)
    found = present(get_measurement("splitnn", "passive", "embedding"))
    assert found.describe(plain.transforms) == found.line
    said = found.describe(noisy.transforms)
    assert said == f"nothing was measured with noise (sigma = 1); without it, {found.line}"
    # Marvell noise was measured on gradients.
    gradient = present(get_measurement("splitnn", "active", "gradient"))
    assert gradient.describe(["Marvell noise (s = 25)"]) == gradient.line
    assert gradient.describe(["label DP"]).startswith("nothing was measured with label DP")
