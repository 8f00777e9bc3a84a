"""The server's part in training: it collects the parties' weights, averages them once a round
(FedHSSL, Alg. 1, lines 28-33) and sends the mean back. Each generation has a thread for this, next
to the session threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import HUGE, ITEM_BYTES, Buffer, Bundle, DType, Hub, Kind, StepKey
from vfl_common.errors import Code, InputError, InternalError, InterruptedRun, PeerError, VflError
from vfl_common.packing.bundles import decode, encode
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.service import FramePipe
from vfl_common.stages import AggregationPlan, parse_rounds_done

log = logging.getLogger(__name__)

# The name of the average's sender, from which the codec's random numbers are derived.
SERVER = "server"
_JOIN_S = 5.0
_NOTHING = Bundle(Kind.ACK)


class EndingHub(Hub, Protocol):
    """A hub for one generation of a run. It can be ended from another thread."""

    def end(self, error: VflError) -> None:
        """Wakes every waiting call with ``error``; any thread may call this."""
        ...


class BundleService(Protocol):
    """The service that passes the parties' bundles on to the current generation's hub."""

    def use(self, hub: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class AggregatedRun:
    """The run whose weights are aggregated: its parties in roster order, its passive parties, and
    the names of the recipe's phases in order.
    """

    run_id: str
    roster: Sequence[str]
    passives: Sequence[str]
    phases: Sequence[str]


class Aggregator:
    """Aggregates the weights of one run, one generation after the other.

    Args:
        service: The service that receives the parties' streams.
        run: The run whose weights are aggregated.
        timeout_s: The maximum time in which a connected party must send its weights for a step,
            counted from the first party's arrival.
        fail: Called, from the aggregation's thread, with the error that ends the run.
        align: Serves the alignment of the rows before the parties plan. Returns a function that
            sends the last answer. None if the parties align without the server.
        make_hub: Makes the hub for a generation. None for a hub with streams over gRPC.
        start: Called with a name and a function; it runs a generation's aggregation. None to run
            the aggregation in a new thread.
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
        self._make_hub = make_hub if make_hub is not None else self._make_grpc_hub
        self._start = start if start is not None else self._start_thread
        # The hub for the current generation.
        self._hub: EndingHub | None = None
        # Whether the rows of this generation have been aligned over its hub.
        self._aligned = False
        self._thread: threading.Thread | None = None

    def open(self, generation: int) -> None:
        """Serves the alignment at the start of a generation, if the parties align with the server.
        Returns at once.
        """
        if self._align is not None:
            hub = self._replace_hub(generation)
            self._start("alignment", partial(self._run, hub, partial(self._align_over, hub)))

    def _align_over(self, hub: EndingHub) -> None:
        assert self._align is not None  # noqa: S101 - open has looked
        answer = self._align(hub)
        # ``begin`` reads the flag once the parties have planned, which they do after the last
        # answer.
        self._aligned = True
        answer()

    def begin(
        self, generation: int, checkpoint: str, aggregations: Sequence[AggregationPlan]
    ) -> None:
        """Serves a generation that resumes from ``checkpoint``, once its parties have planned.
        Returns at once.

        Raises InputError if ``checkpoint`` is not a label of one of the recipe's phases.
        """
        if not aggregations:
            if self._align is None:
                # From here on, no party exchanges data with this server.
                self._service.close()
            return
        run = self._aggregated
        steps = [
            (step, run.passives if plan.passive else run.roster, plan)
            for step, plan in yield_remaining_steps(run.phases, checkpoint, aggregations)
        ]
        # A hub that served the alignment already has the parties' streams.
        if self._hub is None or not self._aligned:
            hub = self._replace_hub(generation)
        else:
            hub = self._hub
            if self._thread is not None:
                # The alignment's thread has answered its last step and is about to end.
                self._thread.join()
        self._start("aggregation", partial(self._run, hub, partial(_answer_all, hub, steps)))

    def _replace_hub(self, generation: int) -> EndingHub:
        """Makes the hub for a generation and ends the hub of the previous generation."""
        hub = self._make_hub(generation)
        self.end(InterruptedRun("another generation begins"))
        with self._lock:
            self._hub, self._aligned = hub, False
        self._service.use(hub)
        return hub

    def _start_thread(self, name: str, act: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=act, name=name, daemon=True)
        self._thread.start()

    def _make_grpc_hub(self, generation: int) -> ExchangeHub[FramePipe]:
        pipe = FramePipe(self._aggregated.run_id, generation, self._aggregated.roster)
        return ExchangeHub(pipe, timeout_s=self._timeout_s, from_first=True)

    def end(self, error: VflError) -> None:
        """Ends the generation; waiting parties get ``error``. Any thread may call this. Does
        nothing if no generation is open.
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
            is_current = self._hub is hub
        # If ``end`` was called first, the hub has ended for another reason.
        if is_current:
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
    """Answers one aggregation step. On return only the last reply is kept in memory, because a
    party may request it again.

    If parties are drawn for rounds, the parties of this round send their weights, and the parties
    of the next round receive the average. A party that only receives sends an empty message, and a
    party that only sends receives one.
    """
    senders, receivers = plan.givers(step.round, parties), plan.takers(step.round, parties)
    specs = dict.fromkeys(receivers, _NOTHING.spec()) | dict.fromkeys(senders, plan.sent)
    if len(specs) > len(senders):
        # Parties that only receive the average ask for it before the others have trained.
        hub.unhurried()
    bundles = hub.collect(step, specs)
    mean = average({party: bundles[party] for party in senders}, step, plan, warned)
    answers = dict.fromkeys(bundles, _NOTHING) | dict.fromkeys(receivers, mean)
    hub.reply(step, answers)


def average(
    bundles: Mapping[str, Bundle],
    step: StepKey,
    plan: AggregationPlan,
    warned: set[str] | None = None,
) -> Bundle:
    """Decodes the parties' weights, averages them in float32 and returns the encoded mean.

    ``warned``: The parties about which the log has already warned. None if there are none.

    Raises PeerError as ``compute_mean`` does, and if a party sent data that its codec cannot have
    written.
    Raises InputError (NON_FINITE) if the answer's codec cannot encode the mean.
    """
    up, down = plan.up.coder, plan.down.coder
    if up is not None:
        bundles = {
            party: decode(up, bundle, plan.spec, party=party, step=step)
            for party, bundle in bundles.items()
        }
    result = compute_mean(bundles, step)
    warned = set() if warned is None else warned
    if (party := find_outlier(bundles)) and party not in warned:
        warned.add(party)
        log.warning(
            f"the weights of {party} at {step} have a norm over 1,000 times that of any other "
            f"party: the mean is almost its own. Ask {party} whether its training goes well.",
            extra={"event": "outlier"},
        )
    return result if down is None else encode(down, result, plan.down.seed, SERVER, step)


def yield_remaining_steps(
    phases: Sequence[str], checkpoint: str, aggregations: Sequence[AggregationPlan]
) -> Iterator[tuple[StepKey, AggregationPlan]]:
    """Yields, in order, the remaining aggregation steps of a run that resumes from ``checkpoint``.
    An empty label means the beginning of the run.

    Raises InputError if ``checkpoint`` is not a label of one of ``phases``.
    """
    resumed_phase, rounds_before = parse_rounds_done(checkpoint) if checkpoint else (phases[0], 0)
    if resumed_phase not in phases:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"the checkpoint {checkpoint[:80]!r} belongs to no phase of this recipe. Begin a new "
            "run with vfl-server run --fresh.",
        )
    for aggregation in sorted(aggregations, key=lambda plan: phases.index(plan.phase)):
        distance = phases.index(aggregation.phase) - phases.index(resumed_phase)
        first_round = 0 if distance > 0 else rounds_before if distance == 0 else aggregation.rounds
        for round_ in range(first_round, aggregation.rounds):
            yield StepKey(aggregation.phase, round_, 0), aggregation


Numbers = npt.NDArray[np.floating]
# A party is an outlier if the norm of its weights is this many times the largest other norm.
_OUTLIER_RATIO = 1000.0


def compute_mean(bundles: Mapping[str, Bundle], step: StepKey) -> Bundle:
    """Returns the mean of all bundles, summed in roster order in float32.

    ``bundles``: {party: its weights}. At least one bundle; all have float32 tensors of the same
    names and shapes. They are not changed.

    Raises PeerError (NON_FINITE) if a party sent NaN, infinity, or numbers too large to train with.
    In the mean they would look like an error of the parties that receive it.
    """
    tensors = next(iter(bundles.values())).tensors
    return Bundle(
        Kind.WEIGHTS,
        {
            name: _average_tensor(name, buffer.shape, bundles, step)
            for name, buffer in tensors.items()
        },
    )


def _average_tensor(
    name: str, shape: tuple[int, ...], bundles: Mapping[str, Bundle], step: StepKey
) -> Buffer:
    total: Numbers | None = None
    for party, bundle in bundles.items():
        values = _view_as_array(bundle.tensors[name])
        minimum, maximum = values.min(initial=0.0), values.max(initial=0.0)
        if not (minimum >= -HUGE and maximum <= HUGE):
            finite = np.isfinite(minimum) and np.isfinite(maximum)
            raise PeerError(
                Code.NON_FINITE,
                f"tensor {name[:40]!r} of {party} at {step} holds numbers beyond {HUGE:g}, too "
                "large to train with"
                if finite
                else f"tensor {name[:40]!r} of {party} at {step} holds NaN or infinity",
                party=party,
            )
        if total is None:
            total = values.copy()
            continue
        total += values
    assert total is not None  # noqa: S101 - at least one party
    total /= total.dtype.type(len(bundles))
    return Buffer(DType.FLOAT32, shape, total.data.cast("B") if total.nbytes else memoryview(b""))


def find_outlier(bundles: Mapping[str, Bundle]) -> str:
    """Returns the party whose weights have a norm over 1,000 times the largest norm of any other
    party; '' if there is none.
    """
    norms = {party: _norm(bundle) for party, bundle in bundles.items()}
    (party, largest_norm), *smaller_norms = sorted(norms.items(), key=lambda pair: -pair[1])
    return (
        party if smaller_norms and largest_norm > _OUTLIER_RATIO * smaller_norms[0][1] > 0.0 else ""
    )


def _norm(bundle: Bundle) -> float:
    arrays = map(_view_as_array, bundle.tensors.values())
    return float(
        np.sqrt(sum(np.einsum("i,i->", values, values, dtype=np.float64) for values in arrays))
    )


def _view_as_array(buffer: Buffer) -> Numbers:
    return np.frombuffer(buffer.data, f"<f{ITEM_BYTES[DType.FLOAT32]}")
