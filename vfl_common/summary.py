"""``summary.json``: the results of a run, which the server makes from the parties' reports.

Its texts are printable, and its numbers are valid JSON: NaN is written as null, and read as NaN.
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
    """How a party's main thread spent the time of a phase's rounds, in seconds, in the process that
    reported.

    ``encode_s``: the chain of transforms, and frames. ``wait_s``: waiting for the other parties and
    the network. ``decode_s``: frames, checks, and the inverse of the chain. ``compute_s``: the
    rest, mainly the models. ``cpu_s``: the CPU time of all threads in these rounds, including
    gRPC's; ``busy_s`` if all parties are in one process; 0 in summaries of older versions.
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
        """The time without waiting."""
        return self.encode_s + self.decode_s + self.compute_s


class ArithmeticChange(_Model):
    """A party's resume with other arithmetic than in the process that wrote the checkpoint.

    ``checkpoint``: its label. ``differs``: a text for each difference, such as
    ``threads: 2, was 1``.
    """

    checkpoint: Words
    differs: list[Words]


class Arithmetic(_Model):
    """What determines the last bits of a party's numbers, in its first process if it had several.

    ``device``: ``cpu``, or the vendor's name of a GPU. ``instructions``: the instruction set of
    torch's own kernels on the CPU. ``threads``: those of an operation. ``libraries``: {name:
    version}. ``settings``: {environment variable: value}, for the variables with which libraries
    choose instruction sets. ``digests``: {group of operations: digest of the bits of fixed
    results}. ``changes``: the resumes at which any of these differed; before the first of them the
    run equals an uninterrupted one bit for bit, and after it only up to rounding.
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
    """One process of the run: a party, or the server.

    ``device_name``: the vendor's name of the device; empty for the server. ``version``: the version
    of the program; empty in summaries of older versions. ``peak_memory_bytes``: the peak memory of
    this process's tensors on its GPU; None on a CPU. ``skipped_rounds``: the rounds that this
    party's bottom model has missed in whole or in part, because the others resumed at a later
    checkpoint than it had, or because it came back while they went on; ``returns``: how often it
    came back. ``rows``, ``common_rows``: the number of its rows (in a baseline, those of the party
    with the labels), and of those that all parties hold; 0 if these were known before. ``times``:
    how its steps spent their time; empty in summaries of older versions. ``arithmetic``: what
    determines the last bits of its numbers; None for the server, and in summaries of older
    versions.
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


# Separates a split from the parties that hold some of its rows.
_HELD_BY = " with "


def name_holders(split: str, parties: Iterable[str]) -> str:
    """Returns the name in ``Summary.metrics`` of the rows of a split that exactly these parties
    hold.
    """
    return f"{split}{_HELD_BY}{', '.join(parties)}"


def parse_holders(split: str, name: str) -> list[str]:
    """Returns the parties in a name that ``held_by`` returned for ``split``; none for other
    names.
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
    """The kernel's count on a network interface while the party ran: all programs, headers of every
    layer.
    """

    party: Words
    interface: Words
    sent_bytes: int
    received_bytes: int


class Bytes(_Model):
    """All counts of bytes. ``interfaces``: without the loopback interface. ``disagreements``: the
    links whose ends counted different bytes.

    ``agrees``: whether both ends of each link counted the same bytes. They differ in two cases: a
    killed process loses its counts since its last checkpoint, and only the sender counts the bytes
    in flight at an interruption.
    """

    total: ByteCount
    by_phase: dict[Words, ByteCount]
    by_link: list[LinkBytes]
    tcp: list[TcpBytes]
    interfaces: list[InterfaceBytes] = []
    agrees: bool
    disagreements: list[Words] = []


class Privacy(_Model):
    """The joint privacy budget of all parties' training.

    ``noise_multiplier``: the smallest of all parties; with moments division all use the same one.
    """

    epsilon: Number
    delta: Number
    mode: Words
    division: Words
    noise_multiplier: Number
    # One sentence about what the budget covers and what it does not.
    statement: Words


_ABOUT_LABELS = {
    "": "",
    "none": "no label information",
    "randomised": "label information after randomised response",
    "possible": "may carry label information",
}


AboutLabels = Literal["", "none", "randomised", "possible"]


# Separates the steps of ``ExchangeSummary.chain``.
ARROW = " -> "


class ExchangeSummary(_Model):
    """The tensors of a phase in one direction of one exchange, and the chain that transforms them.

    ``sender``, ``receiver``: a name of the recipe, "passive parties" or "every party". ``sent``:
    kind and tensors, with words for sizes. ``how``: how the method itself has transformed them, if
    it has. ``chain``: the steps applied to them, in order. ``when``: in words. ``labels``: whether
    the tensors of the active party depend on labels; empty for all other senders, None in the
    summary of an older version.
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
        """Whether the tensors depend on labels, in words; empty unless the active party sends
        them.
        """
        return _ABOUT_LABELS[self.labels or ""]

    @property
    def carries(self) -> str:
        """The tensors, how the method has transformed them, and whether they depend on labels."""
        sent = f"{self.sent} ({self.how})" if self.how else self.sent
        return f"{sent}, {self.about_labels}" if self.labels else sent


