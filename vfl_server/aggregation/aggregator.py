"""Collects, averages and answers: one thread a generation, beside the sessions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from vfl_common.bundle import Bundle, Kind, StepKey
from vfl_common.errors import Code, InputError, InternalError, InterruptedRun, VflError
from vfl_common.link import Hub
from vfl_common.packing.bundles import decode, encode
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.service import FramePipe
from vfl_common.stages import AggregationPlan, rounds_done
from vfl_server.aggregation.mean import mean, outlier

log = logging.getLogger(__name__)

# The sender of an average, in what is drawn for its codec.
SERVER = "server"
_JOIN_S = 5.0
_NOTHING = Bundle(Kind.ACK)


class EndingHub(Hub, Protocol):
    """The hub of one generation."""

    def end(self, error: VflError) -> None:
        """Wakes every waiting call with ``error``; any thread may call this."""
        ...


class BundleService(Protocol):
    """Brings the parties' bundles to the hub of the current generation."""

    def use(self, hub: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class AggregatedRun:
    """The run that is aggregated: its parties in roster order, those that are not the active one,
    and the names of the recipe's phases, in order.
    """

    run_id: str
    roster: Sequence[str]
    passives: Sequence[str]
    phases: Sequence[str]


class Aggregator:
    """The aggregation of one run, one generation after the other.

    Args:
        service: receives the parties' streams.
        run: whose weights are aggregated.
        timeout_s: the longest time of a living party for one step, counted from the first party's
            arrival.
        fail: called, from the aggregation's thread, with the error that ends the run.
        align: serves the alignment of the rows, before the parties plan, and returns what gives the
            last answer; None: they align without the server.
        make_hub: makes the hub of a generation; None: one for streams over gRPC.
        start: runs a generation's aggregation, under a name; None: in a thread of its own.
    """

    def __init__(
        self,
        service: BundleService,
        run: AggregatedRun,
        *,
        timeout_s: float,
        fail: Callable[[VflError], None],
        align: Callable[[Hub], Callable[[], None]] | None = None,
        make_hub: Callable[[int], EndingHub] | None = None,
        start: Callable[[str, Callable[[], None]], None] | None = None,
    ) -> None:
        self._service, self._aggregated = service, run
        self._timeout_s, self._fail, self._align = timeout_s, fail, align
        self._lock = threading.Lock()
        self._make_hub = make_hub if make_hub is not None else self._over_grpc
        self._start = start if start is not None else self._in_a_thread
        # The hub of the current generation.
        self._hub: EndingHub | None = None
        # Whether this generation is aligned with its hub.
        self._aligned = False
        self._thread: threading.Thread | None = None

    def open(self, generation: int) -> None:
        """Serves the alignment of a generation that starts, if the parties align with the server;
        returns at once.
        """
        if self._align is not None:
            hub = self._use_another(generation)
            self._start("alignment", partial(self._run, hub, partial(self._align_over, hub)))

    def _align_over(self, hub: EndingHub) -> None:
        assert self._align is not None  # noqa: S101 - open has looked
        answer = self._align(hub)
        # Before the parties have the last answer: then they plan, and ``begin`` looks.
        self._aligned = True
        answer()

    def begin(
        self, generation: int, checkpoint: str, aggregations: Sequence[AggregationPlan]
    ) -> None:
        """Serves a generation that resumes from ``checkpoint``, once its parties have planned;
        returns at once.

        Raises InputError if ``checkpoint`` is no label.
        """
        if not aggregations:
            if self._align is None:
                # No party swaps anything from here on.
                self._service.close()
            return
        run = self._aggregated
        steps = [
            (step, run.passives if plan.passive else run.roster, plan)
            for step, plan in remaining(run.phases, checkpoint, aggregations)
        ]
        # Otherwise the parties' streams are open at the hub already.
        if self._hub is None or not self._aligned:
            hub = self._use_another(generation)
        else:
            hub = self._hub
            if self._thread is not None:
                # It has answered the last step, and ends.
                self._thread.join()
        self._start("aggregation", partial(self._run, hub, partial(_answer_all, hub, steps)))

    def _use_another(self, generation: int) -> EndingHub:
        """Makes the hub of a generation, and ends that of the one before."""
        hub = self._make_hub(generation)
        self.end(InterruptedRun("another generation begins"))
        with self._lock:
            self._hub, self._aligned = hub, False
        self._service.use(hub)
        return hub

    def _in_a_thread(self, name: str, act: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=act, name=name, daemon=True)
        self._thread.start()

    def _over_grpc(self, generation: int) -> ExchangeHub[FramePipe]:
        pipe = FramePipe(self._aggregated.run_id, generation, self._aggregated.roster)
        return ExchangeHub(pipe, timeout_s=self._timeout_s, from_first=True)

    def end(self, error: VflError) -> None:
        """Ends the generation, from any thread; waiting parties get ``error``. Does nothing if
        there is none.
        """
        with self._lock:
            hub, self._hub = self._hub, None
        if hub is not None:
            hub.end(error)

    def close(self) -> None:
        """Ends the generation and waits for its thread. Accepts no stream from now on."""
        self.end(InterruptedRun("the server has ended"))
        self._service.close()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_S)

    def _run(self, hub: EndingHub, serve: Callable[[], None]) -> None:
        try:
            serve()
        except InterruptedRun:
            return
        except VflError as error:
            self._handle_failure(hub, error)
        except Exception as error:
            log.exception("aggregation")
            self._handle_failure(hub, InternalError(f"aggregation: {error!r}"))

    def _handle_failure(self, hub: EndingHub, error: VflError) -> None:
        hub.end(error)
        with self._lock:
            goes_on = self._hub is hub
        # Otherwise ``end`` was called first, for another reason.
        if goes_on:
            self._fail(error)


