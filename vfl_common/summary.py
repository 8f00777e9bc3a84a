"""The data model of ``summary.json``, the results of a run, which the server computes from the
parties' reports.

Its texts are printable. NaN, which JSON does not have, is written as null and read as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vfl_common.bundle import CONTROL, Entry, InterfaceCount, TcpCount
from vfl_common.text import Number, Words


class _Model(BaseModel):
    # NaN is written as null, because a loss may have become NaN.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class PhaseTimes(_Model):
    """The time that a party's main thread spent in a phase's rounds, in seconds, in the process
    that reported.

    ``encode_s``: transforms, codec and serialisation. ``wait_s``: waiting for other parties and the
    network. ``decode_s``: deserialisation, checks and decoding. ``compute_s``: everything else,
    mainly the models. ``cpu_s``: the CPU time of all threads in these rounds, including gRPC's
    threads; equal to ``busy_s`` if all parties are in one process; 0 in summaries of older
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
        """The time without waiting."""
        return self.encode_s + self.decode_s + self.compute_s


class ArithmeticChange(_Model):
    """A party resumed with other arithmetic than that of the process that wrote the checkpoint.

    ``checkpoint``: the label of the checkpoint. ``differs``: a text for each difference, such as
    ``threads: 2, was 1``.
    """

    checkpoint: Words
    differs: list[Words]


class Arithmetic(_Model):
    """The hardware and software that determine the last bits of a party's results, in the party's
    first process.

    ``device``: ``cpu``, or the vendor's name of a GPU. ``instructions``: the instruction set of
    torch's CPU kernels. ``threads``: the number of threads of an operation. ``libraries``: {name:
    version}. ``settings``: {environment variable: value}, for variables with which libraries choose
    instruction sets. ``digests``: {group of operations: digest of the bits of their results for
    fixed inputs}. ``changes``: the resumes at which any of these differed. Up to the first change,
    the run equals an uninterrupted run bit for bit; after it, only up to rounding.
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
    """The results of one process of the run: a party or the server.

    ``device_name``: the vendor's name of the device; empty for the server. ``version``: the version
    of the program; empty in summaries of older versions. ``peak_memory_bytes``: the peak memory of
    the process's tensors on its GPU; None on a CPU. ``skipped_rounds``: the number of rounds that
    the party's bottom model has missed in whole or in part, because the other parties resumed at a
    later checkpoint or went on without it. ``returns``: how often the party came back while the
    other parties went on. ``rows``, ``common_rows``: the number of the party's rows (in a baseline,
    of the active party's rows), and of the rows that all parties hold; 0 if they were known before
    the run. ``times``: the time that each part of a step took; empty in summaries of older
    versions. ``arithmetic``: see ``Arithmetic``; None for the server and in summaries of older
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
    """The bytes of one kind that one process sent to another in one phase, as the sender counted
    them.
    """

    sender: Words
    receiver: Words
    phase: Words
    kind: Words
    payload_bytes: int
    message_bytes: int
    messages: int


# The separator between a split and the parties that hold some of its rows, in names of metrics.
_HELD_BY = " with "


def name_holders(split: str, parties: Iterable[str]) -> str:
    """Returns the key in ``Summary.metrics`` for the rows of a split that exactly these parties
    hold.
    """
    return f"{split}{_HELD_BY}{', '.join(parties)}"


def parse_holders(split: str, name: str) -> list[str]:
    """Returns the parties in a key that ``name_holders`` returned for ``split``; an empty list for
    other keys.
    """
    found_split, separator, parties = name.partition(_HELD_BY)
    return parties.split(", ") if separator and found_split == split else []


def name_key(split: str, key: str) -> str:
    """Returns the key in ``Summary.metrics`` for the rows of a split that one of ``rows.keys``
    matched.
    """
    return f"{split} by {key}"


class ByteCount(_Model):
    """The sum of the bytes and messages of several links."""

    payload_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0


