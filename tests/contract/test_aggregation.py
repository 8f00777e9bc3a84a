"""The server's aggregation over a real wire: means, order, clocks, what ends it, and that nothing
is left behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.contract.exchanges import PASSIVES, WAIT_S, GrpcExchange, soon
from tests.harness.errors import assert_names, raises
from tests.harness.hostile import aggregation
from tests.harness.proxy import Proxy
from tests.harness.waiting import wait_until
from vfl_common.bundle import CONTROL, Bundle, Direction, Kind, Link, StepKey
from vfl_common.errors import (
    AbortedError,
    Code,
    InputError,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.stages import AggregationPlan
from vfl_party.outbound.exchange import to_bundle, to_tensors
from vfl_server.aggregation import AggregatedRun, Aggregator

CPU = torch.device("cpu")
# Two frames.
FIRST = aggregation("first", 3, w=(300_001,), b=())
SECOND = aggregation("second", 2, w=(2,))
PHASES = ("first", "plain", "second")


class Run:
    """An aggregator, and the way to it; ``failed`` gets what it would tell the coordinator."""

    def __init__(self, timeout_s: float = WAIT_S) -> None:
        self.exchange = GrpcExchange(PASSIVES, timeout_s)
        self.failed: queue.SimpleQueue[VflError] = queue.SimpleQueue()
        self.aggregator = Aggregator(
            self.exchange.service,
            AggregatedRun("run", PASSIVES, PASSIVES[1:], PHASES),
            timeout_s=timeout_s,
            fail=self.failed.put,
        )

    def swap(
        self, party: str, what: AggregationPlan, round_: int, link: Link | None = None
    ) -> Future[dict[str, Tensor]]:
        """In a thread of its own: the mean of ``tensors_of`` with the others'."""
        link = link or self.exchange.link(party)
        step = StepKey(what.phase, round_, 0)
        sent = to_bundle(Kind.WEIGHTS, tensors_of(party, what, round_))
        return soon(lambda: to_tensors(link.swap(step, sent, what.spec), CPU))

    def threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "aggregation"]

    def close(self) -> None:
        self.aggregator.close()
        self.exchange.close()
        assert self.threads() == []
        assert self.failed.empty()


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    yield found
    found.close()