def _answer_all(
    hub: EndingHub, steps: Sequence[tuple[StepKey, Sequence[str], AggregationPlan]]
) -> None:
    warned: set[str] = set()
    for step, parties, plan in steps:
        _answer(hub, step, parties, plan, warned)


def _answer(
    hub: EndingHub,
    step: StepKey,
    parties: Sequence[str],
    plan: AggregationPlan,
    warned: set[str],
) -> None:
    """Answers one step. Frees its memory on return, except for the last reply, which a party may
    request again.

    Of parties that are drawn for rounds, those of this one give their weights, and those of the
    next one take the average; who does only one of the two sends, or gets, an empty message.
    """
    givers, takers = plan.givers(step.round, parties), plan.takers(step.round, parties)
    specs = dict.fromkeys(takers, _NOTHING.spec()) | dict.fromkeys(givers, plan.sent)
    if len(specs) > len(givers):
        # Parties that only take the average ask before the others have trained.
        hub.unhurried()
    bundles = hub.collect(step, specs)
    mean = average({party: bundles[party] for party in givers}, step, plan, warned)
    answers = dict.fromkeys(bundles, _NOTHING) | dict.fromkeys(takers, mean)
    hub.reply(step, answers)


def average(
    bundles: Mapping[str, Bundle],
    step: StepKey,
    plan: AggregationPlan,
    warned: set[str] | None = None,
) -> Bundle:
    """Returns the mean of what the parties have sent, as it crosses: read, averaged in float32,
    written.

    ``warned``: the parties that the log has warned of already; None: no party.

    Raises PeerError as ``mean``, and if a party sent what its codec never writes; InputError
    (NON_FINITE) if the codec of the answer cannot write the mean.
    """
    up, down = plan.up.coder, plan.down.coder
    if up is not None:
        bundles = {
            party: decode(up, bundle, plan.spec, party=party, step=step)
            for party, bundle in bundles.items()
        }
    result = mean(bundles, step)
    warned = set() if warned is None else warned
    if (party := outlier(bundles)) and party not in warned:
        warned.add(party)
        log.warning(
            f"the weights of {party} at {step} have a norm over 1,000 times that of any other "
            f"party: the mean is almost its own. Ask {party} whether its training goes well.",
            extra={"event": "outlier"},
        )
    return result if down is None else encode(down, result, plan.down.seed, SERVER, step)


def remaining(
    phases: Sequence[str], checkpoint: str, aggregations: Sequence[AggregationPlan]
) -> Iterator[tuple[StepKey, AggregationPlan]]:
    """Yields the remaining steps, in order, of a run that resumes from ``checkpoint`` (empty: the
    beginning).

    Raises InputError if ``checkpoint`` is no label of a phase.
    """
    at, done = rounds_done(checkpoint) if checkpoint else (phases[0], 0)
    if at not in phases:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"the checkpoint {checkpoint[:80]!r} belongs to no phase of this recipe. Begin a new "
            "run with vfl-server run --fresh.",
        )
    for aggregation in sorted(aggregations, key=lambda plan: phases.index(plan.phase)):
        place = phases.index(aggregation.phase) - phases.index(at)
        first = 0 if place > 0 else done if place == 0 else aggregation.rounds
        for round_ in range(first, aggregation.rounds):
            yield StepKey(aggregation.phase, round_, 0), aggregation