class TcpBytes(_Model):
    """The kernel's byte counts of the connections between two processes, read at ``party``."""

    party: Words
    peer: Words
    sent_bytes: int
    received_bytes: int


class InterfaceBytes(_Model):
    """The kernel's byte counts of a network interface while the party ran. They include the traffic
    of all programs and the headers of every layer.
    """

    party: Words
    interface: Words
    sent_bytes: int
    received_bytes: int


class Bytes(_Model):
    """All byte counts of a run. ``interfaces``: the network interfaces without loopback.
    ``disagreements``: the links whose two ends counted different bytes.

    ``agrees``: whether both ends of every link counted the same bytes. Counts may differ for two
    reasons: a killed process loses its counts since its last checkpoint, and only the sender counts
    bytes that were in flight at an interruption.
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

    ``noise_multiplier``: the smallest noise multiplier of all parties. With moments division all
    parties use the same one.
    """

    epsilon: Number
    delta: Number
    mode: Words
    division: Words
    noise_multiplier: Number
    # A sentence that says what the budget covers and what it does not cover.
    statement: Words


_ABOUT_LABELS = {
    "": "",
    "none": "no label information",
    "split": "label information if the column that divides the rows depends on labels",
    "randomised": "label information after randomised response",
    "possible": "may carry label information",
}
AboutLabels = Literal["", "none", "split", "randomised", "possible"]
# The separator between the steps of ``ExchangeSummary.chain``.
ARROW = " -> "


class ExchangeSummary(_Model):
    """The tensors of a phase in one direction of one exchange, and the chain that transforms them.

    ``sender``, ``receiver``: a name in the recipe, "passive parties" or "every party". ``sent``:
    the kind and the tensors, with words for their sizes. ``how``: the method's own transformation
    of the tensors, if any. ``chain``: the transforms and codec that are applied, in order.
    ``when``: the time of the exchange, in words. ``labels``: whether the tensors of the active
    party depend on labels; empty for other senders, None in summaries of older versions.
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
        """Words that say whether the tensors depend on labels; empty if the active party does not
        send them.
        """
        return _ABOUT_LABELS[self.labels or ""]

    @property
    def carries(self) -> str:
        """Words that name the tensors, their transformation by the method, and whether they depend
        on labels.
        """
        sent = f"{self.sent} ({self.how})" if self.how else self.sent
        return f"{sent}, {self.about_labels}" if self.labels else sent


def describe_label_exposure(exchanges: Iterable[ExchangeSummary]) -> str:
    """Returns a sentence that says whether messages of the active party depend on labels; ''
    without exchanges and for summaries of older versions.
    """
    lines = list(exchanges)
    if not lines or any(line.labels is None for line in lines):
        return ""
    possible = dict.fromkeys(line.phase for line in lines if line.labels == "possible")
    noisy = dict.fromkeys(line.phase for line in lines if line.labels == "randomised")
    if not possible and not noisy:
        if any(line.labels == "split" for line in lines):
            return (
                "The division of the rows, which the active party sends, carries label information "
                "if the column that determines it (rows.split) depends on labels. No other message "
                "does: with other labels and the same column, the active party sends the same "
                "bytes. Metrics that the server shows, and scores that others get, depend on "
                "labels."
            )
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


def describe_linkage_exposure(exchanges: Iterable[ExchangeSummary]) -> str:
    """Returns a sentence about the encodings of a fuzzy linkage; '' if none are sent."""
    receivers = [line.receiver for line in exchanges if line.sent.startswith("rows encodings ")]
    if not receivers:
        return ""
    return (
        f"The encodings show {receivers[0]} how similar any two rows are: a server with a list of "
        "the same people named 100 % of 1,000 rows (public data, FEBRL 4). Try vfl leaks."
    )


class Absence(_Model):
    """Consecutive training steps of a phase that were computed without a party because it was late
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
    """The metric when only the parties ``parties`` contribute their embeddings, and a constant
    replaces the embeddings of all other parties.

    ``parties``: in the order of the recipe. ``validation``, ``test``: the metric of the split; None
    if the split was not evaluated or the metric is undefined for its rows.
    """

    parties: list[Words]
    validation: float | None = None
    test: float | None = None


