"""A slice of scripts/fuzz: mutated messages cause only errors of the catalogue."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.fuzz import CODECS, LIVE, Outcomes


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