def label_statement(exchanges: Iterable[ExchangeSummary]) -> str:
    """Returns a statement whether messages of the active party depend on the labels; empty without
    exchanges, and for those of an older version.
    """
    lines = list(exchanges)
    if not lines or any(line.labels is None for line in lines):
        return ""
    possible = dict.fromkeys(line.phase for line in lines if line.labels == "possible")
    noisy = dict.fromkeys(line.phase for line in lines if line.labels == "randomised")
    if not possible and not noisy:
        return (
            "No message of the active party carries label information: with other labels it sends "
            "the same bytes. Metrics that the server shows, and scores that others get, depend on "
            "labels."
        )
    sentences = []
    if noisy:
        sentences.append(
            "Messages of the active party depend on training labels only after randomised response "
            f"(task.label_epsilon): {', '.join(noisy)}."
        )
    if possible:
        sentences.append(
            f"Messages of the active party may carry label information: {', '.join(possible)}."
        )
    return " ".join(sentences)


class Absence(_Model):
    """Consecutive training steps of a phase that were computed without a party, because it was late
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
    """The metric with the embeddings of some parties, and a constant for those of the others.

    ``parties``: those with their embeddings, in the order of the recipe. ``validation``, ``test``:
    None if the split was not evaluated, or if the metric is undefined for its rows.
    """

    parties: list[Words]
    validation: float | None = None
    test: float | None = None


class PartyValue(_Model):
    """A Shapley value, and its standard error."""

    value: float
    error: float


class Worth(_Model):
    """The contribution of each party to the trained model, in the unit of ``metric``.

    ``lower_is_better``: whether a party that helps has a negative value. ``absent``: the stand-in
    for an absent party's embeddings, ``mean`` or ``zero``. ``split``: the rows of the Shapley
    values. ``permutations``: how many orders of the parties were drawn; 0: the values are exact.
    ``shapley``: {party: its value}; their sum is the metric with all parties minus that with none.
    Empty if the metric is undefined for the rows.
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
    # {split: {metric: value}}, from the active party.
    metrics: dict[Words, dict[Words, Number]]
    bytes: Bytes
    parties: list[PartySummary]
    steps: int
    # From the first start of training to the last report.
    wall_s: Number
    interruptions: int = 0
    # The count of restarts of the server.
    server_restarts: int = 0
    # Parties that came too late, so that the model was trained without their data.
    without: list[Words] = []
    # Training steps that were computed without a party.
    absences: list[Absence] = []
    # The phases' exchanges, as the active party reports them.
    exchanges: list[ExchangeSummary] = []
    # None unless a phase trains with differential privacy.
    privacy: Privacy | None = None
    # None unless a phase evaluates sets of parties.
    worth: Worth | None = None


def load_summary(path: Path) -> Summary:
    """Reads a summary. Raises OSError, or ValueError if the file is not one."""
    return Summary.model_validate_json(path.read_bytes())


def gather_bytes(
    ledgers: Mapping[str, Iterable[Entry]],
    tcp: Mapping[str, Iterable[TcpCount]],
    *,
    server: str,
    phases: Sequence[str],
    interfaces: Mapping[str, Iterable[InterfaceCount]] = MappingProxyType({}),
) -> Bytes:
    """Merges the ledgers of all processes ({process: its entries}), with phases in the given order.

    It compares both ends of each link, except for the server's sessions (phase ``control``): these
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