def tensors_of(party: str, what: AggregationPlan, round_: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(
        100 * round_ + PASSIVES.index(party) + len(what.phase) * 10_000
    )
    return {
        name: torch.randn(spec.shape, generator=generator)
        for name, spec in what.spec.tensors.items()
    }


def mean_of(what: AggregationPlan, round_: int) -> dict[str, Tensor]:
    drawn = [tensors_of(party, what, round_) for party in PASSIVES]
    return {name: (drawn[0][name] + drawn[1][name]) / 2 for name in what.spec.tensors}


def assert_mean(got: dict[str, Tensor], what: AggregationPlan, round_: int) -> None:
    want = mean_of(what, round_)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def go_through(run: Run, steps: Sequence[tuple[AggregationPlan, int]]) -> None:
    for what, round_ in steps:
        asked = [run.swap(party, what, round_) for party in reversed(PASSIVES)]
        for future in asked:
            assert_mean(future.result(WAIT_S), what, round_)


def test_one_that_does_not_swap_is_not_waited_for(run: Run) -> None:
    """As the active party, if only the passive ones have what is averaged."""
    alone = replace(SECOND, passive=True)
    run.aggregator.begin(1, "", [FIRST, alone])
    go_through(run, ALL[:3])
    for round_ in range(2):
        got = run.swap(PASSIVES[1], alone, round_).result(WAIT_S)
        assert all(
            torch.equal(got[name], each)
            for name, each in tensors_of(PASSIVES[1], alone, round_).items()
        )


ALL = [(FIRST, 0), (FIRST, 1), (FIRST, 2), (SECOND, 0), (SECOND, 1)]


def test_every_party_gets_the_mean_of_every_round_and_phase(run: Run) -> None:
    run.aggregator.begin(1, "", [FIRST, SECOND])
    go_through(run, ALL)
    for party in PASSIVES:
        run.exchange.link(party).close()
    payload = sum(4 * 300_002 for _ in range(3))
    for party in PASSIVES:
        ours = {(e.phase, e.kind, e.direction): e for e in run.exchange.ledgers[party].entries()}
        theirs = {
            (e.phase, e.kind, e.direction): e
            for e in run.exchange.ledger.entries()
            if e.peer == party
        }
        turned: list[tuple[Direction, Direction]] = [("sent", "received"), ("received", "sent")]
        for direction, other in turned:
            mine, yours = ours["first", "weights", direction], theirs["first", "weights", other]
            assert mine.payload_bytes == yours.payload_bytes == payload
            assert (mine.message_bytes, mine.messages) == (yours.message_bytes, yours.messages)
        assert {key[:2] for key in ours} == {
            ("first", "weights"),
            ("second", "weights"),
            (CONTROL, CONTROL),
        }


@pytest.mark.parametrize(
    ("checkpoint", "first"),
    [("000001.first.1", 1), ("000003.first.3", 3), ("000004.plain.1", 3), ("000006.second.1", 4)],
)
def test_a_generation_goes_on_where_its_checkpoint_is(
    checkpoint: str, first: int, run: Run
) -> None:
    run.aggregator.begin(1, checkpoint, [SECOND, FIRST])
    go_through(run, ALL[first:])


def test_a_generation_that_is_interrupted_between_collecting_and_replying_begins_again(
    run: Run,
) -> None:
    run.aggregator.begin(1, "", [FIRST])
    go_through(run, ALL[:1])
    waiting = run.swap("north", FIRST, 1)
    assert_is_waiting(run, "north")
    run.aggregator.end(InterruptedRun("south was lost"))
    with pytest.raises(InterruptedRun):
        waiting.result(WAIT_S)
    wait_until(lambda: run.threads() == [])
    run.aggregator.begin(2, "000001.first.1", [FIRST])
    links = {party: run.exchange.new_link(party, generation=2) for party in PASSIVES}
    again = [run.swap(party, FIRST, 1, links[party]) for party in PASSIVES]
    for future in again:
        assert_mean(future.result(WAIT_S), FIRST, 1)


def assert_is_waiting(run: Run, party: str) -> None:
    """The hub has the whole bundle of ``party``."""

    def is_waiting() -> bool:
        hub = run.aggregator._hub
        return isinstance(hub, ExchangeHub) and party in hub._arrived

    wait_until(is_waiting)


def test_the_clock_of_a_step_starts_with_the_first_party() -> None:
    # Both come within it on a busy machine too.
    run = Run(timeout_s=1.0)
    try:
        run.aggregator.begin(1, "", [SECOND])
        # The parties train on their own: longer than a step may take.
        time.sleep(1.2)
        first = [run.swap(party, SECOND, 0) for party in PASSIVES]
        for future in first:
            assert_mean(future.result(WAIT_S), SECOND, 0)
        # And then the other has its time from now on.
        waiting = run.swap("south", SECOND, 1)
        error = run.failed.get(timeout=WAIT_S)
        assert isinstance(error, LostError)
        assert (error.code, error.party) == (Code.STEP_TIMEOUT, "north")
        assert_names(str(error), "run.step_timeout_s", "north")
        with raises(LostError, Code.STEP_TIMEOUT, names=("run.step_timeout_s", "north")):
            waiting.result(WAIT_S)
    finally:
        run.close()


def test_weights_that_are_not_finite_end_the_run_and_name_the_party(run: Run) -> None:
    run.aggregator.begin(1, "", [SECOND])
    sick = to_bundle(Kind.WEIGHTS, {"w": torch.tensor([0.0, float("nan")])})
    north = run.swap("north", SECOND, 0)
    south = soon(
        lambda: run.exchange.link("south").swap(StepKey("second", 0, 0), sick, SECOND.spec)
    )
    error = run.failed.get(timeout=WAIT_S)
    assert isinstance(error, PeerError)
    assert (error.code, error.party) == (Code.NON_FINITE, "south")
    assert_names(str(error), "south")
    with raises(AbortedError, Code.ABORTED, names="south"):
        north.result(WAIT_S)
    with raises(PeerError, Code.NON_FINITE, names="south"):
        south.result(WAIT_S)


@pytest.mark.parametrize(
    ("sent", "step", "code"),
    [
        (
            to_bundle(Kind.WEIGHTS, {"w": torch.zeros(1, 2)}),
            StepKey("second", 0, 0),
            Code.TENSOR_MISMATCH,
        ),
        (
            to_bundle(Kind.WEIGHTS, {"w": torch.zeros(2000)}),
            StepKey("second", 0, 0),
            Code.TENSOR_TOO_LARGE,
        ),
        (
            to_bundle(Kind.EMBEDDING, {"w": torch.zeros(2)}),
            StepKey("second", 0, 0),
            Code.TENSOR_MISMATCH,
        ),
        (Bundle(Kind.ACK), StepKey("second", 0, 0), Code.TENSOR_MISMATCH),
        (
            to_bundle(Kind.WEIGHTS, {"w": torch.zeros(2)}),
            StepKey("second", 1, 0),
            Code.STEP_OUT_OF_ORDER,
        ),
        (
            to_bundle(Kind.WEIGHTS, {"w": torch.zeros(2)}),
            StepKey("plain", 0, 0),
            Code.STEP_OUT_OF_ORDER,
        ),
    ],
    ids=["shape", "size", "kind", "nothing", "round", "phase"],
)
def test_what_was_not_declared_ends_the_run(
    sent: Bundle, step: StepKey, code: Code, run: Run
) -> None:
    run.aggregator.begin(1, "", [SECOND])
    bad = soon(lambda: run.exchange.link("north").swap(step, sent, SECOND.spec))
    error = run.failed.get(timeout=WAIT_S)
    assert (error.code, error.party) == (code, "north")
    with raises(PeerError, code):
        bad.result(WAIT_S)


def test_a_reply_that_breaks_is_given_again(run: Run) -> None:
    run.aggregator.begin(1, "", [FIRST])
    with Proxy(run.exchange.address) as proxy:
        proxy.hold_at(received=700_000)
        link = run.exchange.new_link("north", address=proxy.address)
        north, south = run.swap("north", FIRST, 0, link), run.swap("south", FIRST, 0)
        assert_mean(south.result(WAIT_S), FIRST, 0)
        proxy.wait_until_held()
        proxy.cut()
        proxy.release()
        assert_mean(north.result(WAIT_S), FIRST, 0)
        later = [run.swap("north", FIRST, 1, link), run.swap("south", FIRST, 1)]
        for future in later:
            assert_mean(future.result(WAIT_S), FIRST, 1)


def test_a_stranger_has_no_part_in_it(run: Run) -> None:
    run.aggregator.begin(1, "", [SECOND])
    link = run.exchange.new_link("stranger")
    with raises(PeerError, Code.ROLE_MISMATCH, party="stranger"):
        soon(lambda: link.swap(StepKey("second", 0, 0), Bundle(Kind.WEIGHTS), SECOND.spec)).result(
            WAIT_S
        )
    # The others do not notice.
    go_through(run, ALL[3:])


def test_where_nobody_aggregates_nobody_is_served() -> None:
    run = Run()
    try:
        run.exchange.service.use(None)
        run.aggregator.begin(1, "anything at all", [])
        assert run.threads() == []
        link = run.exchange.new_link("north", reconnect_s=0.3)
        with raises(LostError, Code.PARTY_LOST, names="0.3"):
            soon(
                lambda: link.swap(StepKey("second", 0, 0), Bundle(Kind.WEIGHTS), SECOND.spec)
            ).result(WAIT_S)
    finally:
        run.close()


def test_a_checkpoint_of_another_recipe_is_refused(run: Run) -> None:
    with raises(InputError, Code.CHECKPOINT_INVALID, names="000001.third.1"):
        run.aggregator.begin(1, "000001.third.1", [FIRST])


def test_what_goes_wrong_after_the_end_of_a_generation_does_not_end_the_run(run: Run) -> None:
    run.aggregator.begin(1, "", [SECOND])
    hub = run.aggregator._hub
    assert hub is not None
    run.aggregator.end(InterruptedRun("south was lost"))
    run.aggregator._handle_failure(hub, PeerError(Code.NON_FINITE, "an old one"))
    wait_until(lambda: run.threads() == [])
    # Nothing goes on.
    run.aggregator.end(InterruptedRun("again"))


def test_a_server_that_stops_tells_those_who_wait(run: Run) -> None:
    run.aggregator.begin(1, "", [SECOND])
    waiting = run.swap("north", SECOND, 0)
    assert_is_waiting(run, "north")
    run.aggregator.end(LostError(Code.PARTY_LOST, "the server was stopped"))
    with raises(LostError, Code.PARTY_LOST):
        waiting.result(WAIT_S)
    wait_until(lambda: run.threads() == [])
