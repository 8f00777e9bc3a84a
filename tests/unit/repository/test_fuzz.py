"""A slice of scripts/fuzz and scripts/fuzz-coverage: what peers may send causes only errors of the
catalogue.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import targets
from tests.harness.fuzz import CODECS, LIVE, Outcomes
from vfl_common.errors import Code, PeerError


@settings(max_examples=150)
@given(st.sampled_from(sorted(CODECS)), st.integers(0, 2**32 - 1))
def test_codecs_and_what_messages_set_off(target: str, seed: int) -> None:
    outcomes = Outcomes()
    CODECS[target](outcomes, Random(seed))  # noqa: S311 - no secret
    assert outcomes.of(target) > 0
    assert outcomes.defects == []


@pytest.mark.parametrize("target", LIVE)
def test_live_services(target: str) -> None:
    outcomes = Outcomes()
    LIVE[target](outcomes, Random(7), 60)  # noqa: S311 - no secret
    assert outcomes.of(target) == 60
    assert outcomes.defects == []


@pytest.mark.parametrize("name", targets.TARGETS)
def test_what_a_search_has_kept_is_read_or_refused(name: str) -> None:
    cases = targets.kept(name)
    assert sum(len(each) for each in cases) <= targets.MOST_KEPT
    for case in [*targets.honest(name), *cases]:
        targets.feed(name, case)


def test_a_search_tells_a_defect_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_data: bytes) -> None:
        raise PeerError(Code.MALFORMED_MESSAGE, "not a frame", party="p1")

    def defect(_data: bytes) -> None:
        raise KeyError("z")

    monkeypatch.setitem(targets.TARGETS, "frames", refused)
    targets.feed("frames", b"x")
    monkeypatch.setitem(targets.TARGETS, "frames", defect)
    with pytest.raises(KeyError):
        targets.feed("frames", b"x")
