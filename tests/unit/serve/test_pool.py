"""Connections that several threads share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.waiting import wait_until
from vfl_common.errors import Code, InputError
from vfl_serve.stores.seam import BrokenError, ConnectionPool, ValueMismatchError


class Line:
    """A connection. ``open``: how many are."""

    open = 0

    def __init__(self) -> None:
        self.uses, self.ended = 0, threading.Event()
        Line.open += 1

    def close(self) -> None:
        Line.open -= 1


def pool(most: int = 2) -> ConnectionPool[Any]:
    Line.open = 0
    return ConnectionPool(Line, lambda each: each.close(), most, lambda each: each.ended.set())


def soon() -> float:
    return time.monotonic() + 20.0


def used(line: Line) -> int:
    line.uses += 1
    return line.uses


def test_a_connection_is_used_again() -> None:
    lines = pool()
    assert [lines.run(used, soon()) for _ in range(3)] == [1, 2, 3]
    assert Line.open == 1
    lines.close()
    assert Line.open == 0


def test_no_more_are_open_than_allowed() -> None:
    lines, together = pool(2), threading.Barrier(2)

    def work(_line: Line) -> int:
        together.wait(10.0)
        return Line.open

    with ThreadPoolExecutor(8) as callers:
        assert set(callers.map(lambda _: lines.run(work, soon()), range(8))) <= {1, 2}
    assert Line.open <= 2


def test_one_that_broke_while_nobody_used_it_is_replaced() -> None:
    lines = pool()

    def breaks_when_old(line: Line) -> int:
        if used(line) > 1:
            raise BrokenError(Code.FILE_INVALID, "gone")
        return line.uses

    assert [lines.run(breaks_when_old, soon()) for _ in range(3)] == [1, 1, 1]
    assert Line.open == 1


def test_one_that_is_new_and_breaks_is_told() -> None:
    lines = pool()

    def breaks(_line: Line) -> int:
        raise BrokenError(Code.FILE_INVALID, "gone")

    for _ in range(3):
        with pytest.raises(BrokenError):
            lines.run(breaks, soon())
    assert Line.open == 0

    def refused(_line: Line) -> int:
        raise InputError(Code.DATA_INVALID, "no")

    with pytest.raises(InputError):
        lines.run(refused, soon())
    assert lines.run(used, soon()) == 1


def test_one_is_kept_that_is_fit_for_other_ids() -> None:
    lines = pool()

    def unfit(_line: Line) -> int:
        raise ValueMismatchError(Code.DATA_INVALID, "not these")

    assert lines.run(used, soon()) == 1
    with pytest.raises(ValueMismatchError):
        lines.run(unfit, soon())
    assert lines.run(used, soon()) == 2


def test_what_was_interrupted_is_not_done_again() -> None:
    lines, done = pool(1), list[int]()
    assert lines.run(used, soon()) == 1

    def breaks(line: Line) -> bool:
        done.append(used(line))
        line.ended.wait(20.0)
        raise BrokenError(Code.FILE_INVALID, "gone")

    with pytest.raises(TimeoutError):
        lines.run(breaks, time.monotonic() + 0.05)
    assert lines.run(used, soon()) == 1
    assert done == [2]


def test_work_that_takes_too_long_is_interrupted_and_waited_for_no_more() -> None:
    lines = pool(1)

    def waits(line: Line) -> bool:
        return line.ended.wait(20.0)

    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        lines.run(waits, time.monotonic() + 0.05)
    assert time.monotonic() - began_s < 5.0
    # Its place is free again.
    assert lines.run(used, soon()) == 1


def test_work_that_would_begin_too_late_is_not_begun() -> None:
    """As when a connection takes long to open."""
    over = threading.Event()

    def opened() -> Line:
        over.wait(20.0)
        return Line()

    lines, begun = ConnectionPool(opened, lambda each: each.close(), 1), list[Line]()
    with pytest.raises(TimeoutError):
        lines.run(begun.append, time.monotonic() + 0.02)
    over.set()
    assert lines.run(used, soon()) == 1
    assert not begun


def test_work_that_is_interrupted_before_it_begins_is_interrupted_again() -> None:
    times: list[Line] = []

    def interrupt(line: Line) -> None:
        times.append(line)
        if len(times) > 1:
            line.ended.set()

    lines = ConnectionPool(Line, lambda each: each.close(), 1, interrupt)

    def waits(line: Line) -> bool:
        return line.ended.wait(20.0)

    with pytest.raises(TimeoutError):
        lines.run(waits, time.monotonic() + 0.02)
    began_s = time.monotonic()
    assert lines.run(used, soon()) == 1
    assert time.monotonic() - began_s < 10.0


def test_who_gets_no_place_in_time_is_late() -> None:
    lines, over = ConnectionPool(Line, lambda each: each.close(), 1), threading.Event()
    first = threading.Thread(target=lambda: lines.run(lambda _: over.wait(20.0), soon()))
    first.start()
    wait_until(lambda: lines._free.empty())
    with pytest.raises(TimeoutError):
        lines.run(used, time.monotonic() + 0.05)
    over.set()
    first.join()
    assert lines.run(used, soon()) == 1
