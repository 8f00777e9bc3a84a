"""The garbage collector is asked less often, and is as it was after a block that imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vfl_common.process import program


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def searched(thing: object) -> bool:
    """Whether the collector looks at it: not if it is frozen.

    To count the frozen objects would not tell: others of them may go meanwhile.
    """
    return any(other is thing for other in gc.get_objects())


@pytest.mark.parametrize(("before", "after"), [(700, program.YOUNG), (50_000, 50_000), (0, 0)])
def test_it_searches_less_often_unless_it_does_so_already_or_never(before: int, after: int) -> None:
    gc.set_threshold(before, 7, 9)
    thing: list[object] = []
    assert searched(thing)
    program.reduce_gc()
    assert gc.get_threshold() == (after, 7, 9)
    assert not searched(thing)


@pytest.mark.parametrize(("before", "within"), [(700, program.YOUNG), (0, 0)])
def test_a_block_in_a_process_of_others_is_searched_less_often(before: int, within: int) -> None:
    def fail() -> None:
        assert gc.get_threshold() == (within, 7, 9)
        raise ImportError

    gc.set_threshold(before, 7, 9)
    thing: list[object] = []
    with pytest.raises(ImportError), program.reduce_gc_in_block():
        fail()
    assert gc.get_threshold() == (before, 7, 9)
    assert searched(thing)


@pytest.mark.parametrize("on", [True, False])
def test_a_block_that_imports_is_not_searched(on: bool) -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ImportError

    (gc.enable if on else gc.disable)()
    with pytest.raises(ImportError), program.pause_gc():
        fail()
    assert gc.isenabled() is on
