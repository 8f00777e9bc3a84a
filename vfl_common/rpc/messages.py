"""The messages between a party and the server: their descriptions in words, their data classes, the
interface ``Membership`` that sends them over gRPC or within one process, and failure messages. Of
an error only ``error.public`` is sent, so that peers see no private text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from vfl_common.bundle import OLDEST, PROTOCOL, Ledger, get_fields
from vfl_common.errors import (
    CATALOGUE,
    AbortedError,
    Code,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.packing.coders import PLAIN
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.counters import TcpMeter
from vfl_common.stages import AggregationPlan
from vfl_common.text import LINE, clean, to_json

# The states of a run, at a party and at the server.
STATES = ("waiting", "running", "completed", "failed")
# All messages of a party to the server: {message: {field: description}}. A test compares it with
# the schema.
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
# The maximum size of ``Joining.shown_json``, in bytes.
MAX_SHOWN_BYTES = 1 << 16


@dataclass(frozen=True)
class Joining:
    """The facts that a party sends to the server when it joins."""

    role: str
    recipe_json: str
    job: str
    pid: int
    device: str
    device_name: str = ""
    run_id: str = ""
    # The labels of the checkpoints from which the party can resume; '' is the beginning of the run.
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
    # The checkpoints from which the party can resume without losing work; () means all of them.
    held: tuple[str, ...] = ()
    # A public sentence that says why the party can no longer resume ``run_id``; '' if it can.
    unfit: str = ""
    # Facts of this party that the server passes on to all parties, as JSON: see
    # ``vfl_party.policy.meeting``.
    shown_json: str = ""


@dataclass(frozen=True)
class Start:
    """The server's answer once all parties have joined."""

    run_id: str
    generation: int
    # The label of the checkpoint from which the run resumes; '' is the beginning.
    checkpoint: str
    # The address of the active party.
    exchange_address: str
    # The parties that have left because they are no longer needed.
    left: tuple[str, ...] = ()
    # Whether this party returns in the middle of a generation.
    returning: bool = False
    # The protocol of all parties in this generation.
    protocol: int = PROTOCOL
    # The reason why this party must begin a new run instead of the unfinished one that it has
    # offered; '' if it need not.
    anew: str = ""
    # {party: its ``shown_json``}, which is not checked yet.
    shown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The server's answer if the run is complete, but this party crashed before it recorded
    that.
    """

    run_id: str
    # The summary of the run as JSON; only the active party gets it.
    summary_json: str


@dataclass(frozen=True)
class ProgressUpdate:
    """A party's progress: ``round`` of ``rounds`` rounds are done, and ``batch`` of ``batches``
    batches of the next round.
    """

    phase: str
    round: int
    rounds: int = 0
    batch: int = 0
    batches: int = 0
    # The number of steps since the start of the run.
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PartyReport:
    """A party's results at the end of a run.

    ``free_from``: the labels of the party's last checkpoint and of the checkpoints after which it
    has exchanged nothing. ``without``: the parties without which the model was trained.
    ``absences_json``: the steps that were computed without a party. ``peak_memory_bytes``: the peak
    of the party's GPU memory. ``skipped_rounds``: the number of rounds whose updates the party has
    lost. ``rows``, ``common_rows``: the number of the party's rows, and of the rows that all
    parties hold, if the parties have aligned them. ``times_json``: the time that each part of a
    step took. ``returns``: how often the party came back while the other parties had gone on.
    ``follows_preset``: whether the recipe's preset changes what a phase does (active party only).
    ``worth_json``: the metric with each set of parties (active party only). ``arithmetic_json``:
    see ``Arithmetic``.
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
        """Returns the message to the server, with these results, the party's ledger and the
        kernel's byte counts.
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
            report.ledger.add(**get_fields(entry))
        for count in meter.counts():
            report.tcp.add(**get_fields(count))
        for interface_count in meter.interfaces():
            report.interfaces.add(**get_fields(interface_count))
        return control_pb2.PartyMessage(report=report)


class Membership(Protocol):
    """A party's connection to the server, for the party's main thread. ``session.Session``
    implements it over gRPC.
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
        """The byte counts of the party's TCP connections."""
        ...

    def join(self, joining: Joining) -> Start | Done:
        """Joins the run, or joins it again after an interruption, and waits until all parties have
        joined.

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
        """Sends this party's plan for this generation to the server. It is called once the party's
        rows are aligned.
        """
        ...

    def progress(self, progress: ProgressUpdate) -> None:
        """Sends this party's progress and metrics to the server."""
        ...

    def report(self, report: PartyReport) -> str:
        """Sends this party's results and waits until every party has reported. A passive party that
        has nothing left to send returns at once.

        Returns the summary (JSON) at the active party, and '' at other parties. Raises
        InterruptedRun if a party was lost meanwhile.
        """
        ...

    def lenient(self, on: bool) -> None:
        """Reports to the server whether this party, the active party, goes on without a lost
        passive party.
        """
        ...

    def alone(self) -> None:
        """Reports to the server that this party, the active party, no longer needs the other
        parties, so that they may leave.
        """
        ...

    def stopping(self) -> None:
        """Reports to the server that this party was stopped. The other parties wait for it as for a
        lost party.
        """
        ...

    def abort(self, error: BaseException) -> None:
        """Reports to the server that this party ends the run, with the public text of ``error``."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


def make_plan_message(aggregations: Sequence[AggregationPlan]) -> control_pb2.PartyMessage:
    """Returns the message of a party's plan."""
    plan = control_pb2.Plan()
    for aggregation in aggregations:
        aggregation_message = plan.aggregations.add(
            phase=aggregation.phase, rounds=aggregation.rounds, passive=aggregation.passive
        )
        for name, tensor in aggregation.spec.tensors.items():
            aggregation_message.tensors.add(name=name, dtype=int(tensor.dtype), shape=tensor.shape)
        for coding, coding_message in (
            (aggregation.up, aggregation_message.up),
            (aggregation.down, aggregation_message.down),
        ):
            if coding != PLAIN:
                (
                    coding_message.name,
                    coding_message.bits,
                    coding_message.stochastic,
                    coding_message.seed,
                ) = (
                    coding.name,
                    coding.bits,
                    coding.stochastic,
                    coding.seed,
                )
        if (draw := aggregation.draw) is not None:
            draw_message = aggregation_message.draw
            draw_message.number, draw_message.rounds, draw_message.seed = (
                draw.number,
                draw.rounds,
                draw.seed,
            )
    return control_pb2.PartyMessage(plan=plan)


