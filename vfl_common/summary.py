"""``summary.json``: a run's results, made by the server from the parties' reports.

Its texts are printable, and its numbers are JSON: NaN is written as null, and read as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vfl_common.ledger import CONTROL, Entry, InterfaceCount, TcpCount
from vfl_common.text import Number, Words


class _Model(BaseModel):
    # A loss may have become NaN.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class PhaseTimes(_Model):
    """What a party's main thread spent the time of a phase's rounds on, in seconds; of the process
    that reported.

    ``encode_s``: through the chain and into frames. ``wait_s``: for the other parties and the
    network. ``decode_s``: out of frames, checked, and back through the chain. ``compute_s``: all
    else, the models above all. ``cpu_s``: the processor time of all its threads in these rounds,
    gRPC's among them; ``busy_s`` if all parties are in one process; 0 in summaries of older
    versions.
    """

    phase: Words
    steps: int = 0
    encode_s: Number = 0.0
    wait_s: Number = 0.0
    decode_s: Number = 0.0
    compute_s: Number = 0.0
    cpu_s: Number = 0.0

    @property
    def busy_s(self) -> float:
        """All of the time but waiting."""
        return self.encode_s + self.decode_s + self.compute_s


class ArithmeticChange(_Model):
    """A party's resume with other arithmetic than that of the process that wrote the checkpoint.

    ``checkpoint``: its label. ``differs``: a text for each difference, such as
    ``threads: 2, was 1``.
    """

    checkpoint: Words
    differs: list[Words]


class Arithmetic(_Model):
    """What decides the last bits of a party's numbers; of its first process if it has several.

    ``device``: ``cpu``, or the maker's name for a GPU. ``instructions``: the instruction set of
    torch's own kernels on the CPU. ``threads``: inside an operation. ``libraries``: {name:
    version}. ``settings``: {environment variable: value}, of those by which the libraries choose
    instruction sets. ``digests``: {group of operations: digest of the bits of fixed results}.
    ``changes``: the resumes at which any of these differed; from the first of them on the run
    equals an undisturbed one to rounding, and before it bit for bit.
    """

    device: Words
    processor: Words
    instructions: Words
    threads: int
    libraries: dict[Words, Words]
    settings: dict[Words, Words] = {}
    digests: dict[Words, Words] = {}
    changes: list[ArithmeticChange] = []

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        device = [self.device] if self.device != "cpu" else []
        versions = [f"{name} {number}" for name, number in self.libraries.items()]
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join(
            [*device, self.processor, self.instructions, threads, *versions, *settings]
        )


class PartySummary(_Model):
    """One process of the run; the server is one of them.

    ``device_name``: the maker's name for the device; empty for the server. ``version``: of the
    program; empty in summaries of older versions. ``peak_memory_bytes``: the most memory that this
    process's tensors took on its GPU at once; None on a CPU. ``skipped_rounds``: the rounds that
    this party's encoder lacks in whole or in part, because the others resumed at a later checkpoint
    than it had, or because it came back while they went on; ``returns``: how often it did.
    ``rows``, ``common_rows``: how many rows it holds, in a baseline the party with the labels, and
    how many of them all parties hold; 0 if these were known. ``times``: what its steps took their
    time for; empty in summaries of older versions. ``arithmetic``: what decides the last bits of
    its numbers; None for the server, and in summaries of older versions.
    """

    name: Words
    role: Literal["active", "passive", "server"]
    pid: int
    device: Words
    device_name: Words = ""
    version: Words = ""
    peak_memory_bytes: int | None = None
    steps: int = 0
    wall_s: Number = 0.0
    skipped_rounds: int = 0
    returns: int = 0
    rows: int = 0
    common_rows: int = 0
    times: list[PhaseTimes] = []
    arithmetic: Arithmetic | None = None


class LinkBytes(_Model):
    """The sender's count of the bytes from one process to another, in one phase and of one kind."""

    sender: Words
    receiver: Words
    phase: Words
    kind: Words
    payload_bytes: int
    message_bytes: int
    messages: int


# Between a split and the parties that hold some of its rows.
_HELD_BY = " with "


def held_by(split: str, parties: Iterable[str]) -> str:
    """Returns how ``Summary.metrics`` names the rows of a split that exactly these parties hold."""
    return f"{split}{_HELD_BY}{', '.join(parties)}"


def holders_in(split: str, name: str) -> list[str]:
    """Returns the parties in a name that ``held_by`` gives for ``split``; none if it is no such
    name.
    """
    of, with_, parties = name.partition(_HELD_BY)
    return parties.split(", ") if with_ and of == split else []


class ByteCount(_Model):
    """A sum of links."""

    payload_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0


