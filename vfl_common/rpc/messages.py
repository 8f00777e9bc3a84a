"""What a party and the server say to each other: in words, as data, and as calls; over a wire or
without one.
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

# Of the run, as a party sees it; the server's are the same.
STATES = ("waiting", "running", "completed", "failed")
# All that a party says to the server: {message: in words, with every field}. A test holds it to the
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
# What a message without fields says by its coming.
EMPTY_MESSAGES = {
    "heartbeat": "it is alive",
    "alone": "active party: it needs nobody any more",
    "stopping": "somebody has stopped it",
}


# Bytes of what a party shows to all when it joins.
MOST_SHOWN = 1 << 16


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
    # Labels at which it can resume; '': at the run's beginning.
    checkpoints: tuple[str, ...] = ("",)
    exchange_address: str = ""
    # {group:name: distribution and version}.
    plugins: Mapping[str, str] = field(default_factory=dict)
    # See ``Spelling.filled``.
    filled_json: str = ""
    written: tuple[str, ...] = ()
    # The oldest protocol that this party can run the recipe with.
    oldest: int = OLDEST
    version: str = ""
    # Of the checkpoints, those at which it loses nothing; (): all.
    held: tuple[str, ...] = ()
    # Why it can no longer resume ``run_id``, in public words.
    unfit: str = ""
    # What all parties may read of this one, as JSON; see ``vfl_party.policy.meeting``.
    shown_json: str = ""


@dataclass(frozen=True)
class Start:
    """The server's answer once all parties have joined."""

    run_id: str
    generation: int
    # Empty: from the beginning.
    checkpoint: str
    # Of the active party.
    exchange_address: str
    # Parties that have left, because they are not needed any more.
    left: tuple[str, ...] = ()
    # The others are in the middle of the generation, and take this party back.
    returning: bool = False
    # That all parties speak in this generation.
    protocol: int = PROTOCOL
    # Why this party leaves the unfinished run that it has offered; '': it must not.
    anew: str = ""
    # {party: what it shows to all}, as it came.
    shown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The server's answer if the run is complete: this party did not hear of it, or did not note
    it, before it died.
    """

    run_id: str
    # The active party's.
    summary_json: str


@dataclass(frozen=True)
class ProgressUpdate:
    """A party's progress: ``round`` of ``rounds`` rounds are done, and ``batch`` of ``batches`` of
    the next one.
    """

    phase: str
    round: int
    rounds: int = 0
    batch: int = 0
    batches: int = 0
    # Since the start of the run.
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PartyReport:
    """A party's results at the end of a run.

    ``free_from``: the labels of its last checkpoint and of those after which it has exchanged
    nothing. ``without``: parties that the model was trained without. ``absences_json``: the steps
    that were computed without a party. ``peak_memory_bytes``: the peak of its GPU memory.
    ``skipped_rounds``: those whose updates it has lost. ``rows``, ``common_rows``: how many rows it
    holds, and how many of them all parties hold, if they have found these. ``times_json``: what its
    steps took their time for. ``returns``: how often it came back to others that had gone on.
    ``follows_preset``: the recipe's preset changes what a phase does; from the active party, as is
    ``worth_json``: the quality of each set of parties. ``arithmetic_json``: see ``Arithmetic``.
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
        """Returns what the server gets: the results, with the party's ledger and the kernel's
        counts.
        """
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
    """A party's connection to the server, as the party's main thread uses it; ``session.Session``
    is one over gRPC.
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
    def ledger(self) -> Ledger: ...

    @property
    def meter(self) -> TcpMeter: ...

    def join(self, joining: Joining) -> Start | Done:
        """Joins, or joins again after an interruption, and waits until all parties have joined.

        Raises InputError, PeerError, LostError.
        """
        ...

    def watch(self, watcher: Callable[[VflError], None] | None) -> None:
        """Has ``watcher`` called, from any thread, when the current generation ends; at once if it
        has ended.
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
        """Sends this party's results, and waits until it is not needed any more.

        Waits until every party has reported; a passive party with nothing left to send returns at
        once. Returns the summary (JSON) to the active party, '' to the others. Raises
        InterruptedRun if a party was lost meanwhile.
        """
        ...

    def lenient(self, on: bool) -> None:
        """Reports to the server whether this party, the active one, goes on without a passive party
        that is lost.
        """
        ...

    def alone(self) -> None:
        """Reports to the server that this party, the active one, needs nobody any more: others may
        leave.
        """
        ...

    def stopping(self) -> None:
        """Reports to the server that this party was stopped: the others wait for it, as for one
        that was lost.
        """
        ...

    def abort(self, error: BaseException) -> None:
        """Reports to the server that this party stops, and why (the public text only)."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


def plan_message(aggregations: Sequence[AggregationPlan]) -> control_pb2.PartyMessage:
    """Returns a party's plan, as the server gets it."""
    plan = control_pb2.Plan()
    for aggregation in aggregations:
        described = plan.aggregations.add(
            phase=aggregation.phase, rounds=aggregation.rounds, passive=aggregation.passive
        )
        for name, each in aggregation.spec.tensors.items():
            described.tensors.add(name=name, dtype=int(each.dtype), shape=each.shape)
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
    """Returns a party's progress, as the server gets it."""
    return control_pb2.PartyMessage(progress=control_pb2.Progress(**asdict(progress)))


def join_message(joining: Joining, protocol: int = PROTOCOL) -> control_pb2.PartyMessage:
    """Returns what a party says when it joins; ``protocol``: the newest that it offers to speak."""
    return control_pb2.PartyMessage(join=control_pb2.Join(protocol=protocol, **vars(joining)))


def lenient_message(on: bool) -> control_pb2.PartyMessage:
    """Returns what the active party says when it goes on without lost parties, or does not any
    more.
    """
    return control_pb2.PartyMessage(lenient=control_pb2.Lenient(on=on))


def alone_message() -> control_pb2.PartyMessage:
    """Returns what the active party says when it needs nobody any more."""
    return control_pb2.PartyMessage(alone=control_pb2.Alone())
