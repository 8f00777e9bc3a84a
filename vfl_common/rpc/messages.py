"""The messages between a party and the server: in words, as data, and as calls; over gRPC or in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from vfl_common.errors import VflError
from vfl_common.ledger import Ledger, fields_of
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.packing.coding import PLAIN
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.stages import AggregationPlan
from vfl_common.text import to_json

# The states of a run, at a party and at the server.
STATES = ("waiting", "running", "completed", "failed")
# All messages of a party to the server: {message: {field: in words}}. A test compares it with the
# schema.
PARTY_MESSAGES: dict[str, dict[str, str]] = {
    "join": {
        "role": "active or passive",
        "protocol": "the newest protocol that it speaks",
        "recipe_json": "the recipe",
        "job": "train or predict",
        "run_id": "the run to resume or predict with",
        "checkpoints": "checkpoints from which it can resume",
        "exchange_address": "active party: where passive parties reach it",
        "pid": "its process id",
        "device": "cpu or GPU",
        "device_name": "the device's name",
        "generation": "the generation in which it went on while the server was away",
        "plugins": "names and versions of the plug-ins that the recipe asks for",
        "filled_json": "the recipe with its defaults",
        "written": "the keys that the recipe's file has",
        "oldest": "the oldest protocol that will do for the recipe",
        "version": "the program's version",
        "held": "those of the checkpoints at which it loses nothing",
        "unfit": "why it can no longer resume the run",
        "shown_json": "what all parties may read: its policy in words, and its grant",
    },
    "plan": {"aggregations": "names and shapes of the weights that it shares"},
    "heartbeat": {},
    "progress": {
        "phase": "phase",
        "round": "rounds done",
        "rounds": "rounds planned",
        "batch": "batches done",
        "batches": "batches planned",
        "steps": "steps done",
        "metrics": "losses and metrics",
        "note": "a sentence for people",
    },
    "report": {
        "ledger": "its counts of bytes",
        "tcp": "the kernel's counts of its connections",
        "interfaces": "the kernel's counts of its network interfaces",
        "metrics_json": "active party: metrics",
        "steps": "steps done",
        "wall_s": "seconds",
        "privacy_json": "active party: what differential privacy cost",
        "exchanges_json": "active party: what the phases exchange",
        "free_from": "checkpoints after which it exchanges nothing",
        "without": "active party: parties that came too late",
        "absences_json": "active party: steps computed without a party",
        "peak_memory_bytes": "GPU memory",
        "skipped_rounds": "rounds whose updates it has lost or missed",
        "rows": "how many rows it holds, if the parties have found their common rows",
        "common_rows": "how many of them all parties hold",
        "times_json": "seconds of each phase: encoding, waiting, decoding, computing",
        "returns": "how often it came back to others that had gone on",
        "follows_preset": "active party: the recipe's preset changes what a phase does",
        "worth_json": "active party: the quality of each set of parties",
        "arithmetic_json": "processor, instruction set, threads, versions of libraries",
    },
    "abort": {
        "code": "why it stops",
        "message": "the public text of the error",
        "party": "whom it is about",
    },
    "alone": {},
    "stopping": {},
    "lenient": {"on": "active party: whether it goes on without a passive party"},
}
# The meaning of messages without fields.
EMPTY_MESSAGES = {
    "heartbeat": "it is alive",
    "alone": "active party: it needs nobody any more",
    "stopping": "somebody has stopped it",
}


# The most bytes of ``Joining.shown_json``.
MAX_SHOWN_BYTES = 1 << 16


@dataclass(frozen=True)
class Joining:
    """A party's facts for the server when it joins."""

    role: str
    recipe_json: str
    job: str
    pid: int
    device: str
    device_name: str = ""
    run_id: str = ""
    # The labels of checkpoints at which it can resume; '': the beginning of the run.
    checkpoints: tuple[str, ...] = ("",)
    exchange_address: str = ""
    # {group:name: distribution and version}.
    plugins: Mapping[str, str] = field(default_factory=dict)
    # The recipe with its defaults; see ``Spelling.filled``.
    filled_json: str = ""
    written: tuple[str, ...] = ()
    # The oldest protocol that this party can run the recipe with.
    oldest: int = OLDEST
    version: str = ""
    # Those of the checkpoints at which it loses nothing; (): all.
    held: tuple[str, ...] = ()
    # Why it can no longer resume ``run_id``, in a public sentence; '' if it can.
    unfit: str = ""
    # Facts of this party for all others, as JSON; see ``vfl_party.policy.meeting``.
    shown_json: str = ""