class TcpBytes(_Model):
    """The kernel's count of the connections between two processes, as ``party`` sees them."""

    party: Words
    peer: Words
    sent_bytes: int
    received_bytes: int


class InterfaceBytes(_Model):
    """The kernel's count on an interface of a party's machine while it ran: all programs, headers
    of every layer.
    """

    party: Words
    interface: Words
    sent_bytes: int
    received_bytes: int


class Bytes(_Model):
    """All counts. ``interfaces``: without the loopback interface. ``disagreements``: the links
    whose ends differ.

    ``agrees``: True if both ends of each link counted the same bytes. They differ in two cases: a
    killed process loses its counts since its last checkpoint; bytes in flight at an interruption
    are counted by the sender only.
    """

    total: ByteCount
    by_phase: dict[Words, ByteCount]
    by_link: list[LinkBytes]
    tcp: list[TcpBytes]
    interfaces: list[InterfaceBytes] = []
    agrees: bool
    disagreements: list[Words] = []


class Privacy(_Model):
    """The joint privacy budget of all parties' training, which none exceeds.

    ``noise_multiplier``: the smallest of any party; with moments division all use the same.
    """

    epsilon: Number
    delta: Number
    mode: Words
    division: Words
    noise_multiplier: Number
    # One sentence: what is covered and what is not.
    statement: Words


_ABOUT_LABELS = {
    "": "",
    "none": "no label information",
    "randomised": "label information after randomised response",
    "possible": "may carry label information",
}


AboutLabels = Literal["", "none", "randomised", "possible"]


# Between the steps of ``ExchangeSummary.chain``.
ARROW = " -> "


class ExchangeSummary(_Model):
    """The tensors of a phase in one direction of one exchange, and the chain through which they
    leave.

    ``sender``, ``receiver``: a name of the recipe, "passive parties" or "every party". ``sent``:
    kind and tensors, with words for sizes. ``how``: what the method itself has done to them, if
    anything. ``chain``: the steps applied to them, in order. ``when``: in words. ``labels``: of
    what the active party sends, whether it depends on labels; empty for all other senders, None
    in the summary of an older version.
    """

    phase: Words
    exchange: Words
    sender: Words
    receiver: Words
    sent: Words
    chain: Words
    when: Words
    how: Words = ""
    labels: AboutLabels | None = None

    @property
    def about_labels(self) -> str:
        """Whether the tensors depend on labels, in words; empty for all but the active party."""
        return _ABOUT_LABELS[self.labels or ""]

    @property
    def carries(self) -> str:
        """What crosses, for people, and what the method has done to it."""
        sent = f"{self.sent} ({self.how})" if self.how else self.sent
        return f"{sent}, {self.about_labels}" if self.labels else sent


def label_statement(exchanges: Iterable[ExchangeSummary]) -> str:
    """Returns a sentence about the labels: whether a message of the active party depends on them.
    Empty without exchanges, or if an older version has written them.
    """
    lines = list(exchanges)
    if not lines or any(line.labels is None for line in lines):
        return ""
    possible = dict.fromkeys(line.phase for line in lines if line.labels == "possible")
    noisy = dict.fromkeys(line.phase for line in lines if line.labels == "randomised")
    shown = "Metrics that the server shows, and scores that others get, depend on labels."
    if not possible and not noisy:
        return (
            "No message of the active party carries label information: with other labels it would "
            f"send the same bytes. {shown}"
        )
    found = []
    if noisy:
        found.append(
            "Messages of the active party depend on training labels after randomised response "
            f"alone (task.label_epsilon): {', '.join(noisy)}."
        )
    if possible:
        found.append(
            f"Messages of the active party may carry label information: {', '.join(possible)}."
        )
    return " ".join(found)


class Absence(_Model):
    """Successive training steps of a phase that were computed without a party, because it was late
    or away.
    """

    phase: Words
    party: Words
    first_round: int
    first_batch: int
    last_round: int
    last_batch: int
    steps: int


class SetQuality(_Model):
    """The metric with the embeddings of some parties, and a stand-in for each other one.

    ``parties``: those that are there, in the order of the recipe. ``validation``, ``test``: None if
    the split was not evaluated, or if the metric is undefined for its rows.
    """

    parties: list[Words]
    validation: float | None = None
    test: float | None = None


class PartyValue(_Model):
    """A Shapley value, and its standard error."""

    value: float
    error: float


