"""Reads and checks the reports that parties send at the end of a run or when they stop the run.
Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pydantic import TypeAdapter

from vfl_common.bundle import Entry, InterfaceCount, TcpCount
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.stages import MAX_ROUNDS
from vfl_common.summary import (
    Absence,
    Arithmetic,
    ExchangeSummary,
    PhaseTimes,
    Privacy,
    Worth,
)
from vfl_common.text import clean, number
from vfl_server.control.membership import Member

# The maximum number of characters in a name.
MAX_TEXT = 200
# The maximum number of names in a report, and of further names for each party in the run. An entry
# of the ledger has four names.
MAX_TEXTS, MORE_TEXTS = 16_384, 256
# The maximum number of characters in a JSON text.
MAX_JSON = 16_384
# The maximum number of characters in the JSON of absences, times, worth or arithmetic.
MAX_ABSENCES = 1 << 20


def is_sound(report: control_pb2.Report, parties: int = 0) -> bool:
    """Returns whether ``report`` can be read and is within this module's limits. ``parties``: The
    number of parties in the run.
    """
    texts = [
        text
        for entry in report.ledger
        for text in (entry.peer, entry.phase, entry.kind, entry.direction)
    ]
    texts += [count.peer for count in report.tcp] + list(report.free_from)
    texts += [count.interface for count in report.interfaces] + list(report.without)
    return (
        len(texts) <= MAX_TEXTS + MORE_TEXTS * parties
        and all(len(text) <= MAX_TEXT for text in texts)
        and max(len(report.metrics_json), len(report.privacy_json), len(report.exchanges_json))
        <= MAX_JSON
        and metrics_of(report) is not None
        and (not report.privacy_json or privacy_of(report) is not None)
        and exchanges_of(report) is not None
        and len(report.absences_json) <= MAX_ABSENCES
        and absences_of(report) is not None
        and len(report.times_json) <= MAX_ABSENCES
        and times_of(report) is not None
        and len(report.worth_json) <= MAX_ABSENCES
        and (not report.worth_json or worth_of(report) is not None)
        and len(report.arithmetic_json) <= MAX_ABSENCES
        and (not report.arithmetic_json or arithmetic_of(report) is not None)
    )


def get_report_facts(
    report: control_pb2.Report,
) -> dict[str, int | float | list[PhaseTimes] | Arithmetic | None]:
    """Returns the facts of a report that go into the party's entry of the summary."""
    peak = report.peak_memory_bytes if report.HasField("peak_memory_bytes") else None
    skipped = {"skipped_rounds": min(report.skipped_rounds, MAX_ROUNDS), "returns": report.returns}
    rows = {"rows": report.rows, "common_rows": report.common_rows}
    times = {"times": times_of(report) or []}
    done = {"steps": report.steps, "wall_s": round(report.wall_s, 3), "peak_memory_bytes": peak}
    return {**done, **skipped, **rows, **times, "arithmetic": arithmetic_of(report)}


def interfaces_of(report: control_pb2.Report) -> list[InterfaceCount]:
    """Reads the interface counts that a party reported."""
    return [
        InterfaceCount(count.interface, count.sent_bytes, count.received_bytes)
        for count in report.interfaces
    ]


def ledger_of(report: control_pb2.Report) -> tuple[list[Entry], list[TcpCount]]:
    """Reads the ledger entries and the kernel's TCP byte counts that a party reported."""
    entries = [
        Entry(
            entry.peer,
            entry.phase,
            entry.kind,
            "sent" if entry.direction == "sent" else "received",
            entry.payload_bytes,
            entry.message_bytes,
            entry.messages,
        )
        for entry in report.ledger
    ]
    return entries, [
        TcpCount(count.peer, count.sent_bytes, count.received_bytes) for count in report.tcp
    ]


def metrics_of(report: control_pb2.Report) -> dict[str, dict[str, float]] | None:
    """Reads the reported metrics, {split: {name: value}}; returns None if they have another
    format.
    """
    try:
        metrics = json.loads(report.metrics_json or "{}")
        return {
            str(split): {str(name): number(value) for name, value in values.items()}
            for split, values in metrics.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def privacy_of(report: control_pb2.Report) -> Privacy | None:
    """Reads a party's report on differential privacy; returns None if it is empty or has another
    format.
    """
    try:
        return Privacy.model_validate_json(report.privacy_json) if report.privacy_json else None
    except ValueError:
        return None


def worth_of(report: control_pb2.Report) -> Worth | None:
    """Reads a party's report on the parties' contributions to the result; returns None if it is
    empty or has another format.
    """
    try:
        return Worth.model_validate_json(report.worth_json) if report.worth_json else None
    except ValueError:
        return None


def arithmetic_of(report: control_pb2.Report) -> Arithmetic | None:
    """Reads a party's report on its arithmetic (processor and libraries); returns None if it is
    empty or has another format.
    """
    try:
        text = report.arithmetic_json
        return Arithmetic.model_validate_json(text) if text else None
    except ValueError:
        return None


def exchanges_of(report: control_pb2.Report) -> list[ExchangeSummary] | None:
    """Reads a party's report on its phases' exchanges; returns None if it has another format."""
    try:
        return TypeAdapter(list[ExchangeSummary]).validate_json(report.exchanges_json or "[]")
    except ValueError:
        return None


def absences_of(report: control_pb2.Report) -> list[Absence] | None:
    """Reads a party's report on steps that were computed without some party; returns None if it has
    another format.
    """
    try:
        return TypeAdapter(list[Absence]).validate_json(report.absences_json or "[]")
    except ValueError:
        return None


def times_of(report: control_pb2.Report) -> list[PhaseTimes] | None:
    """Reads a party's report on how it spent its time; returns None if it has another format."""
    try:
        return TypeAdapter(list[PhaseTimes]).validate_json(report.times_json or "[]")
    except ValueError:
        return None


def get_stop_error(
    member: Member, failure: failure_pb2.Failure, active: str, roster: Collection[str]
) -> PeerError | None:
    """Returns the error with which a party stops the run; None if it only repeats another party's
    error.

    The active party receives the other parties' data, so it may name another party as the cause. A
    passive party can only name itself.

    Raises PeerError if the party failed before it joined. The party may be started again, so the
    others keep waiting for it.
    """
    sender, text = member.name, clean(failure.message)
    try:
        code = Code(failure.code)
    except ValueError:
        code = Code.INTERNAL
    if not member.join.role:
        error = PeerError(code, text, party=sender)
        raise error.privately(f"{sender} cannot take part: {text}")
    if code is Code.INTERRUPTED:
        code = Code.ABORTED
    # The party ends because of another party, which reports the cause itself.
    elif code is Code.ABORTED and failure.party != sender:
        return None
    is_loss = code in (Code.PARTY_LOST, Code.STEP_TIMEOUT)
    # The sender exchanges no data with the lost party. The active party or the server reports the
    # loss.
    if is_loss and not _exchanges_data(sender, failure.party, active, roster):
        return None
    may_blame = sender == active and failure.party in roster
    error = PeerError(code, text, party=failure.party if may_blame else sender)
    return error.privately(f"{sender} stopped the run: {text}")


def _exchanges_data(name: str, missed: str, active: str, roster: Collection[str]) -> bool:
    """Returns whether ``name`` exchanges data with ``missed``. Passive parties exchange no data
    with each other.
    """
    return name == active or missed in ("", name, active) or missed not in roster
