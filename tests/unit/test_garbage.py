"""The garbage collector is asked less often, and is as it was after a block that imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vfl_common import garbage


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


@pytest.mark.parametrize(("before", "after"), [(700, garbage.YOUNG), (50_000, 50_000), (0, 0)])
def test_it_searches_less_often_unless_it_does_so_already_or_never(before: int, after: int) -> None:
    gc.set_threshold(before, 7, 9)
    there = gc.get_freeze_count()
    garbage.seldom()
    assert gc.get_threshold() == (after, 7, 9)
    assert gc.get_freeze_count() > there


@pytest.mark.parametrize(("before", "within"), [(700, garbage.YOUNG), (0, 0)])
def test_a_block_in_a_process_of_others_is_searched_less_often(before: int, within: int) -> None:
    def fail() -> None:
        assert gc.get_threshold() == (within, 7, 9)
        raise ImportError

    gc.set_threshold(before, 7, 9)
    there = gc.get_freeze_count()
    with pytest.raises(ImportError), garbage.less_often():
        fail()
    assert gc.get_threshold() == (before, 7, 9)
    assert gc.get_freeze_count() <= there  # what an earlier test has frozen may go meanwhile


@pytest.mark.parametrize("on", [True, False])
def test_a_block_that_imports_is_not_searched(on: bool) -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ImportError

    (gc.enable if on else gc.disable)()
    with pytest.raises(ImportError), garbage.unsearched():
        fail()
    assert gc.isenabled() is on
