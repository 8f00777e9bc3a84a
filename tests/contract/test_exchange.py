"""What Link and Hub promise, over every transport."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.exchanges import ACTIVE, PASSIVES, WAIT_S, exchange, soon
from tests.harness.errors import raises
from tests.harness.waiting import wait_until
from vfl_common.bundle import (
    PROTOCOL,
    Bundle,
    BundleSpec,
    Hub,
    Kind,
    Lenience,
    Link,
    StepKey,
    StepPassed,
    TensorSpec,
)
from vfl_common.errors import (
    AbortedError,
    Code,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
)
from vfl_party.base.devices import TORCH
from vfl_party.base.step_timing import Clock
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Exchange, Sent, f32
from vfl_party.outbound.exchange import Answering, Asking, to_bundle, to_tensors

pytestmark = pytest.mark.parametrize("transport", ["memory", "grpc"])

CPU = torch.device("cpu")
FIRST, SECOND = StepKey("train", 0, 0), StepKey("train", 0, 1)
NOTHING = BundleSpec(Kind.ACK)
ACK = Bundle(Kind.ACK)


def spec_for(kind: Kind, tensors: dict[str, Tensor]) -> BundleSpec:
    bundle = to_bundle(kind, tensors)
    return BundleSpec(
        kind, {name: TensorSpec(b.dtype, b.shape) for name, b in bundle.tensors.items()}
    )


def swap_back(transport: str, tensors: dict[str, Tensor]) -> None:
    """One party sends ``tensors``, gets them back, and both sides hold what was sent."""
    spec = spec_for(Kind.WEIGHTS, tensors)
    with exchange(transport, ["north"]) as found:
        asked = soon(
            lambda: found.link("north").swap(FIRST, to_bundle(Kind.WEIGHTS, tensors), spec)
        )
        collected = found.hub.collect(FIRST, spec)["north"]
        found.hub.reply(FIRST, {"north": collected})
        for bundle in (collected, asked.result(WAIT_S)):
            assert bundle.kind is Kind.WEIGHTS
            got = to_tensors(bundle, CPU)
            assert list(got) == list(tensors)
            for name, tensor in tensors.items():
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor), name


def test_every_dtype_comes_back_as_it_was(transport: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 100, (3, 5), generator=generator)
    tensors = {dtype.name.lower(): values.to(torch_dtype) for dtype, torch_dtype in TORCH.items()}
    assert len(tensors) == 7
    swap_back(transport, tensors)


def test_scalars_empty_tensors_and_odd_names(transport: str) -> None:
    swap_back(
        transport,
        {
            "scalar": torch.tensor(2.5),
            "no rows": torch.empty(0, 4),
            "": torch.empty(3, 0, dtype=torch.int64),
            "Größe\n": torch.tensor([1], dtype=torch.uint8),
            "transposed": torch.arange(6.0).reshape(2, 3).T,
        },
    )


def test_a_party_that_is_not_asked_may_be_at_a_later_step(transport: str) -> None:
    one = BundleSpec(Kind.ACK)
    with exchange(transport, ["north", "south"]) as found:
        early = soon(lambda: found.link("south").swap(SECOND, ACK, NOTHING))
        first = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        # Both bundles are here.
        wait_until(lambda: found.hub.pipe.waiting, lambda deliveries: deliveries >= 2)
        assert list(found.hub.collect(FIRST, {"north": one})) == ["north"]
        found.hub.reply(FIRST, {"north": ACK})
        first.result(WAIT_S)
        second = soon(lambda: found.link("north").swap(SECOND, ACK, NOTHING))
        assert list(found.hub.collect(SECOND, {"north": one, "south": one})) == ["north", "south"]
        found.hub.reply(SECOND, {"north": ACK, "south": ACK})
        assert [early.result(WAIT_S).kind, second.result(WAIT_S).kind] == [Kind.ACK, Kind.ACK]


def test_an_empty_bundle(transport: str) -> None:
    swap_back(transport, {})


def test_many_tensors(transport: str) -> None:
    swap_back(
        transport,
        {
            f"layer.{number}.weight": torch.full((number % 7, 3), float(number))
            for number in range(500)
        },
    )


def test_five_mebibytes(transport: str) -> None:
    generator = torch.Generator().manual_seed(2)
    # Boundaries of frames fall within and between tensors.
    swap_back(
        transport,
        {f"t{n}": torch.randn(n, generator=generator) for n in (1, 262_143, 700_001, 347_576)},
    )


def test_steps_of_several_parties_in_the_order_of_the_roster(transport: str) -> None:
    spec = BundleSpec(Kind.EMBEDDING, spec_for(Kind.EMBEDDING, {"z": torch.zeros(2)}).tensors)
    with exchange(transport) as found:

        def party(number: int, name: str) -> list[float]:
            got = []
            for batch in range(5):
                bundle = to_bundle(
                    Kind.EMBEDDING, {"z": torch.tensor([float(number), float(batch)])}
                )
                reply = found.link(name).swap(StepKey("train", 0, batch), bundle, spec)
                got.append(to_tensors(reply, CPU)["z"].sum().item())
            return got

        running = [
            soon(party, number, name) for number, name in reversed([*enumerate(PASSIVES, 1)])
        ]
        for batch in range(5):
            step = StepKey("train", 0, batch)
            received = found.hub.collect(step, spec)
            assert tuple(received) == PASSIVES
            values = {name: to_tensors(bundle, CPU)["z"] for name, bundle in received.items()}
            assert {name: z.tolist() for name, z in values.items()} == {
                "north": [1.0, batch],
                "south": [2.0, batch],
            }
            found.hub.reply(
                step, {name: to_bundle(Kind.EMBEDDING, {"z": 10 * z}) for name, z in values.items()}
            )
        south, north = (future.result(WAIT_S) for future in running)
    assert north == [10.0 * (1 + batch) for batch in range(5)]
    assert south == [10.0 * (2 + batch) for batch in range(5)]


Z = {"z": torch.zeros(4, 3)}
WANTED = spec_for(Kind.EMBEDDING, Z)
WRONG = {
    "shape": (Kind.EMBEDDING, {"z": torch.zeros(3, 4)}, Code.TENSOR_MISMATCH),
    "fewer rows": (Kind.EMBEDDING, {"z": torch.zeros(3, 3)}, Code.TENSOR_MISMATCH),
    "rank": (Kind.EMBEDDING, {"z": torch.zeros(12)}, Code.TENSOR_MISMATCH),
    "dtype": (Kind.EMBEDDING, {"z": torch.zeros(4, 3, dtype=torch.int32)}, Code.TENSOR_MISMATCH),
    "name": (Kind.EMBEDDING, {"y": torch.zeros(4, 3)}, Code.TENSOR_MISMATCH),
    "missing": (Kind.EMBEDDING, {}, Code.TENSOR_MISMATCH),
    "one more, empty": (Kind.EMBEDDING, Z | {"more": torch.zeros(0)}, Code.TENSOR_MISMATCH),
    "kind": (Kind.GRADIENT, Z, Code.TENSOR_MISMATCH),
    "larger": (Kind.EMBEDDING, {"z": torch.zeros(5, 3)}, Code.TENSOR_TOO_LARGE),
    "much larger": (Kind.EMBEDDING, {"z": torch.zeros(1024, 1024)}, Code.TENSOR_TOO_LARGE),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bundle_that_is_not_what_is_expected_ends_the_exchange(case: str, transport: str) -> None:
    kind, tensors, code = WRONG[case]
    with exchange(transport) as found:
        good = soon(lambda: found.link("north").swap(FIRST, to_bundle(Kind.EMBEDDING, Z), NOTHING))
        bad = soon(lambda: found.link("south").swap(FIRST, to_bundle(kind, tensors), NOTHING))
        with raises(PeerError, code, party="south") as caught:
            found.hub.collect(FIRST, WANTED)
        assert "south" in str(caught.value)
        found.hub.end(caught.value)
        with raises(PeerError, code):
            bad.result(WAIT_S)
        with pytest.raises(AbortedError) as aborted:
            good.result(WAIT_S)
        assert aborted.value.party == "south"


@pytest.mark.parametrize("case", WRONG)
def test_a_reply_that_is_not_what_is_expected_is_refused(case: str, transport: str) -> None:
    kind, tensors, code = WRONG[case]
    with exchange(transport, ["north"]) as found:
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, WANTED))
        found.hub.collect(FIRST, NOTHING)
        found.hub.reply(FIRST, {"north": to_bundle(kind, tensors)})
        with raises(PeerError, code, party=ACTIVE):
            asked.result(WAIT_S)


@pytest.mark.parametrize("other", [SECOND, StepKey("train", 1, 0), StepKey("evaluate", 0, 0)])
def test_a_step_that_is_not_under_way(other: StepKey, transport: str) -> None:
    with exchange(transport, ["north"]) as found:
        asked = soon(lambda: found.link("north").swap(other, ACK, NOTHING))
        with raises(PeerError, Code.STEP_OUT_OF_ORDER, party="north") as caught:
            found.hub.collect(FIRST, NOTHING)
        found.hub.end(caught.value)
        with raises(PeerError, Code.STEP_OUT_OF_ORDER):
            asked.result(WAIT_S)


def test_a_repeated_request_gets_the_same_reply_and_is_computed_once(transport: str) -> None:
    spec = spec_for(Kind.EMBEDDING, {"z": torch.zeros(1)})
    with exchange(transport, ["north"]) as found:

        def ask(step: StepKey, value: float) -> float:
            bundle = to_bundle(Kind.EMBEDDING, {"z": torch.tensor([value])})
            return to_tensors(found.link("north").swap(step, bundle, spec), CPU)["z"].item()

        def answer(step: StepKey, value: float) -> float:
            (got,) = found.hub.collect(step, spec).values()
            found.hub.reply(
                step, {"north": to_bundle(Kind.EMBEDDING, {"z": torch.tensor([value])})}
            )
            return to_tensors(got, CPU)["z"].item()

        first = soon(lambda: ask(FIRST, 1.0))
        assert answer(FIRST, 10.0) == 1.0
        assert first.result(WAIT_S) == 10.0
        # The hub is not even collecting.
        for again in (2.0, 3.0):
            assert soon(ask, FIRST, again).result(WAIT_S) == 10.0
        collecting = soon(lambda: answer(SECOND, 20.0))
        assert soon(lambda: ask(FIRST, 4.0)).result(WAIT_S) == 10.0
        assert not collecting.done()
        second = soon(lambda: ask(SECOND, 5.0))
        assert collecting.result(WAIT_S) == 5.0
        assert second.result(WAIT_S) == 20.0


def test_a_party_that_is_late_is_named(transport: str) -> None:
    # North comes within it on a busy machine too.
    with exchange(transport, timeout_s=2.0) as found:
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        with raises(LostError, Code.STEP_TIMEOUT, party="south") as caught:
            found.hub.collect(FIRST, NOTHING)
        found.hub.end(caught.value)
        with raises(LostError, Code.STEP_TIMEOUT, party="south"):
            asked.result(WAIT_S)


def test_a_late_party_is_left_out_and_answered_when_it_comes(transport: str) -> None:
    spec = spec_for(Kind.EMBEDDING, {"z": torch.zeros(1)})
    with exchange(transport) as found:

        def ask(party: str, step: StepKey, value: float) -> float:
            bundle = to_bundle(Kind.EMBEDDING, {"z": torch.tensor([value])})
            return to_tensors(found.link(party).swap(step, bundle, spec), CPU)["z"].item()

        values = zip(PASSIVES, (10.0, 11.0), strict=True)
        answers = {
            name: to_bundle(Kind.EMBEDDING, {"z": torch.tensor([value])}) for name, value in values
        }
        north = soon(lambda: ask("north", FIRST, 1.0))
        # North comes within it on a busy machine too.
        received = found.hub.collect(FIRST, spec, deadline_s=2.0)
        assert tuple(received) == ("north",)
        # The late one is owed an answer too.
        with pytest.raises(InternalError):
            found.hub.reply(FIRST, {"north": answers["north"]})
        found.hub.reply(FIRST, answers)
        assert north.result(WAIT_S) == 10.0
        second = soon(lambda: found.hub.collect(SECOND, spec))
        assert soon(lambda: ask("south", FIRST, 2.0)).result(WAIT_S) == 11.0
        later = [soon(ask, name, SECOND, 3.0) for name in PASSIVES]
        assert tuple(second.result(WAIT_S)) == PASSIVES
        found.hub.reply(SECOND, answers)
        assert [each.result(WAIT_S) for each in later] == [10.0, 11.0]


def test_a_deadline_is_waited_for_beyond_the_timeout(transport: str) -> None:
    with exchange(transport, timeout_s=0.5) as found:
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        began_s = time.monotonic()
        assert list(found.hub.collect(FIRST, NOTHING, deadline_s=2.0)) == ["north"]
        assert time.monotonic() - began_s >= 2.0
        found.hub.reply(FIRST, dict.fromkeys(PASSIVES, ACK))
        assert asked.result(WAIT_S).kind is Kind.ACK


def test_an_unhurried_hub_waits_beyond_the_timeout_once(transport: str) -> None:
    with exchange(transport, ["north"], timeout_s=0.5) as found:
        found.hub.unhurried()
        collected = soon(lambda: found.hub.collect(FIRST, NOTHING))
        with pytest.raises(TimeoutError):
            collected.result(1.0)
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        assert list(collected.result(WAIT_S)) == ["north"]
        found.hub.reply(FIRST, {"north": ACK})
        assert asked.result(WAIT_S).kind is Kind.ACK
        with raises(LostError, Code.STEP_TIMEOUT, party="north"):
            found.hub.collect(SECOND, NOTHING)


def test_an_unhurried_link_waits_beyond_the_timeout_once(transport: str) -> None:
    with exchange(transport, ["north"], link_timeout_s=0.5) as found:
        link = found.link("north")
        link.unhurried()
        asked = soon(lambda: link.swap(FIRST, ACK, NOTHING))
        found.hub.collect(FIRST, NOTHING)
        with pytest.raises(TimeoutError):
            asked.result(1.0)
        found.hub.reply(FIRST, {"north": ACK})
        assert asked.result(WAIT_S).kind is Kind.ACK
        with raises(LostError, Code.STEP_TIMEOUT, party=ACTIVE):
            link.swap(SECOND, ACK, NOTHING)


def test_each_bundle_is_told_of_while_others_are_on_their_way(transport: str) -> None:
    told: queue.SimpleQueue[tuple[str, Kind]] = queue.SimpleQueue()
    with exchange(transport) as found:
        collected = soon(
            lambda: found.hub.collect(
                FIRST, NOTHING, lambda party, got: told.put((party, got.kind))
            )
        )
        for party in reversed(PASSIVES):
            assert not collected.done()
            found.link(party).send(FIRST, ACK)
            assert told.get(timeout=WAIT_S) == (party, Kind.ACK)
        assert tuple(collected.result(WAIT_S)) == PASSIVES


def test_an_interruption_from_another_thread_wakes_collect_and_swap(transport: str) -> None:
    with exchange(transport) as found:
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        collected = soon(lambda: found.hub.collect(FIRST, NOTHING))
        began_s = time.monotonic()
        found.link("north").end(InterruptedRun("south was lost"))
        found.hub.end(InterruptedRun("south was lost"))
        with raises(InterruptedRun, Code.INTERRUPTED, names="south"):
            collected.result(WAIT_S)
        # In its own words, or in the hub's.
        with pytest.raises(InterruptedRun):
            asked.result(WAIT_S)
        # Not by a deadline.
        assert time.monotonic() - began_s < WAIT_S / 2


def test_what_has_ended_stays_ended(transport: str) -> None:
    with exchange(transport, ["north"]) as found:
        found.hub.end(InterruptedRun("first"))
        found.hub.end(InterruptedRun("second"))
        found.link("north").end(InterruptedRun("first"))
        for _ in range(2):
            with raises(InterruptedRun, Code.INTERRUPTED):
                soon(lambda: found.hub.collect(FIRST, NOTHING)).result(WAIT_S)
            with raises(InterruptedRun, Code.INTERRUPTED):
                soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING)).result(WAIT_S)


@dataclass(frozen=True)
class Found:
    """See ``vfl_party.outbound.exchange.Connections``."""

    link: Link | None = None
    hub: Hub | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    record: None = None
    protocol: int = PROTOCOL


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_named(value: float, transport: str) -> None:
    sick = {"z": torch.tensor([[0.0, value], [0.0, 0.0]])}
    both = Sent(Kind.EMBEDDING, {"z": f32(2, 2)})
    swap, plain = Exchange("z", both, both), Chains(Chain([]), Chain([]))
    with exchange(transport, ["north"]) as found:
        hub = Answering(swap, "phase", plain, Found(hub=found.hub), CPU, {})
        link = Asking(swap, "phase", plain, Found(link=found.link("north")), ACTIVE, CPU, {})
        asked = soon(lambda: link.swap(FIRST, {"z": torch.zeros(2, 2)}))
        hub.collect(FIRST)
        hub.reply(FIRST, {"north": sick})
        with raises(PeerError, Code.NON_FINITE, party=ACTIVE):
            asked.result(WAIT_S)
        sent = soon(lambda: link.swap(SECOND, sick))
        with raises(PeerError, Code.NON_FINITE, names="north", party="north") as caught:
            hub.collect(SECOND)
        found.hub.end(caught.value)
        with raises(PeerError, Code.NON_FINITE):
            sent.result(WAIT_S)


def test_a_hub_that_is_used_out_of_turn_is_a_defect(transport: str) -> None:
    with exchange(transport, ["north"]) as found:
        with pytest.raises(InternalError):
            found.hub.reply(FIRST, {"north": ACK})
        asked = soon(lambda: found.link("north").swap(FIRST, ACK, NOTHING))
        found.hub.collect(FIRST, NOTHING)
        with pytest.raises(InternalError):
            found.hub.collect(SECOND, NOTHING)
        for wrong in ({}, {"north": ACK, "south": ACK}):
            with pytest.raises(InternalError):
                found.hub.reply(FIRST, wrong)
        with pytest.raises(InternalError):
            found.hub.reply(SECOND, {"north": ACK})
        found.hub.reply(FIRST, {"north": ACK})
        assert asked.result(WAIT_S).kind is Kind.ACK


def test_what_was_sent_may_be_changed_while_the_reply_is_computed(transport: str) -> None:
    """``send`` and ``receive``: a party works on, in place, while the active party has its
    bundle.
    """
    z_BD = torch.zeros(400_000)
    spec = spec_for(Kind.EMBEDDING, {"z": z_BD})
    with exchange(transport, ["north"]) as found:
        link = found.link("north")
        for batch in range(3):
            step = StepKey("train", 0, batch)
            z_BD.fill_(batch)
            link.send(step, to_bundle(Kind.EMBEDDING, {"z": z_BD}))
            z_BD.fill_(99.0)
            received = found.hub.collect(step, spec)
            # Nobody is waiting for it yet.
            found.hub.reply(step, received)
            reply = soon(link.receive, step, spec).result(WAIT_S)
            assert to_tensors(reply, CPU)["z"].sum().item() == batch * 400_000


def test_the_sender_may_change_its_tensors_after_the_reply(transport: str) -> None:
    """The optimizer updates weights in place while frames may still be on their way."""
    weights = torch.zeros(400_000)
    spec = spec_for(Kind.WEIGHTS, {"w": weights})
    with exchange(transport, ["north"]) as found:
        asked: Any = soon(lambda: found.link("north").swap(FIRST, ACK, spec))
        found.hub.collect(FIRST, NOTHING)
        found.hub.reply(FIRST, {"north": to_bundle(Kind.WEIGHTS, {"w": weights})})
        weights.fill_(1.0)
        assert to_tensors(asked.result(WAIT_S), CPU)["w"].sum().item() == 0.0


def follow(
    link: Link, step: StepKey, last: StepKey, told: threading.Event
) -> list[tuple[StepKey, StepKey | None]]:
    """Asks step after step, and skips to the step that it is told; returns what came of each
    request.
    """
    seen: list[tuple[StepKey, StepKey | None]] = []
    while step <= last:
        try:
            link.swap(step, ACK, NOTHING)
            seen.append((step, None))
            step = StepKey(step.phase, step.round, step.batch + 1)
        except StepPassed as passed:
            seen.append((step, passed.now))
            step = passed.now
            told.set()
    return seen


STEPS = [StepKey("train", 0, batch) for batch in range(6)]


def go_on(hub: Hub, step: StepKey, lenience: Lenience) -> list[str]:
    """Collects, replies, and returns who was there."""
    came = [*hub.collect(step, NOTHING, lenience=lenience)]
    hub.reply(step, dict.fromkeys(came, ACK))
    return came


def test_steps_go_on_without_a_party_and_take_it_back(transport: str) -> None:
    brief, patient, told = Lenience(0.05, at_least=1), Lenience(WAIT_S), threading.Event()
    with exchange(transport) as found:
        for step in STEPS[:3]:
            asked = soon(lambda step=step: found.link("north").swap(step, ACK, NOTHING))
            assert go_on(found.hub, step, brief) == ["north"]
            asked.result(WAIT_S)
        south = soon(follow, found.link("south"), STEPS[0], STEPS[-1], told)
        collected = soon(go_on, found.hub, STEPS[3], patient)
        # Only then does north come, so that the step is still under way.
        assert told.wait(WAIT_S)
        north = soon(follow, found.link("north"), STEPS[3], STEPS[-1], threading.Event())
        came = [collected.result(WAIT_S), *(go_on(found.hub, step, patient) for step in STEPS[4:])]
        assert came == [["north", "south"]] * 3
        assert north.result(WAIT_S) == [(step, None) for step in STEPS[3:]]
        assert south.result(WAIT_S) == [(STEPS[0], STEPS[3]), *((step, None) for step in STEPS[3:])]


def test_a_party_that_is_away_is_waited_for_once(transport: str) -> None:
    with exchange(transport) as found:
        north = soon(follow, found.link("north"), STEPS[0], STEPS[2], threading.Event())
        assert go_on(found.hub, STEPS[0], Lenience(0.05, at_least=1)) == ["north"]
        # South has missed a step: nobody waits for it, however long the deadline is.
        for step in STEPS[1:3]:
            assert soon(go_on, found.hub, step, Lenience(1000.0)).result(WAIT_S) == ["north"]
        assert north.result(WAIT_S) == [(step, None) for step in STEPS[:3]]


def test_at_the_end_of_a_phase_who_was_away_is_told_that_it_is_over(transport: str) -> None:
    over = StepKey("train", 1, 0)
    with exchange(transport) as found:
        north = soon(follow, found.link("north"), STEPS[0], STEPS[0], threading.Event())
        assert go_on(found.hub, STEPS[0], Lenience(0.05, at_least=1)) == ["north"]
        assert north.result(WAIT_S) == [(STEPS[0], None)]
        settled = soon(found.hub.settle)
        after = StepKey("more", 0, 0)
        # It does not wait for south.
        asked = [soon(lambda: found.link("north").swap(after, ACK, NOTHING))]
        south = soon(follow, found.link("south"), STEPS[0], STEPS[-1], threading.Event())
        assert south.result(WAIT_S) == [(STEPS[0], over)]
        assert settled.result(WAIT_S) is None
        asked.append(soon(lambda: found.link("south").swap(after, ACK, NOTHING)))
        assert [*found.hub.collect(after, NOTHING)] == [*PASSIVES]
        found.hub.reply(after, dict.fromkeys(PASSIVES, ACK))
        assert [each.result(WAIT_S).kind for each in asked] == [Kind.ACK, Kind.ACK]


@pytest.mark.parametrize("how", ["ended", "late"])
def test_who_stays_away_at_the_end_of_a_phase(how: str, transport: str) -> None:
    # On a busy machine, a party needs some of it to come.
    with exchange(transport, timeout_s=WAIT_S if how == "ended" else 1.5) as found:
        north = soon(follow, found.link("north"), STEPS[0], STEPS[0], threading.Event())
        assert go_on(found.hub, STEPS[0], Lenience(0.05, at_least=1)) == ["north"]
        assert north.result(WAIT_S) == [(STEPS[0], None)]
        settled = soon(found.hub.settle)
        if how == "ended":
            found.hub.end(InterruptedRun("south is away"))
        with pytest.raises(InterruptedRun if how == "ended" else LostError):
            settled.result(WAIT_S)


def test_a_step_waits_for_as_many_parties_as_it_needs(transport: str) -> None:
    with exchange(transport, timeout_s=0.3) as found, raises(LostError, Code.STEP_TIMEOUT):
        found.hub.collect(STEPS[0], NOTHING, lenience=Lenience(0.05, at_least=1))


# -- several steps in flight


def numbered(batch: int, size: int = 2) -> Bundle:
    return to_bundle(Kind.EMBEDDING, {"z": torch.full((size,), float(batch))})


# Of one frame, of three.
@pytest.mark.parametrize("size", [2, 700_000])
@pytest.mark.parametrize("in_flight", [2, 4, 40])
def test_later_steps_are_sent_before_the_first_is_answered(
    transport: str, in_flight: int, size: int
) -> None:
    """Each party has as many under way as it may; all replies come, in order, also if one party is
    far ahead.
    """
    count = min(in_flight, 5) + 3
    spec = BundleSpec(Kind.EMBEDDING, spec_for(Kind.EMBEDDING, {"z": torch.zeros(size)}).tensors)
    with exchange(transport, in_flight=in_flight) as found:

        def party(name: str) -> list[float]:
            link, got, sent = found.link(name), [], 0
            for batch in range(count):
                while sent < min(count, batch + in_flight):
                    link.send(StepKey("train", 0, sent), numbered(sent, size))
                    sent += 1
                got.append(
                    to_tensors(link.receive(StepKey("train", 0, batch), spec), CPU)["z"][-1].item()
                )
            return got

        running = [soon(party, "north")]
        for batch in range(count):
            step = StepKey("train", 0, batch)
            if batch == 0:
                running.append(soon(party, "south"))
            received = found.hub.collect(step, spec)
            values = {name: to_tensors(bundle, CPU)["z"] for name, bundle in received.items()}
            assert [z[0].item() for z in values.values()] == [batch, batch]
            found.hub.reply(
                step, {name: to_bundle(Kind.EMBEDDING, {"z": 10 * z}) for name, z in values.items()}
            )
        assert [future.result(WAIT_S) for future in running] == [
            [10.0 * batch for batch in range(count)]
        ] * 2


def test_replies_wait_for_a_party_that_is_at_work(transport: str) -> None:
    spec = BundleSpec(Kind.EMBEDDING, spec_for(Kind.EMBEDDING, {"z": torch.zeros(2)}).tensors)
    with exchange(transport, ["north"], in_flight=3) as found:
        link = found.link("north")
        for batch in range(3):
            link.send(StepKey("train", 0, batch), numbered(batch))
        for batch in range(3):
            found.hub.reply(
                StepKey("train", 0, batch), found.hub.collect(StepKey("train", 0, batch), spec)
            )
        for batch in range(3):
            got = soon(link.receive, StepKey("train", 0, batch), spec).result(WAIT_S)
            assert to_tensors(got, CPU)["z"].tolist() == [batch, batch]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_step_that_is_left_out_is_out_of_order(transport: str, in_flight: int) -> None:
    with exchange(transport, ["north"], in_flight=in_flight) as found:
        link = found.link("north")
        first = soon(lambda: link.swap(FIRST, ACK, NOTHING))
        found.hub.collect(FIRST, NOTHING)
        found.hub.reply(FIRST, {"north": ACK})
        first.result(WAIT_S)
        link.send(StepKey("train", 0, 2), ACK)
        with raises(PeerError, Code.STEP_OUT_OF_ORDER):
            found.hub.collect(SECOND, NOTHING)


def test_an_end_reaches_a_party_with_several_steps_in_flight(transport: str) -> None:
    with exchange(transport, ["north"], in_flight=3) as found:
        link = found.link("north")
        for batch in range(3):
            link.send(StepKey("train", 0, batch), ACK)
        found.hub.collect(FIRST, NOTHING)
        waiting = soon(lambda: link.receive(FIRST, NOTHING))
        found.hub.end(InterruptedRun("over"))
        with pytest.raises(InterruptedRun):
            waiting.result(WAIT_S)