class Worth(_Model):
    """What each party is worth to the trained model, in the unit of ``metric``.

    ``lower_is_better``: of the metric; a party that helps then has a negative value. ``absent``:
    what stands in for an absent party, ``mean`` or ``zero``. ``split``: the rows of the Shapley
    values. ``permutations``: how many orders of the parties were drawn; 0: the values are exact.
    ``shapley``: {party: its value}; their sum is the quality together minus that of none. Empty if
    the metric is undefined for the rows.
    """

    metric: Words
    lower_is_better: bool = False
    absent: Words
    split: Words
    permutations: int = 0
    subsets: list[SetQuality]
    shapley: dict[Words, PartyValue] = {}


class Summary(_Model):
    """The whole run.

    ``method``: the kinds of the phases that train. ``preset``: empty if none of them depends on it.
    """

    run_id: Words
    name: Words
    job: Literal["train", "predict"]
    method: Words
    preset: Words
    seed: int
    recipe_digest: Words
    # Split -> name -> value, from the active party.
    metrics: dict[Words, dict[Words, Number]]
    bytes: Bytes
    parties: list[PartySummary]
    steps: int
    # From the first start of training to the last report.
    wall_s: Number
    interruptions: int = 0
    # Processes of the server that took the run up again.
    server_restarts: int = 0
    # Parties that came too late: the model has not seen their data.
    without: list[Words] = []
    # Training steps that were computed without a party.
    absences: list[Absence] = []
    # The phases' exchanges, as the active party reports them.
    exchanges: list[ExchangeSummary] = []
    # If a phase trains with differential privacy.
    privacy: Privacy | None = None
    # If a phase evaluates sets of parties.
    worth: Worth | None = None


def load_summary(path: Path) -> Summary:
    return Summary.model_validate_json(path.read_bytes())


def gather_bytes(
    ledgers: Mapping[str, Iterable[Entry]],
    tcp: Mapping[str, Iterable[TcpCount]],
    *,
    server: str,
    phases: Sequence[str],
    interfaces: Mapping[str, Iterable[InterfaceCount]] = MappingProxyType({}),
) -> Bytes:
    """Joins the ledgers of all processes ({process: its entries}) into one account, with phases in
    the given order.

    Compares both ends of each link, except for the server's sessions (phase ``control``): these
    continue while the reports are made, so the server's later count is used. Both ends' ledger
    files agree once all processes have ended.
    """
    sent: dict[tuple[str, str, str, str], Entry] = {}
    received: dict[tuple[str, str, str, str], Entry] = {}
    for name, entries in ledgers.items():
        for entry in entries:
            if entry.direction == "sent":
                sent[name, entry.peer, entry.phase, entry.kind] = entry
            else:
                received[entry.peer, name, entry.phase, entry.kind] = entry
    links: list[LinkBytes] = []
    disagreements: list[str] = []
    by_phase: dict[str, ByteCount] = {}
    place = {phase: number for number, phase in enumerate(phases)}
    for key in sorted(
        sent.keys() | received.keys(), key=lambda key: (place.get(key[2], len(place)), key)
    ):
        ours, theirs = sent.get(key), received.get(key)
        sender, receiver, phase, kind = key
        session = phase == CONTROL and server in (sender, receiver)
        if not session and _counts(ours) != _counts(theirs):
            disagreements.append(f"{sender} -> {receiver}, {phase}, {kind}")
        payload_bytes, message_bytes, messages = _counts(ours or theirs)
        links.append(
            LinkBytes(
                sender=sender,
                receiver=receiver,
                phase=phase,
                kind=kind,
                payload_bytes=payload_bytes,
                message_bytes=message_bytes,
                messages=messages,
            )
        )
        by_phase[phase] = _add(by_phase.get(phase, ByteCount()), links[-1])
    total = ByteCount()
    for link in links:
        total = _add(total, link)
    kernel = [
        TcpBytes(
            party=party,
            peer=count.peer,
            sent_bytes=count.sent_bytes,
            received_bytes=count.received_bytes,
        )
        for party, counts in tcp.items()
        for count in counts
    ]
    machines = [
        InterfaceBytes(
            party=party,
            interface=c.interface,
            sent_bytes=c.sent_bytes,
            received_bytes=c.received_bytes,
        )
        for party, counts in interfaces.items()
        for c in counts
    ]
    return Bytes(
        total=total,
        by_phase=by_phase,
        by_link=links,
        tcp=kernel,
        interfaces=machines,
        agrees=not disagreements,
        disagreements=disagreements,
    )


def _counts(entry: Entry | None) -> tuple[int, int, int]:
    return (
        (0, 0, 0) if entry is None else (entry.payload_bytes, entry.message_bytes, entry.messages)
    )


def _add(total: ByteCount, link: LinkBytes) -> ByteCount:
    return ByteCount(
        payload_bytes=total.payload_bytes + link.payload_bytes,
        message_bytes=total.message_bytes + link.message_bytes,
        messages=total.messages + link.messages,
    )