class PartyValue(_Model):
    """A party's Shapley value and its standard error."""

    value: float
    error: float


class Worth(_Model):
    """The contribution of each party to the trained model, in the unit of ``metric``.

    ``lower_is_better``: whether a helpful party has a negative value. ``absent``: the replacement
    of an absent party's embeddings, ``mean`` or ``zero``. ``split``: the split on whose rows the
    Shapley values are computed. ``permutations``: the number of orders of the parties that were
    drawn; 0 if the values are exact. ``shapley``: {party: Shapley value}; the values add up to the
    metric with all parties minus the metric without parties. It is empty if the metric is undefined
    for the rows.
    """

    metric: Words
    lower_is_better: bool = False
    absent: Words
    split: Words
    permutations: int = 0
    subsets: list[SetQuality]
    shapley: dict[Words, PartyValue] = {}


class Summary(_Model):
    """The summary of a whole run.

    ``method``: the kinds of the phases that train. ``preset``: the recipe's preset; empty if no
    phase depends on it.
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
    # The time from the first start of training to the last report, in seconds.
    wall_s: Number
    interruptions: int = 0
    # The number of restarts of the server.
    server_restarts: int = 0
    # The parties that came too late, so that the model was trained without their data.
    without: list[Words] = []
    # The training steps that were computed without a party.
    absences: list[Absence] = []
    # The exchanges of all phases, as the active party reports them.
    exchanges: list[ExchangeSummary] = []
    # None unless a phase trains with differential privacy.
    privacy: Privacy | None = None
    # None unless a phase evaluates sets of parties.
    worth: Worth | None = None


def load_summary(path: Path) -> Summary:
    """Reads a summary. Raises OSError if the file cannot be read, and ValueError if it is not a
    summary.
    """
    return Summary.model_validate_json(path.read_bytes())


def gather_bytes(
    ledgers: Mapping[str, Iterable[Entry]],
    tcp: Mapping[str, Iterable[TcpCount]],
    *,
    server: str,
    phases: Sequence[str],
    interfaces: Mapping[str, Iterable[InterfaceCount]] = MappingProxyType({}),
) -> Bytes:
    """Merges the ledgers of all processes, {process: entries of its ledger}, with the phases in the
    given order.

    It compares the counts at both ends of each link. The server's sessions (phase ``control``) are
    an exception: they continue while the reports are made, so only the server's later count is
    used. The ledger files of both ends agree once all processes have ended.
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
    phase_order = {phase: number for number, phase in enumerate(phases)}
    for key in sorted(
        sent.keys() | received.keys(),
        key=lambda key: (phase_order.get(key[2], len(phase_order)), key),
    ):
        sent_entry, received_entry = sent.get(key), received.get(key)
        sender, receiver, phase, kind = key
        is_session = phase == CONTROL and server in (sender, receiver)
        if not is_session and _get_counts(sent_entry) != _get_counts(received_entry):
            disagreements.append(f"{sender} -> {receiver}, {phase}, {kind}")
        payload_bytes, message_bytes, messages = _get_counts(sent_entry or received_entry)
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


def _get_counts(entry: Entry | None) -> tuple[int, int, int]:
    return (
        (0, 0, 0) if entry is None else (entry.payload_bytes, entry.message_bytes, entry.messages)
    )


def _add(total: ByteCount, link: LinkBytes) -> ByteCount:
    return ByteCount(
        payload_bytes=total.payload_bytes + link.payload_bytes,
        message_bytes=total.message_bytes + link.message_bytes,
        messages=total.messages + link.messages,
    )