@dataclass(frozen=True)
class Start:
    """The server's answer once all parties have joined."""

    run_id: str
    generation: int
    # Empty: from the beginning.
    checkpoint: str
    # The address of the active party.
    exchange_address: str
    # Parties that have left, because they are not needed any more.
    left: tuple[str, ...] = ()
    # Whether this party comes back in the middle of a generation.
    returning: bool = False
    # The protocol of all parties in this generation.
    protocol: int = PROTOCOL
    # Why this party must leave the unfinished run that it has offered; '' if it must not.
    anew: str = ""
    # {party: its ``shown_json``}, unchecked.
    shown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The server's answer if the run is complete, and this party crashed before it learned or noted
    that.
    """

    run_id: str
    # The summary, for the active party only.
    summary_json: str


@dataclass(frozen=True)
class ProgressUpdate:
    """A party's progress: ``round`` of ``rounds`` rounds are done, and ``batch`` of ``batches`` in
    the next one.
    """

    phase: str
    round: int
    rounds: int = 0
    batch: int = 0
    batches: int = 0
    # The steps since the start of the run.
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PartyReport:
    """A party's results at the end of a run.

    ``free_from``: the labels of its last checkpoint and of those after which it has exchanged
    nothing. ``without``: parties without which the model was trained. ``absences_json``: the steps
    that were computed without a party. ``peak_memory_bytes``: the peak of its GPU memory.
    ``skipped_rounds``: those whose updates it has lost. ``rows``, ``common_rows``: the number of
    its rows, and of those that all parties hold, if the parties have aligned them. ``times_json``:
    how its steps spent their time. ``returns``: how often it came back to others that had gone on.
    ``follows_preset``: whether the recipe's preset changes what a phase does, and ``worth_json``,
    the metric of each set of parties, come from the active party. ``arithmetic_json``: see
    ``Arithmetic``.
    """

    metrics: dict[str, dict[str, float]]
    steps: int
    wall_s: float
    privacy_json: str = ""
    exchanges_json: str = ""
    free_from: Sequence[str] = ()
    without: Sequence[str] = ()
    absences_json: str = ""
    peak_memory_bytes: int | None = None
    skipped_rounds: int = 0
    rows: int = 0
    common_rows: int = 0
    times_json: str = ""
    returns: int = 0
    follows_preset: bool = False
    worth_json: str = ""
    arithmetic_json: str = ""

    def message(self, ledger: Ledger, meter: TcpMeter) -> control_pb2.PartyMessage:
        """Returns the message: the results, the party's ledger and the kernel's counts."""
        report = control_pb2.Report(
            steps=self.steps,
            wall_s=self.wall_s,
            metrics_json=to_json(self.metrics),
            privacy_json=self.privacy_json,
            exchanges_json=self.exchanges_json,
            free_from=self.free_from,
            without=self.without,
            absences_json=self.absences_json,
            skipped_rounds=self.skipped_rounds,
            rows=self.rows,
            common_rows=self.common_rows,
            times_json=self.times_json,
            returns=self.returns,
            follows_preset=self.follows_preset,
            worth_json=self.worth_json,
            arithmetic_json=self.arithmetic_json,
        )
        if self.peak_memory_bytes is not None:
            report.peak_memory_bytes = self.peak_memory_bytes
        for entry in ledger.entries():
            report.ledger.add(**fields_of(entry))
        for count in meter.counts():
            report.tcp.add(**fields_of(count))
        for through in meter.interfaces():
            report.interfaces.add(**fields_of(through))
        return control_pb2.PartyMessage(report=report)


class Membership(Protocol):
    """A party's connection to the server, for the party's main thread; ``session.Session`` is one
    over gRPC.
    """

    @property
    def me(self) -> str:
        """This party's name."""
        ...

    @property
    def server(self) -> str:
        """The server's name."""
        ...

    @property
    def ledger(self) -> Ledger:
        """The party's ledger."""
        ...

    @property
    def meter(self) -> TcpMeter:
        """The party's meter of TCP connections."""
        ...

    def join(self, joining: Joining) -> Start | Done:
        """Joins, or joins again after an interruption, and waits until all parties have joined.

        Raises InputError, PeerError, LostError.
        """
        ...

    def watch(self, watcher: Callable[[VflError], None] | None) -> None:
        """Registers ``watcher`` to be called from any thread when the current generation ends, or
        at once if it has ended.
        """
        ...

    def check(self) -> None:
        """Raises the error that ended the current generation, if any."""
        ...

    def plan(self, aggregations: Sequence[AggregationPlan]) -> None:
        """Sends the server this party's plan for this generation, once its rows are aligned."""
        ...

    def progress(self, progress: ProgressUpdate) -> None:
        """Sends the server this party's progress and metrics."""
        ...

    def report(self, report: PartyReport) -> str:
        """Sends this party's results, and waits until every party has reported; a passive party
        with nothing left to send returns at once.

        Returns the summary (JSON) at the active party, '' at the others. Raises InterruptedRun if a
        party was lost meanwhile.
        """
        ...

    def lenient(self, on: bool) -> None:
        """Tells the server whether this party, the active one, goes on without a passive party that
        is lost.
        """
        ...

    def alone(self) -> None:
        """Tells the server that this party, the active one, needs no other party any more, so that
        they may leave.
        """
        ...

    def stopping(self) -> None:
        """Tells the server that this party was stopped: the others wait for it, as for one that was
        lost.
        """
        ...

    def abort(self, error: BaseException) -> None:
        """Tells the server that this party stops, and why (only the public text)."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


def plan_message(aggregations: Sequence[AggregationPlan]) -> control_pb2.PartyMessage:
    """Returns the message of a party's plan."""
    plan = control_pb2.Plan()
    for aggregation in aggregations:
        described = plan.aggregations.add(
            phase=aggregation.phase, rounds=aggregation.rounds, passive=aggregation.passive
        )
        for name, tensor in aggregation.spec.tensors.items():
            described.tensors.add(name=name, dtype=int(tensor.dtype), shape=tensor.shape)
        for coding, to in ((aggregation.up, described.up), (aggregation.down, described.down)):
            if coding != PLAIN:
                to.name, to.bits, to.stochastic, to.seed = (
                    coding.name,
                    coding.bits,
                    coding.stochastic,
                    coding.seed,
                )
        if (draw := aggregation.draw) is not None:
            to_draw = described.draw
            to_draw.number, to_draw.rounds, to_draw.seed = draw.number, draw.rounds, draw.seed
    return control_pb2.PartyMessage(plan=plan)


def progress_message(progress: ProgressUpdate) -> control_pb2.PartyMessage:
    """Returns the message of a party's progress."""
    return control_pb2.PartyMessage(progress=control_pb2.Progress(**asdict(progress)))


def join_message(joining: Joining, protocol: int = PROTOCOL) -> control_pb2.PartyMessage:
    """Returns the message with which a party joins; ``protocol``: the newest that it offers."""
    return control_pb2.PartyMessage(join=control_pb2.Join(protocol=protocol, **vars(joining)))


def lenient_message(on: bool) -> control_pb2.PartyMessage:
    """Returns the message that the active party goes on without lost parties, or no longer does."""
    return control_pb2.PartyMessage(lenient=control_pb2.Lenient(on=on))


def alone_message() -> control_pb2.PartyMessage:
    """Returns the message that the active party needs no other party any more."""
    return control_pb2.PartyMessage(alone=control_pb2.Alone())