def progress_message(progress: ProgressUpdate) -> control_pb2.PartyMessage:
    """Returns the message of a party's progress."""
    return control_pb2.PartyMessage(progress=control_pb2.Progress(**asdict(progress)))


def join_message(joining: Joining, protocol: int = PROTOCOL) -> control_pb2.PartyMessage:
    """Returns the message with which a party joins. ``protocol``: the newest protocol that it
    offers.
    """
    return control_pb2.PartyMessage(join=control_pb2.Join(protocol=protocol, **vars(joining)))


def lenient_message(on: bool) -> control_pb2.PartyMessage:
    """Returns the message that says whether the active party goes on without lost parties."""
    return control_pb2.PartyMessage(lenient=control_pb2.Lenient(on=on))


def alone_message() -> control_pb2.PartyMessage:
    """Returns the message that says that the active party no longer needs the other parties."""
    return control_pb2.PartyMessage(alone=control_pb2.Alone())


def to_failure(error: BaseException) -> failure_pb2.Failure:
    """Returns the failure message with the public part of ``error``. An exception that is not a
    VflError becomes INTERNAL, without its text.
    """
    if not isinstance(error, VflError):
        return failure_pb2.Failure(code=Code.INTERNAL, message=CATALOGUE[Code.INTERNAL].public)  # type: ignore[arg-type]
    # The text may quote a peer, with characters that a message cannot hold.
    text = clean(error.public, LINE)
    return failure_pb2.Failure(code=int(error.code), message=text, party=error.party)  # type: ignore[arg-type]


def format_refusal(party: str, code: Code) -> str:
    """Returns a sentence for the other parties that says why a party does not join, without private
    values.
    """
    meaning = CATALOGUE[code]
    reason = meaning.public.replace("a file of the party", "one of its files")
    reason = reason.replace("the party's", "its").replace("the party ", "it ")
    return f"{party} {'cannot take part' if meaning.own else 'was refused'}: {reason}"


def from_failure(failure: failure_pb2.Failure, *, sender: str, me: str) -> VflError:
    """Returns the error that a received failure raises in this process. ``me``: this party's name.

    A failure that names this party, or no party, keeps its code and so its exit code. A failure
    that names another party becomes an AbortedError. If a failure with an ``own`` code names no
    party, it is about its sender. An unknown code, from a later release, becomes INTERNAL with the
    same text.
    """
    try:
        code = Code(failure.code)
    except ValueError:
        code = Code.INTERNAL
    text = clean(failure.message) or CATALOGUE[code].public
    if code is Code.INTERRUPTED:
        return InterruptedRun(text)
    if code in (Code.PARTY_LOST, Code.STEP_TIMEOUT):
        return LostError(code, text, party=failure.party).privately(
            f"{sender} stopped the run: {text}"
        )
    party = failure.party or (sender if CATALOGUE[code].own else "")
    if party not in ("", me):
        about = f" because of {clean(party, 64)}" if party != sender else ""
        return AbortedError(f"{sender} stopped the run{about}: {text}", party=party)
    return PeerError(code, text, party=failure.party).privately(f"{sender} refused: {text}")
